"""Which experts tokens go through and with what weights; then all pairs in the experts' order.

From router logits [T, E] come weights [T, C], `order` and `tiles`, as `expert_tiles` draws them, in
one launch of one block of threads: T · C is `MAX_PAIRS` at most, and what waits for this is the
layer's largest reads. Specification: `kernels.reference.mixture`.

*Choosing*: a warp takes a token, and then the one so many further on. A lane has the logits of the
experts lane, lane + 32, … as words that rise with them; with its expert's number each becomes a key
(`ordered_floats`: of equals the lower number first), so all keys of a token are different. C times
the largest of all lanes' keys is taken out; lane c keeps the c-th. The weights are a softmax over
those, or over all of the token's logits; each expert may have a factor that its weight is
multiplied by in the end (Gemma 4). Where scores are sigmoids, or have a correction added for the
choice, the words are those of the sums, and lane c makes the score of its expert once more.
Experts outside a token's groups (`expert_groups`) are as good as taken out before the first choice.

    shared   chosen  │ expert of pair 0 │ of pair 1 │ …        T · C

*Sorting*: the pairs are cut into as many parts as there are threads for all experts. A thread takes
an expert and a part, and counts; a sum over all threads before it says where in `order` its pairs
begin, another one, over the experts' first threads, where an expert's tiles begin:

    thread     expert 0, part 0 │ 0, 1 │ 1, 0 │ 1, 1 │ 2, 0 │ …
    counts            3         │  1   │  0   │  2   │  4   │
    places            0         │  3   │  4   │  4   │  6   │ …      the sums of those before

Then it goes through its part once more, and writes. Threads of a part that are neighbours read the
same word at a time. 128 experts and 8 pairs, a token's, are passes of two reads; 2048 pairs, passes
of 512, which are some microseconds.

A row of NaN has experts that exist, and weights that are NaN.

Next rung: the largest key by `redux.sync` on 32 bits, and the lowest expert that has it by another:
a choice is ten exchanges of 64 bits now, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.expert_groups import MAX_GROUPS, make_experts_left_out
from kernels.cuda.expert_tiles import MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, TILE_NUMBERS
from kernels.cuda.instructions.conversions import exp2
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.exact_float32 import (
    add_float32,
    divide_float32,
    multiply_float32,
)
from kernels.cuda.lanes import lane_and_warp, sum_up_to_lane, warp_max, warp_sum
from kernels.cuda.ordered_floats import NO_KEY, key_of_word, logit_of_key, rising_word, token_of_key
from kernels.cuda.variant import (
    Expectation,
    Pointer,
    Scalar,
    require_between,
    require_multiple,
    require_one_of,
)
from kernels.reference.mixture import LEAST

MAX_PAIRS: Final = 2048
"""Of the largest decode graph, 256 rows, 8 each."""
SCORES: Final = ("softmax", "sigmoid")
LEAST_SUM = float32(LEAST)
LOG2_E = float32(math.log2(math.e))


@dataclass(frozen=True, slots=True)
class RouteExpertsVariant:
    """The compile-time parameters: how many experts E there are, how many `chosen` C a token has.

    `scores`: "softmax" or "sigmoid" of the logits. `normalises`: weights are scores over the sum of
    those of the chosen, else scores. `corrects`: each expert has a number that its score has added
    where experts are chosen. `groups`: of experts, of which a token goes to `chosen_groups`.
    `has_factors`: each expert has another one that its weight is multiplied by. Raises
    UnsupportedVariantError.
    """

    experts: int
    chosen: int
    normalises: bool = True
    scores: str = "softmax"
    corrects: bool = False
    groups: int = 1
    chosen_groups: int = 1
    has_factors: bool = False

    def __post_init__(self) -> None:
        require_between("experts", 1, MAX_EXPERTS, self.experts)
        most = min(self.experts, MAX_EXPERTS_PER_TOKEN)
        require_between("chosen", 1, most, self.chosen)
        require_one_of("scores", SCORES, self.scores)
        require_between("groups", 1, MAX_GROUPS, self.groups)
        require_multiple("experts", self.groups, self.experts)
        size = self.experts // self.groups
        require_between("chosen_groups", -(-self.chosen // size), self.groups, self.chosen_groups)
        if self.groups > 1 and self.corrects:
            require_between("groups", 1, self.experts // 2, self.groups)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        over_all = "" if self.normalises else "_over_all"
        scores = "_sigmoid" * (self.scores == "sigmoid") + "_corrected" * self.corrects
        groups = f"_g{self.groups}_{self.chosen_groups}" if self.groups > 1 else ""
        groups += "_factors" * self.has_factors
        return f"route_experts_e{self.experts}_c{self.chosen}{over_all}{scores}{groups}"

    @property
    def threads(self) -> int:
        """Threads of the block: a warp for each of 16 tokens, a thread or more for each expert."""
        return 512

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        of_logits = "float32*", "int32", "int32", "int32", "float32*", "float32"
        return ("float32*", "int32*", "int32*", *of_logits, "float32*")

    @property
    def expectation(self) -> Expectation:
        """A lane has up to 16 words of logits."""
        return Expectation(80, ("SHFL", "MUFU", "BAR"), begins_early=True)

    @property
    def grid(self) -> tuple[int, int, int]:
        """The launch grid."""
        return (1, 1, 1)

    def takes(self, num_tokens: int) -> bool:
        """Whether there is room for the pairs of so many tokens."""
        return num_tokens * self.chosen <= MAX_PAIRS

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_route_experts(self)


def variants(*, every: bool) -> Sequence[RouteExpertsVariant]:
    """Return some of the variants, or those of the models known to us."""
    deepseek_v3 = RouteExpertsVariant(256, 8, True, "sigmoid", True, 8, 4)
    gemma_4 = RouteExpertsVariant(128, 8, has_factors=True)
    if every:
        shapes = ((8, 2), (16, 2), (32, 8), (40, 8), (60, 4), (64, 6), (64, 8), (128, 8), (512, 10))
        plain = [
            RouteExpertsVariant(*shape, normalises)
            for shape in shapes
            for normalises in (True, False)
        ]
        others = [("softmax", True), ("sigmoid", False), ("sigmoid", True)]
        apart = [
            RouteExpertsVariant(*shape, normalises, *other)
            for shape in ((40, 6), (64, 6), (128, 8), (160, 8))
            for normalises in (True, False)
            for other in others
        ]
        deepseek_v2 = RouteExpertsVariant(160, 6, False, groups=8, chosen_groups=3)
        return [*plain, *apart, deepseek_v2, deepseek_v3, gemma_4]
    sigmoid = RouteExpertsVariant(128, 8, True, "sigmoid", True)
    return [RouteExpertsVariant(128, 8), sigmoid, deepseek_v3, gemma_4]


def make_route_experts(variant: RouteExpertsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    experts, chosen, normalises = variant.experts, variant.chosen, variant.normalises
    is_sigmoid, corrects = variant.scores == "sigmoid", variant.corrects
    scores_apart = is_sigmoid or corrects
    is_grouped, has_factors = variant.groups > 1, variant.has_factors
    experts_left_out = make_experts_left_out(
        experts, variant.groups, variant.chosen_groups, adds_two=corrects
    )
    threads, warps = variant.threads, variant.threads // 32
    slots = -(-experts // 32)
    parts, num_places = threads // experts, threads + 1

    @cuda.jit(device=True, inline="always")
    def sum_before(value: Scalar, of_warps: Pointer) -> Scalar:
        """Return the sum of the values of all threads before this one; for the whole block."""
        lane, warp = lane_and_warp()
        up_to = sum_up_to_lane(value)
        if lane == 31:
            of_warps[warp] = up_to
        cuda.syncthreads()
        before = int32(up_to - value)
        for other in range(warps):
            if other < warp:
                before += of_warps[other]
        return before

    @cuda.jit(device=True, inline="always")
    def score_of(logit: Scalar, peak: Scalar, total: Scalar) -> Scalar:
        """Return a sigmoid, or the share of a softmax whose largest logit is `peak`."""
        if is_sigmoid:
            return divide_float32(float32(1), float32(1) + exp2(-logit * LOG2_E))
        return divide_float32(exp2((logit - peak) * LOG2_E), total)

    def route_experts(
        weights: Pointer,
        order: Pointer,
        tiles: Pointer,
        logits: Pointer,
        num_tokens: Scalar,
        tile_bits: Scalar,
        num_tiles: Scalar,
        correction: Pointer,
        scale: Scalar,
        factors: Pointer,
    ) -> None:
        """Choose, weigh, sort.

        `weights`: [T, C], times `scale`. `order`: [T·C]; `tiles`: [num_tiles, 3], of 2^`tile_bits`
        pairs, those behind the last one without any. `logits`: [T, E]. `correction`, `factors`:
        [E]; not touched where there are none.
        """
        let_next_begin()
        wait_for_previous()
        thread = cuda.threadIdx.x
        lane, warp = lane_and_warp()
        expert_of = cuda.shared.array(MAX_PAIRS, int32)
        places = cuda.shared.array(num_places, int32)
        counts_of_warps = cuda.shared.array(warps, int32)
        tiles_of_warps = cuda.shared.array(warps, int32)
        words = cuda.local.array(slots, uint32)

        for token in range(warp, num_tokens, warps):
            row = int64(token) * experts
            most, everything = float32(0), float32(1)
            if corrects and not is_sigmoid:
                most = logits[row]
                for s in range(slots):
                    of_lane = lane + 32 * s
                    if of_lane < experts:
                        most = max(most, logits[row + of_lane])
                most = warp_max(most)
                everything = float32(0)
                for s in range(slots):
                    of_lane = lane + 32 * s
                    if of_lane < experts:
                        everything += exp2((logits[row + of_lane] - most) * LOG2_E)
                everything = warp_sum(everything)
            for s in range(slots):
                of_lane = lane + 32 * s
                words[s] = uint32(0)
                if of_lane < experts:
                    rank = logits[row + of_lane]
                    if corrects:
                        score = score_of(rank, most, everything)
                        rank = add_float32(score, correction[of_lane])
                    words[s] = rising_word(rank)
            taken = uint32(0)  # a bit for each of the lane's experts
            if is_grouped:
                taken = experts_left_out(words, lane)
            peak, own = float32(0), float32(0)
            for c in range(chosen):
                largest = int64(NO_KEY)
                for s in range(slots):
                    of_lane = lane + 32 * s
                    if of_lane < experts and taken & uint32(1 << s) == 0:
                        largest = max(largest, key_of_word(words[s], of_lane))
                largest = warp_max(largest)
                expert = int32(token_of_key(largest))
                if expert % 32 == lane:
                    taken |= uint32(1) << uint32(expert // 32)
                logit = logit_of_key(largest)
                if scores_apart:
                    logit = logits[row + expert]
                if c == 0:
                    peak = logit
                if lane == c:
                    own = logit
                    expert_of[token * chosen + c] = expert
            power = float32(0)
            if lane < chosen:
                if scores_apart:
                    power = score_of(own, most, everything)
                else:
                    power = exp2((own - peak) * LOG2_E)
            mass = power
            if not normalises and not scores_apart:
                mass = float32(0)
                for s in range(slots):
                    of_lane = lane + 32 * s
                    if of_lane < experts:
                        mass += exp2((logits[row + of_lane] - peak) * LOG2_E)
            total = warp_sum(mass)
            if is_sigmoid:
                total = add_float32(total, LEAST_SUM)
            if scores_apart and not normalises:
                total = float32(1)
            if lane < chosen:
                weight = divide_float32(power, total)
                weight = multiply_float32(weight, scale)
                if has_factors:  # of the expert that this lane has put down
                    factor = factors[expert_of[token * chosen + lane]]
                    weight = multiply_float32(weight, factor)
                weights[int64(token) * chosen + lane] = weight

        cuda.syncthreads()
        expert, part = int32(thread // parts), int32(thread % parts)
        num_pairs = int32(num_tokens * chosen)
        of_part = int32((num_pairs + parts - 1) // parts)
        first = int32(min(num_pairs, part * of_part))
        end = int32(min(num_pairs, first + of_part))
        count = int32(0)
        if expert < experts:
            for pair in range(first, end):
                if expert_of[pair] == expert:
                    count += int32(1)
        place = sum_before(count, counts_of_warps)
        places[thread] = place
        if thread == threads - 1:
            places[threads] = place + count

        cuda.syncthreads()
        has_tiles = part == 0 and expert < experts
        left, num_own = int32(0), int32(0)
        if has_tiles:
            left = int32(places[thread + parts] - place)
            num_own = int32((left + (1 << tile_bits) - 1) >> tile_bits)
        tile = sum_before(num_own, tiles_of_warps)
        if has_tiles:
            begin = place
            while left > 0:
                of_tile = min(left, int32(1 << tile_bits))
                tiles[TILE_NUMBERS * tile] = expert
                tiles[TILE_NUMBERS * tile + 1] = begin
                tiles[TILE_NUMBERS * tile + 2] = of_tile
                begin += of_tile
                left -= of_tile
                tile += int32(1)
        if expert < experts:
            for pair in range(first, end):
                if expert_of[pair] == expert:
                    order[place] = int32(pair)
                    place += int32(1)

        used_tiles = int32(0)
        for other in range(warps):
            used_tiles += tiles_of_warps[other]
        for unused in range(used_tiles + thread, num_tiles, threads):
            for number in range(TILE_NUMBERS):
                tiles[TILE_NUMBERS * unused + number] = int32(0)

    return route_experts
