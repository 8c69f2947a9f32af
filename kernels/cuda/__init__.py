"""Numba-CUDA kernels: one operation a file, plain functions, built and launched without a runtime.

    attention_decode   the kernel: plain Python that Numba compiles for the GPU
    intrinsics         the few instructions Numba does not offer by itself
    variant            what a kernel tells the builder and the launcher about itself
    build              plain function → PTX → machine code, cached by source hash
    launch             machine code → driver module → launch on a stream
    check              `python -m kernels.cuda.check`: compile, report registers and spills
    errors             what can go wrong, typed

Nothing here touches a driver when imported, and `build` and `check` need no GPU at all.
"""
