"""What kernels share whose variants have one parameter: a dtype, or the threads of a block."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.cuda.instructions.elements import VECTOR_LENGTHS
from kernels.cuda.variant import STORAGE_TYPES, require_multiple, require_one_of

WARP_THREADS = 32
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class VectorVariant:
    """A thread makes one vector of 16 bytes of a row; the parameter is the tensors' `dtype`.

    Raises UnsupportedVariantError for a dtype no kernel is written for.
    """

    dtype: str

    def __post_init__(self) -> None:
        require_one_of("dtype", STORAGE_TYPES, self.dtype)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128

    @property
    def element(self) -> str:
        """Type of a pointer to the tensors' elements."""
        return STORAGE_TYPES[self.dtype] + "*"

    def row_grid(self, num_rows: int, field: str, length: int) -> tuple[int, int, int]:
        """Return the grid over rows of `length` elements, which `field` is the name of.

        Raises UnsupportedVariantError if they are not whole vectors.
        """
        vector = VECTOR_LENGTHS[self.dtype]
        require_multiple(field, vector, length)
        return (num_rows, -(-length // (vector * self.threads)), 1)


@dataclass(frozen=True, slots=True)
class SampleVariant:
    """A block of threads takes one sample; the parameter is the number of its threads.

    Raises UnsupportedVariantError for what is not some whole warps.
    """

    threads: int = 512

    def __post_init__(self) -> None:
        require_multiple("threads", WARP_THREADS, self.threads, MAX_THREADS)

    def grid(self, num_samples: int) -> tuple[int, int, int]:
        """Return the launch grid."""
        return (num_samples, 1, 1)
