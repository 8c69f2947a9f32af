"""From which layer on only those tokens go on whose output somebody wants (ADR 0043)."""

from __future__ import annotations

from compute_plane.model.spec import ModelSpec


def first_late_layer(spec: ModelSpec, first_layer: int = 0) -> int | None:
    """Return the layer behind whose keys and values nothing is written that later tokens read.

    Of those from `first_layer` on, counted from there; None: there is none. Where a state is the
    last that tokens leave it is the layer behind that, unless there is attention beside it: then
    states are written with the keys.
    """
    states = max(spec.layers_with_state(first_layer), default=-1)
    last = max(max(spec.layers_with_keys(first_layer), default=-1), states)
    if last == states and not spec.attends_beside_states:  # which a layer changes to its end
        last += 1
    return last - first_layer if first_layer <= last < spec.num_layers else None
