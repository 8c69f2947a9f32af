"""The KV block pool and what fits into memory."""
