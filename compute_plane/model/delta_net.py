"""The numbers of layers that keep a state of fixed size in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_STATE_DIM: Final = 256
STATE_DIM_STEP: Final = 32
MAX_KERNEL_SIZE: Final = 8


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """What layers have in place of attention: Gated DeltaNet (`kernels.reference.delta_net`).

    `num_key_heads`, `num_value_heads`: a multiple of these; `key_dim`, `value_dim`: elements of a
    head. `kernel_size`: tokens that the convolution sees. `layers`: which have it. Value head j has
    key head j // (value heads / key heads), or where `value_heads_tiled` j mod key heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    layers: frozenset[int]
    value_heads_tiled: bool = False

    @property
    def key_size(self) -> int:
        """Width of all key heads together; that of all query heads is the same."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all value heads together; that of their gates is the same."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What goes through the convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size

    @property
    def num_inputs(self) -> int:
        """What is computed of a token before the state: q, k, v, z, b, a."""
        return self.channels + self.value_size + 2 * self.num_value_heads

    @property
    def out_size(self) -> int:
        """What comes out of a token: value heads side by side."""
        return self.value_size

    @property
    def state_floats(self) -> int:
        """Elements of a layer's part of a state, a multiple of 32."""
        memory = self.num_value_heads * self.key_dim * self.value_dim
        return (self.kernel_size - 1) * self.channels + memory

    @property
    def num_parts(self) -> int:
        """Parts of a state that do not know of each other: key heads, with their value heads."""
        return self.num_key_heads

    def faults(self, num_layers: int) -> list[str]:
        """Return what makes these no layers of a model with so many, one line each; or nothing."""
        limits = {
            "num_key_heads": 1 << 12,
            "num_value_heads": 1 << 12,
            "key_dim": MAX_STATE_DIM,
            "value_dim": MAX_STATE_DIM,
        }
        faults = []
        for field, maximum in limits.items():
            value = getattr(self, field)
            if not 1 <= value <= maximum:
                faults.append(f"linear attention: {field} must be 1 to {maximum}, got {value}")
        for field in ("key_dim", "value_dim"):
            value = getattr(self, field)
            if value % STATE_DIM_STEP:
                faults.append(
                    f"linear attention: {field} must be a multiple of {STATE_DIM_STEP}, got {value}"
                )
        if self.num_key_heads >= 1 and self.num_value_heads % self.num_key_heads:
            faults.append(
                f"linear attention: num_value_heads must be a multiple of num_key_heads, "
                f"got {self.num_value_heads} and {self.num_key_heads}"
            )
        if not 2 <= self.kernel_size <= MAX_KERNEL_SIZE:
            faults.append(
                f"linear attention: kernel_size must be 2 to {MAX_KERNEL_SIZE}, "
                f"got {self.kernel_size}"
            )
        if not self.layers < set(range(num_layers)):
            faults.append("linear attention: at least one of the model's layers must attend")
        return faults
