"""The gates of feed-forward layers, by the activations that models name."""

from __future__ import annotations

from typing import Final, Protocol

from kernels.interface import Float32Array
from kernels.reference.clamped_mul import clamped_mul
from kernels.reference.gelu_mul import gelu_mul
from kernels.reference.silu_mul import silu_mul


class GateMul(Protocol):
    """Write a(gate) · up, row by row, as `silu_mul`."""

    def __call__(
        self, gate_up: Float32Array, out: Float32Array, *, turn: int | None = None
    ) -> None:
        """Write it."""
        ...


GATE_MUL: Final[dict[str, GateMul]] = {
    "silu": silu_mul,
    "gelu": gelu_mul,
    "clamped": clamped_mul,
}
