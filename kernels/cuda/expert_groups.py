"""Which experts of a token are in none of its groups, for `route_experts`.

E experts are in groups of neighbours. A warp has a token, and a lane the ranks of the experts lane,
lane + 32, … as words that rise with them. For one group after the other the lanes find its largest
word, and the one behind that, in a butterfly of both; what they add up to, or the largest alone,
lane g keeps of group g. How many groups count more than its own, or as much with a lower number, a
lane sees by asking all others, and whether those are fewer than a token has groups, all lanes in a
ballot.

    words    lane 0 1 2 …   expert 0 1 2 … 31 │ 32 33 …         groups of 20: 0 … 19, 20 … 39, …
    sums     lane 0 1 2 …   group  0 1 2 …
    ballot   a bit for each chosen group; nobody reads those behind the last group

Of a row of NaN there are as many groups as of any.
"""

from __future__ import annotations

from typing import Final

from numba import cuda, int32, int64, uint32

from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.instructions.exact_float32 import add_float32
from kernels.cuda.ordered_floats import ID_BITS, logit_of_key, rising_word
from kernels.cuda.variant import DeviceFunction, Local, Scalar

MAX_GROUPS: Final = 32
"""A lane each."""


def make_experts_left_out(
    experts: int, groups: int, chosen_groups: int, *, adds_two: bool
) -> DeviceFunction:
    """Return the device function, for all lanes of a warp, with parameters bound."""
    slots, size = -(-experts // 32), experts // groups

    @cuda.jit(device=True, inline="always")
    def experts_left_out(words: Local, lane: Scalar) -> Scalar:
        """Return a bit for each of the lane's experts, uint32, set where a token may not choose it.

        `words`: of the lane's experts; what is behind the last expert is not read.
        """
        own = uint32(0)
        for group in range(groups):
            first, second = uint32(0), uint32(0)
            for s in range(slots):
                expert = lane + 32 * s
                if group * size <= expert and expert < (group + 1) * size:
                    second = max(second, min(first, words[s]))
                    first = max(first, words[s])
            for step in range(5):
                other = uint32(cuda.shfl_xor_sync(FULL_WARP, int32(first), 16 >> step))
                if adds_two:
                    behind = uint32(cuda.shfl_xor_sync(FULL_WARP, int32(second), 16 >> step))
                    second = max(max(second, behind), min(first, other))
                first = max(first, other)
            if adds_two:
                largest = logit_of_key(int64(first) << ID_BITS)
                first = rising_word(add_float32(largest, logit_of_key(int64(second) << ID_BITS)))
            if lane == group:
                own = first
        before = int32(0)
        for group in range(groups):
            other = uint32(cuda.shfl_sync(FULL_WARP, int32(own), group))
            if other > own or (other == own and group < lane):
                before += int32(1)
        chosen = uint32(cuda.ballot_sync(FULL_WARP, before < chosen_groups))
        left_out = uint32(0)
        for s in range(slots):
            if chosen >> uint32((lane + 32 * s) // size) & uint32(1) == 0:
                left_out |= uint32(1) << uint32(s)
        return left_out

    return experts_left_out
