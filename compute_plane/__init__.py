"""The compute plane: weights, KV block pool, kernels. One process per device."""
