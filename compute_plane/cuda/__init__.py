"""The executor for CUDA devices: torch for weights, products, memory and graphs, our kernels else.

    a step            executor (the `GPUExecutor`), batch_layout (rows that decode first), columns
                      (named arrays in one buffer, so that a step's inputs are one copy), staging
                      (the ring of host buffers), answers, step_times (of each kind of steps)
    decode            decode_steps (a short way) → decode_graphs (captured once for each batch size
                      of a ladder) → decode_inputs → table_updates (of block tables what is new);
                      decode_wants (what of the samples stays from step to step),
                      decode_under_way, last_samples
    the model         model (the walk through the layers) → mixers (attention, or a state in its
                      place), latent_mixer, expert_products, layer_inputs
    products          matrices, experts, layer_products → next_product (what is fetched ahead);
                      adapted_products → adapters (what rows with an adapter get besides)
    what comes out    sampling_step (logits to tokens and log-probabilities) → sampling_columns
                      (what is wanted), masks, embeddings (hidden states)
    weights           weight_plan (where they come from, in which format) → weights, planned_layer
                      → planned_mixers → planned_latents, planned_recurrences;
                      planned_feedforward, planned_layer_inputs, planned_adapters, planned_matrix
    memory            block_pools (KV pool and host pool: copies, swaps, digests), state_pool;
                      pool_size (how many of each) → largest_step
    operations        operations (what a device must compute, a Protocol), expert_operations,
                      latent_operations, operands
    on torch's CPU    reference_operations, reference_attention, reference_blocks,
                      reference_latents, reference_recurrences, reference_experts, reference_logits
    by our kernels    kernel_operations, attention_kernels, latent_kernels, recurrence_kernels,
                      delta_net_kernels, mamba2_kernels, dense_kernels, quantized_kernels,
                      expert_kernels, layer_input_kernels, logits_kernels; launchers
    runtime           drivers (streams, events, copies, graphs), cuda_driver
    building          build, devices
    on the host       host_layers, host_layers_build, host_layers_plan

Only this package imports torch; nothing else of the plane needs it to be installed.
"""
