"""Executors run one batch; each owns nothing but what it is given: weights, pool, device."""
