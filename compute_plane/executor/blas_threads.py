"""The number of threads of NumPy's BLAS.

NumPy has no call for it and OpenBLAS reads its environment only while it is loaded, so the setter
of the OpenBLAS inside the NumPy wheel is called directly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

SETTERS: Final = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads")
"""The name in NumPy's own wheels (64-bit integers, prefixed), and that of a plain build."""


def find_blas_thread_setter() -> Callable[[int], None] | None:
    """Return the function that sets BLAS's number of threads in the whole process.

    None where NumPy was built against another BLAS; that keeps its own default.
    """
    for library in Path(np.__file__).parent.with_name("numpy.libs").glob("*openblas*"):
        loaded = ctypes.CDLL(str(library))  # the copy NumPy has loaded: same path, same handle
        for name in SETTERS:
            function = getattr(loaded, name, None)
            if function is not None:
                function.argtypes, function.restype = [ctypes.c_int], None
                setter: Callable[[int], None] = function
                return setter
    return None
