"""Model files: what a model is, where its files lie, and how its weights are read."""
