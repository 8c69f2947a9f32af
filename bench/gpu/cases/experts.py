"""Mixtures of experts: router logits, choosing and sorting, adding up what experts give.

Their products are in `expert_products`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from bench.gpu.case import TOLERANCES, Array, Case, Expected, Launch, poison, to_float64, to_stored
from kernels.cuda.add_experts import AddExpertsVariant
from kernels.cuda.expert_tiles import TILE_NUMBERS, most_tiles
from kernels.cuda.instructions.elements import VECTOR_LENGTHS
from kernels.cuda.route_experts import RouteExpertsVariant
from kernels.cuda.router_logits import TOKENS, RouterLogitsVariant
from kernels.reference.mixture import add_experts, route, sort_pairs

WIDTHS = (8, 16, 32)
"""Pairs of a tile."""
SCALE = 1.75
"""Of weights."""


def draw_router_logits(variant: RouterLogitsVariant, seed: int) -> list[Case]:
    """A round of a warp and a bit, tokens and experts that fill no block; the last token alone."""
    rng = np.random.default_rng(seed)
    num_tokens, num_experts = TOKENS[-1] + 3, 9
    hidden_size = VECTOR_LENGTHS[variant.dtype] * 35
    x = to_stored(variant.dtype, rng.standard_normal((num_tokens, hidden_size)))
    router = rng.standard_normal((num_experts, hidden_size)) / np.sqrt(hidden_size)
    router = router.astype(np.float32)
    biases = rng.standard_normal(num_experts).astype(np.float32)
    exact = to_float64(variant.dtype, x) @ router.astype(np.float64).T
    if variant.biased:
        exact += biases

    def case(one: RouterLogitsVariant, rows: slice) -> Case:
        sizes = (len(x[rows]), num_experts, hidden_size)
        return Case(
            variant.name,
            {
                "out": poison("float32", exact[rows].shape),
                "x": x[rows],
                "router": router,
                "biases": biases,
            },
            (Launch(one, one.grid(*sizes), ("out", "x", "router", *sizes, "biases")),),
            {"out": Expected("float32", exact[rows], TOLERANCES["float32"])},
        )

    part = case(token_alone(variant), slice(-1, None))
    whole = case(variant, slice(None))
    return [dataclasses.replace(whole, part=(part, lambda outputs: {"out": outputs["out"][-1:]}))]


def token_alone(variant: RouterLogitsVariant) -> RouterLogitsVariant:
    """Return the kernel that takes a token alone, as others do several."""
    return dataclasses.replace(variant, tokens=TOKENS[0])


def draw_route_experts(variant: RouteExpertsVariant, seed: int) -> list[Case]:
    """Some tokens, alike and not, one of NaN; many that all go one way; the last token alone."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((7, variant.experts)).astype(np.float32) * 3
    mixed[1] = mixed[0]
    mixed[2] = np.float32(0.5)  # equal: the lowest numbers
    mixed[3] = np.nan
    mixed[4, ::2] = -0.0
    mixed[4, 1::2] = 0.0
    if variant.scores == "sigmoid":
        mixed[5] = -300.0 - np.arange(variant.experts)  # no expert has a weight
    if variant.groups > 1:  # one expert against two of another group, of one lane if it is wide
        size = variant.experts // variant.groups
        mixed[6] = -3.0
        mixed[6, 0] = 5.0
        mixed[6, [-size, min(32, size - 1) - size]] = 4.8
    alike = np.tile(mixed[0], (37, 1))
    alike[-1] = -alike[-1]
    spread = 0.5 if variant.scores == "sigmoid" else 2 / variant.experts
    correction = (spread * rng.standard_normal(variant.experts)).astype(np.float32)
    factors = poison("float32", (variant.experts,))
    if variant.has_factors:
        factors = rng.uniform(0.2, 3.0, variant.experts).astype(np.float32)
    return [
        _routed(variant, logits, correction, factors, tile_pairs)
        for logits, tile_pairs in ((mixed, WIDTHS[1]), (alike, WIDTHS[0]), (mixed[:1], WIDTHS[2]))
    ]


def _routed(
    variant: RouteExpertsVariant, logits: Array, correction: Array, factors: Array, tile_pairs: int
) -> Case:
    def case(rows: Array) -> Case:
        shape = len(rows), variant.chosen
        chosen, weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
        route(
            rows, normalises=variant.normalises, chosen=chosen, weights=weights,
            is_sigmoid=variant.scores == "sigmoid",
            correction=correction if variant.corrects else None, scale=SCALE,
            num_groups=variant.groups, groups_per_token=variant.chosen_groups,
            expert_scales=factors if variant.has_factors else None,
        )  # fmt: skip
        num_tiles = most_tiles(chosen.size, variant.experts, tile_pairs) + 1
        order, tiles = np.empty(chosen.size, np.int32), np.empty((num_tiles, TILE_NUMBERS), "i4")
        sort_pairs(chosen, variant.experts, tile_pairs, order, tiles)
        scalars = (len(rows), tile_pairs.bit_length() - 1, num_tiles)
        numbers = ("correction", SCALE, "factors")
        return Case(
            f"{variant.name} of {len(rows)} in tiles of {tile_pairs}",
            {
                "weights": poison("float32", shape),
                "order": poison("int32", order.shape),
                "tiles": poison("int32", tiles.shape),
                "logits": rows,
                "correction": correction,
                "factors": factors,
            },
            (
                Launch(
                    variant,
                    variant.grid,
                    ("weights", "order", "tiles", "logits", *scalars, *numbers),
                ),
            ),
            {
                "weights": Expected("float32", weights, TOLERANCES["float32"]),
                "order": Expected("int32", order, 0.0),
                "tiles": Expected("int32", tiles, 0.0),
            },
        )

    def select(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"weights": outputs["weights"][-1:]}

    return dataclasses.replace(case(logits), part=(case(logits[-1:]), select))


def draw_add_experts(variant: AddExpertsVariant, seed: int) -> list[Case]:
    """Rows that take one block of threads and a bit; the last token alone."""
    rng = np.random.default_rng(seed)
    shape = (3, VECTOR_LENGTHS[variant.dtype] * (variant.threads + 3))
    before = to_stored(variant.dtype, rng.standard_normal(shape))
    given = to_stored(variant.dtype, rng.standard_normal((3, variant.experts, shape[1])))
    weights = rng.dirichlet(np.ones(variant.experts), 3).astype(np.float32)

    def case(rows: slice) -> Case:
        exact = to_float64(variant.dtype, before[rows])
        add_experts(to_float64(variant.dtype, given[rows]), weights[rows], exact)
        sizes = exact.shape
        return Case(
            variant.name,
            {"residual": before[rows].copy(), "given": given[rows], "weights": weights[rows]},
            (Launch(variant, variant.grid(*sizes), ("residual", "given", "weights", sizes[1])),),
            {"residual": Expected(variant.dtype, exact, TOLERANCES[variant.dtype])},
        )

    part = case(slice(-1, None))
    return [
        dataclasses.replace(
            case(slice(None)),
            part=(part, lambda outputs: {"residual": outputs["residual"][-1:]}),
        )
    ]
