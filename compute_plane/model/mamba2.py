"""The numbers of layers with Mamba-2 in place of attention, or beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_SIZE: Final = 256
SIZE_STEP: Final = 32
HEAD_STEP: Final = 16
MAX_HEADS: Final = 1 << 12
MAX_KERNEL_SIZE: Final = 8


@dataclass(frozen=True, slots=True)
class Mamba2:
    """What layers have in place of attention, or beside it: `kernels.reference.mamba2`.

    `num_heads`, `head_dim`: of what goes through the state; `state_size`: elements of b and of c,
    which the heads of each of `num_groups` have in common. `kernel_size`: tokens that the
    convolution sees. `norm_eps`: of the norm behind, if it `has_norm`. `layers`: which have it.
    """

    num_heads: int
    head_dim: int
    state_size: int
    kernel_size: int
    norm_eps: float
    layers: frozenset[int]
    num_groups: int = 1
    has_norm: bool = True

    @property
    def inner_size(self) -> int:
        """Width of all heads together; that of their gates is the same."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """What goes through the convolution: x, b, c."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def num_inputs(self) -> int:
        """What is computed of a token before the state: x, b, c, z, d."""
        return self.channels + self.inner_size + self.num_heads

    @property
    def out_size(self) -> int:
        """What comes out of a token: heads side by side."""
        return self.inner_size

    @property
    def state_floats(self) -> int:
        """Elements of a layer's part of a state, a multiple of 32."""
        return (self.kernel_size - 1) * self.channels + self.inner_size * self.state_size

    @property
    def num_parts(self) -> int:
        """Parts of a state that do not know of each other: heads."""
        return self.num_heads

    def faults(self, num_layers: int) -> list[str]:
        """Return what makes these no layers of a model with so many, one line each; or nothing."""
        faults = []
        if not 1 <= self.num_heads <= MAX_HEADS:
            faults.append(f"Mamba-2: num_heads must be 1 to {MAX_HEADS}, got {self.num_heads}")
        for field, step in (("head_dim", HEAD_STEP), ("state_size", SIZE_STEP)):
            value = getattr(self, field)
            if value % step or not 1 <= value <= MAX_SIZE:
                faults.append(
                    f"Mamba-2: {field} must be a multiple of {step} up to {MAX_SIZE}, got {value}"
                )
        groups = self.num_groups
        if groups < 1 or self.num_heads % groups or self.inner_size // groups % SIZE_STEP:
            faults.append(
                f"Mamba-2: num_groups must divide {self.num_heads} heads, and a group's heads "
                f"together have a multiple of {SIZE_STEP} elements, got {groups}"
            )
        if not 2 <= self.kernel_size <= MAX_KERNEL_SIZE:
            faults.append(
                f"Mamba-2: kernel_size must be 2 to {MAX_KERNEL_SIZE}, got {self.kernel_size}"
            )
        if not 0 < self.norm_eps < 1:
            faults.append(f"Mamba-2: the norm's epsilon must be in (0, 1), got {self.norm_eps}")
        if not self.layers <= set(range(num_layers)):
            faults.append(f"Mamba-2: layers must be those of {num_layers}, got {max(self.layers)}")
        return faults
