"""Windows of attention: layers in which a token sees the last W positions up to its own, no more.

    positions   0 … p − W │ p − W + 1 … p │ p + 1 …
                 not seen │          seen │ not seen        of the token at p

Up to W tokens such a layer is as any other. So a model whose windows no context exceeds has none,
and an executor that computes none is right as long as contexts end at W.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from compute_plane.model.errors import ModelFileError
from compute_plane.model.spec import MAX_LAYERS, ModelSpec


def with_windows(
    path: Path, spec: ModelSpec, window: int | None, layers: Iterable[int], key: str
) -> ModelSpec:
    """Return the spec of a model with windows of `window` positions in `layers`.

    `spec`: the same without them. `window`: None: there are none. `key`: what the file calls it.
    Raises ModelFileError for a window of nothing.
    """
    layers = frozenset(layers)
    if window is None or not layers or window >= spec.context_length:
        return spec
    if window < 1:
        raise ModelFileError(path, f"{key} must be at least 1, got {window}")
    return dataclasses.replace(spec, window=window, layers_with_window=layers)


def turning_in_windows(spec: ModelSpec, window: int | None, layers: Iterable[int]) -> ModelSpec:
    """Return the spec of a model that turns heads in `layers` with windows alone (EXAONE 4).

    `window`: None: the model has none, and turns them in all.
    """
    if window is None:
        return spec
    others = frozenset(range(min(spec.num_layers, MAX_LAYERS))) - frozenset(layers)
    return dataclasses.replace(spec, layers_without_rope=others)


def turning_unscaled(spec: ModelSpec, theta: float, layers: frozenset[int]) -> ModelSpec:
    """Return the spec of a model that has a base of its own in `layers`, and no scaling (OLMo 3).

    Where that is what its other layers have, nothing changes.
    """
    if not layers or (spec.rope_scaling is None and theta == spec.rope_theta):
        return spec
    return dataclasses.replace(spec, local_rope_theta=theta, layers_with_local_rope=layers)


def layers_of_period(period: int, num_layers: int) -> list[int]:
    """Return all layers but every `period`-th; all for 0."""
    return [layer for layer in range(num_layers) if period == 0 or (layer + 1) % period]


def without_windows(spec: ModelSpec) -> ModelSpec:
    """Return the spec for an executor in which every token sees all before it."""
    if spec.window is None:
        return spec
    return dataclasses.replace(
        spec, context_length=spec.window, window=None, layers_with_window=frozenset()
    )
