"""What adds the records of layers to a table, for one kind of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compute_plane.cpu.expert_buffers import ExpertBuffers
from compute_plane.cpu.expert_records import ExpertRecords
from compute_plane.cpu.product_records import ProductRecords
from compute_plane.cpu.row_buffers import RowBuffers
from kernels.cpu.latent_operands import HEAD_CALL_BYTES

if TYPE_CHECKING:
    from compute_plane.cpu.adapter_records import AdapterRecords
    from compute_plane.cpu.step_table import StepTable


@dataclass(frozen=True, slots=True)
class TokenRecords:
    """What adds records for one kind of tokens, those of prompts or others.

    `experts`: of models that have any; `heads`: of models whose heads have products of their own.
    """

    products: ProductRecords
    experts: ExpertRecords | None
    heads: ProductRecords | None

    @property
    def scratch_bytes(self) -> int:
        """What a worker needs."""
        of_experts = 0 if self.experts is None else self.experts.scratch_bytes
        of_heads = 0 if self.heads is None else self.heads.scratch_bytes + HEAD_CALL_BYTES
        return max(self.products.scratch_bytes, of_experts, of_heads)


def token_records(
    table: StepTable,
    rows: RowBuffers,
    experts: ExpertBuffers | None,
    rows_of_heads: RowBuffers | None,
    adapters: AdapterRecords | None = None,
    *,
    of_prompt: bool,
) -> TokenRecords:
    """Return what adds records to a table; the buffers are None for a model without such parts.

    `adapters`: what adds to products, of pieces with adapters.
    """
    products = ProductRecords(table, rows, of_prompt=of_prompt, adapters=adapters)
    of_experts = of_heads = None
    if experts is not None:
        of_experts = ExpertRecords(table, experts, rows, products, of_prompt=of_prompt)
    if rows_of_heads is not None:
        of_heads = ProductRecords(table, rows_of_heads, of_prompt=of_prompt, fetches=False)
    return TokenRecords(products, of_experts, of_heads)
