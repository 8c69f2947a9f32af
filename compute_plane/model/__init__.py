"""Model files: what a model is, where its files lie, and how its weights are read.

    from a reference    loader (the one entry) → source, assets (the text side), errors;
                        same_vocabulary (of a draft model)
    hyperparameters     spec, spec_faults, architectures, heads, windows, caps, late_layers,
                        pooling, multipliers (Granite), falcon_multipliers, gemma4
    positions           rope, rope_scaling, exact_context
    MoE                 mixture, expert_layout, stacked_experts
    MLA                 latents, latent_layout
    layers with states  recurrence → delta_net, mamba2, short_convolution; recurrence_layout →
                        delta_net_layout, mamba2_layout, short_convolution_layout
    which tensors       layout, layout_checks, layout_parts, stored_names, nemotron_layout,
                        layer_inputs_layout (Gemma 4), layer_scale
    tensors             tensor, tensor_parts, tensor_factors, turned_heads
    adapters (LoRA)     adapter; adapter_files → peft_adapter, gguf_adapter → adapter_places
    number formats      dequantize, read_only_quants, mxfp4; quantize (one to another)
    GGUF                gguf → gguf_header, gguf_metadata; gguf_parts
    its keys            gguf_rope, gguf_windows, gguf_kv_heads, gguf_mixture, gguf_latents,
                        gguf_recurrence → gguf_delta_net, gguf_mamba2, gguf_lfm2;
                        gguf_gemma, gguf_gemma4, gguf_nemotron
    its tokenizer       gguf_tokenizer → pre_tokenizers, sentence_pieces, tokenizer_json
    Hugging Face        hf_config → hf_model_types, hf_text_part; hf_assets;
                        safetensors → stored_tensor
    config.json         hf_rope, hf_windows, hf_multipliers, hf_latents,
                        hf_recurrence → hf_delta_net, hf_lfm2, hf_granite4, hf_falcon_h1,
                        hf_nemotron; hf_gemma, hf_gemma4, hf_granite_swa, hf_minimax, hf_olmo3
    GPTQ, AWQ, …        group_config, group_parts → group_matrices → group_blocks
    float8              float8_config, float8_matrices
    files               mapped_file, json_file

Modules with `hf_` read what a config.json says, those with `gguf_` the same in the keys of a GGUF
file; `architectures` is the table of what runs.
"""
