"""The multipliers of Falcon-H1, as what is computed anyway.

A layer multiplies what attention reads, its keys and what it gives; what Mamba-2 reads, each part
of its projection (z, x, b, c, d) and what it gives; gates of its MLP and what that gives; and the
model its embedding and its logits. GGUF files have all of it in their weights. Directories have it
beside them, in 16 bits as they are published, so that multiplying matrices would round them once
more. Most of it needs no matrix:

    z         is gated by SiLU, so the norm ahead has its factor n, and whatever reads it has n, too
    x, b, c   what they need beside n is in the convolution's weights, which are float32
    q, k      what they need is in the scale of scores
    gates     the norm ahead has their factor g, and so has what the MLP gives
    hidden states are 1/u of the model's, u being the MLP's factor over g, so that what it gives is
              added as it is; the norms' epsilon is 1/u² of the model's (as of Granite)
    logits    the weights of the last norm have their factor

What is left: values and d, both of small matrices, have what attention and time steps lack; the
norm behind Mamba-2, or where there is none its last matrix, what that lacks beside u
(`compute_plane.model.tensor_factors`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compute_plane.model.errors import ModelFileError
from compute_plane.model.multipliers import LEAST, MOST
from compute_plane.model.tensor_factors import TensorFactors

if TYPE_CHECKING:
    from pathlib import Path

    from compute_plane.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class FalconMultipliers:
    """What a model multiplies by.

    `embedding`: its rows; `logits`. `attention_in`, `ssm_in`: what attention and Mamba-2 read;
    `attention_out`, `ssm_out`: what they give. `keys`; `parts`: of Mamba-2's projection, z, x, b,
    c, d. `gates`, `mlp_out`: the MLP's gates, and what it gives.
    """

    embedding: float = 1.0
    logits: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    keys: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    parts: tuple[float, ...] = (1.0,) * 5
    gates: float = 1.0
    mlp_out: float = 1.0


def with_falcon_multipliers(path: Path, spec: ModelSpec, of: FalconMultipliers) -> ModelSpec:
    """Return the spec of a model with these multipliers; `spec`: the same without them.

    Raises ModelFileError for one that is out of bounds.
    """
    for field in dataclasses.fields(of):
        value = getattr(of, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if not LEAST <= each <= MOST:
                raise ModelFileError(
                    path, f"multipliers of {field.name} must be {LEAST:g} to {MOST:g}, got {each}"
                )
    if of == FalconMultipliers():
        return spec
    z, x, b, c, d = of.parts
    read, units = of.ssm_in * z, of.mlp_out / of.gates
    attended = of.attention_in / read
    return dataclasses.replace(
        spec,
        embedding_scale=of.embedding / units,
        score_scale=attended**2 * of.keys / math.sqrt(spec.head_dim),
        logits_scale=of.logits,
        rms_norm_eps=spec.rms_norm_eps / units**2,
        factors=TensorFactors(
            input_norm=read,
            mlp_norm=of.gates,
            values=attended * of.attention_out / units,
            steps=d / z,
            channels=(x / z, b / z, c / z),
            out=of.ssm_out / units,
        ),
    )
