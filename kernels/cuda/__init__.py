"""Numba-CUDA kernels: one operation a file, plain functions, built and launched without a runtime.

    operations         every operation there is, and its variants
    attention_variant  what attention is written for
    attention_decode   paged attention of one query token a row (attention_decode_tensor, _pool,
                       _masks, _room and _float32, attention_chunks, attention_partials,
                       attention_merge)
    attention_prefill  the same for prompts: ragged, causal, over cached blocks
                       (attention_prefill_tensor, _layout, _pool, _window and _float32,
                       attention_tiles)
    attention_wide     both with heads of 512 elements (attention_wide_tensor,
                       attention_shared_tile, _layout, _results, _float32 and
                       _float32_tile)
    latent_attention   both over latents (latent_attention_tensor, _layout, and the shared ones)
    quantized_kv       a pool of eight bits a number
    rope_write_kv      rotation of queries and keys, keys and values into the pool (head_norms,
                       head_scales)
    rms_norm, gate_mul, relu2, embedding, copy_blocks
    gate_apart         a gate whose other half lies elsewhere
    short_convolution  what a Gated DeltaNet layer makes of a token before its state (step_sizes)
    delta_rule         tokens through the states of their rows (delta_rule_columns,
                       delta_rule_stages; recurrent_states: where those lie)
    gated_norm         what comes out of its heads, normalised and gated
    gated_convolution  tokens through the states of layers with a gated convolution
                       (state_convolution)
    mamba2_inputs      what a Mamba-2 layer makes of a token before its memory (state_convolution,
                       step_sizes)
    selective_scan     tokens through that (delta_rule_columns, delta_rule_stages)
    gated_row_norm     what comes out of its heads, gated and normalised together
    gate_attended      what attention gave, gated
    cap_logits         logits that stay below a cap
    adjust_logits      logit bias and penalties
    sampling           the token of each sample (largest_logits, sampling_weights,
                       sampling_shortlist, weight_search, exact_exponential, philox)
    logprobs           log-probabilities of tokens (largest_logits, logprob_sums)
    row_splits         a row divided among several blocks of threads
    block_reductions   what a block of threads agrees on
    long_rows          reading a row by few threads
    lanes              which lane of which warp a thread is, sums over a warp
    head_lanes         a head on the lanes of a warp
    dense_matmul       few rows times weights of 16 bits, with what a layer does before and after
                       (dense_matmul_tensor, dense_sums)
    quantized_matmul   rows times weights of four to eight bits (quantized_formats, _layout,
                       _strands, quantized_matmul_tensor, _operands, _sums; k_quant_layout)
    quantized_rows     rows of such a matrix, unpacked
    instructions/      the machine instructions Numba does not offer by itself
    variant            what a kernel tells the builder and the launcher about itself
    plain_variants     variants of one parameter
    build              plain function → PTX → machine code, cached by source hash
    fitted_ptx         PTX as the assembler of a capability takes it
    build_ahead        many of them on all cores, or taken over from elsewhere
    launch             machine code → driver module → launch on a stream
    check              `python -m kernels.cuda.check`: hold machine code to its promises
    disassembly        which instructions machine code has
    errors             what can go wrong, typed

Nothing here touches a driver when imported, and `build` and `check` need no GPU at all.

How to write one: a frozen dataclass of compile-time parameters (its *variant*), and a factory that
binds them and returns the kernel, a plain function. Arrays of a thread are `cuda.local.array` with
sizes and indices known at compile time: the compiler unrolls the loops over them and makes them
registers, which `check` proves. The specification is a module of `kernels.reference`; the problems
a kernel is tried on are drawn by `bench.gpu.cases`, for the simulator (`tests.simt`) and for a GPU
alike.
"""
