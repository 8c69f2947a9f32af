"""Adapters on a device: what they add to the products of a step's tokens.

    outputs[tokens] += (x[tokens] · downᵀ) · upᵀ        x [T, K], down [R, K], up [N, R]

The matrices of a projection that an adapter changes are one pair, for their inputs are the same:

    down   │ of q │        up   │ of q │  0   │     rows of q
           │ of v │             │  0   │  0   │     rows of k, which it leaves alone
                                │  0   │ of v │     rows of v

Rows lie sorted by adapter among those that decode, and among the others (`batch_layout`), so an
adapter's tokens are two runs of a step at most: views of x and of outputs, two launches each, and
nothing is sent to the device for them. Rows of no adapter are not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from compute_plane.cuda.matrices import dense_product

if TYPE_CHECKING:
    from torch import Tensor

    from compute_plane.cuda.matrices import Projection
    from compute_plane.executor.adapter_runs import AdapterRuns


@dataclass(frozen=True, slots=True, eq=False)
class DevicePair:
    """What an adapter adds to a projection: `down` [R, K], `up` [N, R], in a step's dtype.

    The rows of `up` are where the projection's outputs are.
    """

    down: Tensor
    up: Tensor

    def add(self, outputs: Tensor, x: Tensor) -> None:
        """Add it to some tokens' outputs [n, N] of rows x [n, K]; in float32 if outputs are."""
        between = x @ self.down.t()
        if outputs.dtype == between.dtype:
            outputs.addmm_(between, self.up.t())  # rounded once, with the product that was there
        else:
            outputs += dense_product(between, self.up, outputs.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAdapters:
    """All adapters of a model. `pairs`: by what they change, of each adapter, if it does."""

    pairs: Mapping[Projection, Sequence[DevicePair | None]]
    num_adapters: int

    def changes(self, projection: Projection, runs: AdapterRuns) -> list[Change]:
        """Return what those of a step's tokens add to a projection's outputs; mostly nothing."""
        pairs = self.pairs.get(projection) if runs else None
        if pairs is None:
            return []
        found = ((pairs[run.adapter], run) for run in runs)
        return [Change(pair, run.first, run.end) for pair, run in found if pair is not None]

    def largest(self) -> DeviceAdapters:
        """Return one adapter, of the largest pair of each projection: none takes more memory."""
        found: dict[Projection, Sequence[DevicePair | None]] = {}
        for projection, pairs in self.pairs.items():
            there = [pair for pair in pairs if pair is not None]
            found[projection] = [max(there, key=lambda pair: len(pair.down), default=None)]
        return DeviceAdapters(found, 1)


class Change(NamedTuple):
    """What an adapter adds to the outputs of tokens from `first` up to `end`."""

    pair: DevicePair
    first: int
    end: int


def add_changes(changes: Sequence[Change], outputs: Tensor, x: Tensor) -> None:
    """Add all of them to outputs [T, N] of rows x [T, K]."""
    for pair, first, end in changes:
        pair.add(outputs[first:end], x[first:end])
