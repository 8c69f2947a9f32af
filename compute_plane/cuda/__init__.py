"""The executor for CUDA devices: torch for weights, products, memory and graphs, our kernels else.

    executor               a batch in, its answer out: the `GPUExecutor`
    batch_layout           a batch as the device wants it: rows that decode first, columns, wants
    columns                named arrays in one buffer, so that a step's inputs are one copy
    staging                the ring of host buffers of the steps under way
    model, weights         the walk through the layers; weight_plan: where they come from
    mixers                 attention of a layer, or Gated DeltaNet in its place
    sampling_step          logits → tokens and log-probabilities; sampling_columns: what is wanted
    answers                what came back from the device → `ExecutionOutput`
    block_pools            KV pool and host pool: copies, swaps, digests; state_pool: states
    pool_size              how many of both: what weights, the largest_step and graphs leave
    decode_graphs          decode steps captured once for each batch size of a ladder
    decode_steps           steps in which every row decodes, by a short way to the graphs' inputs
    decode_wants           what their samples want, and what of it stays from step to step
    operations             what a device must compute, as a Protocol
    reference_operations   the same on torch's CPU device, by `kernels.reference`
    kernel_operations      the same by `kernels.cuda`; launchers: how a kernel is launched
    drivers, cuda_driver   streams, events, copies, graphs: of a CPU, of a CUDA device
    build, devices         from the configuration to an executor

Only this package imports torch; nothing else of the plane needs it to be installed.
"""
