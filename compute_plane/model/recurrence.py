"""Layers that keep a state of fixed size in place of keys and values, or beside them.

    DeltaNet           Gated DeltaNet          Qwen3-Next, Qwen3.5
    ShortConvolution   a gated convolution     LFM2
    Mamba2             Mamba-2                 Granite 4, Nemotron-H, Falcon-H1 beside attention

All kinds of them say the same. A model has one kind, alike in all layers that have it (ADR 0040).
"""

from __future__ import annotations

from typing import TypeAlias

from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.short_convolution import ShortConvolution

Recurrence: TypeAlias = DeltaNet | ShortConvolution | Mamba2
"""All have `layers`; `num_inputs`, what is computed of a token before it goes through the state;
`out_size`, what comes out of a token; `state_floats`, the elements of a layer's part of a state;
`num_parts`, the parts of a state that do not know of each other; and `faults`."""
