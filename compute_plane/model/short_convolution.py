"""The numbers of layers that have a gated convolution over few tokens in place of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_KERNEL_SIZE: Final = 8
CHANNEL_STEP: Final = 32
PART_CHANNELS: Final = 256
"""Channels that go through a state together."""


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """What layers have in place of attention: `kernels.reference.gated_convolution`.

    `channels`: as many as elements of a hidden state. `kernel_size`: tokens that it sees. `layers`:
    which have it.
    """

    channels: int
    kernel_size: int
    layers: frozenset[int]

    @property
    def num_inputs(self) -> int:
        """What is computed of a token before it: what is let in, what is let out, and x."""
        return 3 * self.channels

    @property
    def out_size(self) -> int:
        """What comes out of a token."""
        return self.channels

    @property
    def state_floats(self) -> int:
        """Elements of a layer's part of a state: the last rows that went in."""
        return (self.kernel_size - 1) * self.channels

    @property
    def num_parts(self) -> int:
        """Parts of a state that do not know of each other: runs of channels."""
        return -(-self.channels // PART_CHANNELS)

    def faults(self, num_layers: int) -> list[str]:
        """Return what makes these no layers of a model with so many, one line each; or nothing."""
        faults = []
        if self.channels % CHANNEL_STEP:
            faults.append(
                f"convolutions: hidden_size must be a multiple of {CHANNEL_STEP}, "
                f"got {self.channels}"
            )
        if not 2 <= self.kernel_size <= MAX_KERNEL_SIZE:
            faults.append(
                f"convolutions: kernel_size must be 2 to {MAX_KERNEL_SIZE}, got {self.kernel_size}"
            )
        if not self.layers < set(range(num_layers)):
            faults.append("convolutions: at least one of the model's layers must attend")
        return faults
