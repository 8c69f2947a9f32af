"""The executor for CPUs: weights packed for its kernels, a step as one walk through a table."""
