"""The executor for CPUs: weights packed for its kernels, a step as one walk through a table.

    building        build → kernel_cache (machine code on disk) → kernel_clean_up; kernel_notices
    a step          executor (the `GPUExecutor`), step_headers (what lies where), state_rows;
                    pieces (tokens of prompts and generated ones apart) → step_parts;
                    late_tokens (those that go through the last layers alone);
                    decode_steps (the short way of decode)
    the table       model_table (a model's records) → step_table (in memory); thread_team (walks
                    through it)
    records of      token_records (one kind of tokens); mixer_records → recurrence_records (Gated
                    DeltaNet, convolutions, Mamba-2), latent_records (MLA) → attention_records;
                    expert_records (MoE) → expert_buffers; layer_input_records, hidden_reads
    products        product_records → row_buffers (formats of rows); adapter_records (what
                    adapters add to them), adapter_runs (of which tokens)
    logits          logits_records, sample_records
    packed weights  packed_weights → layer_plan → packing_plan → packing_jobs; packed_layers,
                    packed_latents, packed_recurrences, packed_adapters

The kernels are `kernels.cpu`. `build` chooses the instruction set, which must be settled before
any of them is imported: so it imports the others once that is done.
"""
