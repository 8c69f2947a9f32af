"""What a norm or a gate is told about the product behind it, so that its weights are on their way.

Only of products that the library computes: ours begin to fetch by themselves (ADR 0031). What there
is to gain is a microsecond or two a product, while the memory has nothing to do
(`kernels.cuda.fetched_weights`); a product of many rows has other worries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kernels.cuda.fetched_weights import NOTHING, UNIT_BYTES, FetchPlan, plan_fetch

if TYPE_CHECKING:
    from torch import Tensor

MOST_ROWS: Final = 256
"""Of a step whose products take as long as reading their weights."""


@dataclass(frozen=True, slots=True)
class NextProduct:
    """A product of the library's with `weight` [N, K], whose inputs are split into `num_parts`."""

    weight: Tensor
    num_parts: int = 1

    def fetch_plan(self, num_rows: int) -> FetchPlan:
        """Return what to fetch ahead of so many rows."""
        weight = self.weight
        is_placed = weight.is_contiguous() and weight.data_ptr() % UNIT_BYTES == 0
        if num_rows > MOST_ROWS or not is_placed:
            return NOTHING
        num_outputs, num_inputs = weight.shape
        chunks, length = num_outputs * self.num_parts, num_inputs // self.num_parts
        return plan_fetch(chunks, length, weight.element_size())
