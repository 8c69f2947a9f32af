"""What layers with attention over latents have, packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compute_plane.model import latent_layout, layout
from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.tensor_parts import rows_of_tensor

if TYPE_CHECKING:
    from compute_plane.cpu.packed_layers import PackedMatrix
    from compute_plane.cpu.packing_plan import PackingPlan
    from compute_plane.model.spec import ModelSpec
    from compute_plane.model.tensor import RawTensor


@dataclass(frozen=True, slots=True)
class PackedHeads:
    """A matrix for each head, packed alike, `stride_bytes` apart. `first`: the first head's."""

    first: PackedMatrix
    stride_bytes: int
    num_heads: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return (self.num_heads - 1) * self.stride_bytes + self.first.num_bytes

    def moved(self, by: int) -> PackedHeads:
        """Return them so many bytes further on."""
        return replace(self, first=self.first.moved(by))


@dataclass(frozen=True, slots=True)
class PackedLatents:
    """Attention of a layer over latents; letters: `compute_plane.model.latents`.

    `latents`: [R + P, hidden]. `queries`: [H·(N + P), hidden], or of models that have a smaller
    product before, `first_queries`, [query rank, hidden], of that. `query_norm`, `latent_norm`:
    addresses of float32 [query rank], [R]. `keys`: [R, N] of each head, `values`: [V, R]. `o`: of
    what heads give.
    """

    latents: PackedMatrix
    latent_norm: int
    queries: PackedMatrix
    keys: PackedHeads
    values: PackedHeads
    o: PackedMatrix
    first_queries: PackedMatrix | None = None
    query_norm: int | None = None

    @property
    def o_bias(self) -> None:
        """There is none."""
        return None

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """All matrices, of the first head for all of them."""
        first = () if self.first_queries is None else (self.first_queries,)
        heads = self.keys.first, self.values.first
        return (self.latents, *first, self.queries, *heads, self.o)

    def moved(self, by: int) -> PackedLatents:
        """Return it so many bytes further on."""
        first, norm = self.first_queries, self.query_norm
        return PackedLatents(
            latents=self.latents.moved(by),
            latent_norm=self.latent_norm + by,
            queries=self.queries.moved(by),
            keys=self.keys.moved(by),
            values=self.values.moved(by),
            o=self.o.moved(by),
            first_queries=None if first is None else first.moved(by),
            query_norm=None if norm is None else norm + by,
        )


def plan_latents(
    plan: PackingPlan, spec: ModelSpec, tensor: Callable[[str], RawTensor]
) -> PackedLatents:
    """Plan a layer's attention. `tensor`: by its role. Raises UnsupportedModelError."""
    of = spec.latents
    if of is None:
        raise ValueError("the model has no latents")
    first, norm, queries = None, None, latent_layout.QUERY
    if of.query_rank:
        first = plan.matrix([tensor(latent_layout.QUERY_FIRST)])
        norm = plan.vector(tensor(latent_layout.QUERY_NORM))
        queries = latent_layout.QUERY_SECOND
    return PackedLatents(
        latents=plan.matrix([tensor(latent_layout.LATENT)]),
        latent_norm=plan.vector(tensor(latent_layout.LATENT_NORM)),
        queries=plan.matrix([tensor(queries)]),
        keys=_plan_heads(plan, tensor(latent_layout.KEYS), spec.num_heads),
        values=_plan_heads(plan, tensor(latent_layout.VALUES), spec.num_heads),
        o=plan.matrix([tensor(layout.OUTPUT)]),
        first_queries=first,
        query_norm=norm,
    )


def _plan_heads(plan: PackingPlan, tensor: RawTensor, num_heads: int) -> PackedHeads:
    """Plan the matrices of all heads, whose rows follow each other in `tensor`."""
    if plan.input_order(tensor) is not None:
        raise UnsupportedModelError(
            tensor.path,
            f"matrices of heads whose inputs are sorted (act-order) are not supported: "
            f"{tensor.name}",
        )
    rows = tensor.shape[0] // num_heads
    start = plan.num_bytes
    first = plan.matrix([rows_of_tensor(tensor, 0, rows)])
    stride_bytes = plan.num_bytes - start
    for head in range(1, num_heads):
        plan.matrix([rows_of_tensor(tensor, head * rows, rows)])
    return PackedHeads(first, stride_bytes, num_heads)
