"""Attention of a layer over latents, as it will lie on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compute_plane.cuda.planned_matrix import (
    Placed,
    PlannedMatrix,
    projection_of,
    values_of,
)
from compute_plane.cuda.weights import DeviceLatents
from compute_plane.model import latent_layout, layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from compute_plane.cuda.planned_recurrences import Joined, PlansVectors
    from compute_plane.model.spec import ModelSpec
    from compute_plane.model.tensor import RawTensor


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLatents:
    """As in `DeviceLatents`; `num_heads`: whose matrices `keys` and `values` hold."""

    latents: tuple[PlannedMatrix, ...]
    latent_norm: PlannedMatrix
    queries: tuple[PlannedMatrix, ...]
    keys: PlannedMatrix
    values: PlannedMatrix
    o: tuple[PlannedMatrix, ...]
    num_heads: int
    first_queries: tuple[PlannedMatrix, ...] = ()
    query_norm: PlannedMatrix | None = None

    @property
    def o_bias(self) -> None:
        """There is none."""
        return None

    @property
    def vectors(self) -> tuple[PlannedMatrix, ...]:
        """Everything that no product of rows is made with: heads have products of their own."""
        norms = () if self.query_norm is None else (self.query_norm,)
        return (self.latent_norm, *norms, self.keys, self.values)

    @property
    def matrices(self) -> tuple[PlannedMatrix, ...]:
        """Everything that rows are multiplied with."""
        return (*self.latents, *self.first_queries, *self.queries, *self.o)

    def at(self, placed: Placed) -> DeviceLatents:
        """Return it where it lies."""
        first, norm = self.first_queries, self.query_norm
        keys, values = (
            values_of(placed(part)).view(self.num_heads, -1, part.num_inputs)
            for part in (self.keys, self.values)
        )
        return DeviceLatents(
            latents=projection_of(placed, self.latents),
            latent_norm=values_of(placed(self.latent_norm)).view(-1),
            queries=projection_of(placed, self.queries),
            keys=keys,
            values=values,
            o=projection_of(placed, self.o),
            first_queries=projection_of(placed, first) if first else None,
            query_norm=None if norm is None else values_of(placed(norm)).view(-1),
        )


def plan_latents(
    spec: ModelSpec,
    layer: int,
    tensor: Callable[[str], RawTensor],
    joined: Joined,
    vector: PlansVectors,
) -> PlannedLatents:
    """Plan what a layer has. `tensor`: by its role. `vector`: plans what is not quantised."""
    of = spec.latents
    if of is None:
        raise ValueError("the model has no latents")

    def plain(role: str) -> PlannedMatrix:
        return vector(layout.layer_tensor(layer, role))

    has_two = of.query_rank > 0
    queries = latent_layout.QUERY_SECOND if has_two else latent_layout.QUERY
    return PlannedLatents(
        latents=joined(tensor(latent_layout.LATENT)),
        latent_norm=plain(latent_layout.LATENT_NORM),
        queries=joined(tensor(queries)),
        keys=plain(latent_layout.KEYS),
        values=plain(latent_layout.VALUES),
        o=joined(tensor(layout.OUTPUT)),
        num_heads=spec.num_heads,
        first_queries=joined(tensor(latent_layout.QUERY_FIRST)) if has_two else (),
        query_norm=plain(latent_layout.QUERY_NORM) if has_two else None,
    )
