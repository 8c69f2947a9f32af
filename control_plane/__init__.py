"""The control plane: tokenizer, scheduler, KV page tables, client APIs. No CUDA, no Numba."""
