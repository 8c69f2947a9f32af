"""Which experts have the largest ranks: logits, or scores with something added.

What is computed: `kernels.reference.mixture`. A rank that is not a number is nobody's: that is how
the experts of the groups that a token has not chosen are left out.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.memory_words import read_float32, unfused, write_float32, write_int32


@unfused
def next_expert(logits: int, num_experts: int, before: int) -> int:
    """Return the expert that comes behind `before` in the order of logits, −1: the first.

    Its number is the lower one of equal logits. −1 if there is none: logits are not numbers.
    """
    limit = np.float32(np.inf)
    if before >= 0:
        limit = read_float32(logits, before)
    found, most = -1, np.float32(-np.inf)
    for expert in range(num_experts):
        logit = read_float32(logits, expert)
        is_behind = logit < limit or (logit == limit and expert > before)
        if is_behind and (found < 0 or logit > most):
            found, most = expert, logit
    return found


@unfused
def choose(ranks: int, num_experts: int, chosen: int, per_token: int) -> None:
    """Write the experts with the largest ranks, which are logits or corrected scores."""
    expert = -1
    for c in range(per_token):
        expert = next_expert(ranks, num_experts, expert)
        if expert < 0:
            expert = c  # of a row that is not finite: any will do, its weights are NaN
        write_int32(chosen, c, expert)


@unfused
def weigh_groups(ranks: int, size: int, num_groups: int, adds_two: bool, sums: int) -> None:
    """Write what each group counts: its largest rank, or its two largest ones together.

    `size`: experts of a group. `sums`: float32 [num_groups]; NaN of a group without such ranks.
    """
    for group in range(num_groups):
        of_group = ranks + 4 * group * size
        total = np.float32(np.nan)
        first = next_expert(of_group, size, -1)
        if first >= 0:
            total = read_float32(of_group, first)
            if adds_two:
                second = next_expert(of_group, size, first)
                rank = np.float32(np.nan)
                if second >= 0:
                    rank = read_float32(of_group, second)
                total += rank
        write_float32(sums, group, total)


@unfused
def leave_out_groups(
    ranks: int, num_experts: int, num_groups: int, groups_per_token: int, adds_two: bool,
    sums: int,
) -> None:  # fmt: skip
    """Write NaN in the place of all ranks but those of the groups that count most.

    Of a row that is not finite all may stay. `sums`: scratch memory, as in `weigh_groups`.
    """
    size = num_experts // num_groups
    weigh_groups(ranks, size, num_groups, adds_two, sums)
    last = -1
    for _ in range(groups_per_token):
        last = next_expert(sums, num_groups, last)
        if last < 0:
            return
    least = read_float32(sums, last)
    for group in range(num_groups):
        total = read_float32(sums, group)
        if not (total > least or (total == least and group <= last)):
            for i in range(group * size, (group + 1) * size):
                write_float32(ranks, i, np.float32(np.nan))
