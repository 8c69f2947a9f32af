"""The operations compiled for CPUs with Numba.

Every kernel is compiled at import for one fixed signature (C-contiguous float32), so that nothing
is ever compiled while a batch runs, and releases the GIL. None starts threads: a caller that wants
several cuts the rows (or attention items) and calls from each.

On order: float sums may be reassociated by the compiler (`reassoc`) only inside loops whose length
the row alone decides (E, D, F, its own context). The machine code, and so the order, is then a
function of that length: the law of `kernels.interface` holds.
"""
