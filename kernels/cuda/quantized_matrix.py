"""A quantised matrix taken apart: what `quantized_layout` packs and unpacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [N, K], its numbers by what has them in common.

    `quants`: [N, K], int8, the offset taken off; of floats of four bits what they are, doubled, of
    eight bits what they are, float32. `scales`: float16 [N, K / span]; of floats float32, for four
    bits half of what they are stored as. `minima`, `zeros` (int8): the same shape, or None where
    the format has none. Of shared formats scales and minima are d and m, float16 [N, K / unit],
    `whole_scales` s, [N, K / run], of 6 bits uint8 and of 8 int8, and `whole_minima` n, uint8
    [N, K / span].
    """

    quants: Array
    scales: Array
    minima: Array | None = None
    zeros: Array | None = None
    whole_scales: Array | None = None
    whole_minima: Array | None = None

    @property
    def operands(self) -> tuple[Array, Array, Array | None]:
        """What `kernels.reference.quantized_matmul` wants: quants, scales and minima.

        Zero points are taken off the quants, [N, K], int8, int16 or float32; scales of shared
        formats are d · s and minima m · n, exactly, float32.
        """
        quants, minima = self.quants, self.minima
        if self.zeros is not None:
            repeats = quants.shape[1] // self.zeros.shape[1]
            quants = quants - np.repeat(self.zeros, repeats, axis=1).astype(np.int16)
        if self.whole_scales is None:
            return quants, self.scales, minima
        if minima is not None and self.whole_minima is not None:
            minima = _times(minima, self.whole_minima)
        return quants, _times(self.scales, self.whole_scales), minima


def _times(shared: Array, whole: Array) -> Array:
    """Return float16 of units times the integers of each, float32."""
    in_units = whole.reshape(*shared.shape, -1)
    product: Array = shared[..., None].astype(np.float32) * in_units
    return product.reshape(whole.shape)
