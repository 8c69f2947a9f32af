"""The memory in which mixtures of experts work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.cpu.row_buffers import RowBuffers
from kernels.cpu.operands import Routing
from kernels.cpu.routing_sizes import run_words

if TYPE_CHECKING:
    from compute_plane.memory.huge_pages import HugePageArena
    from compute_plane.model.spec import Mixture, ModelSpec

FLOAT_BYTES: Final = 4


class ExpertBuffers:
    """What all mixtures of a table work in, one after the other.

    `rows`: what products of experts read. `logits`: float32 [max_tokens, E]. `sums`: float32
    [R, 2·I], `given`: float32 [R, hidden], R = max_tokens · experts_per_token. `gates`: float32
    [max_tokens]. Where parts have norms of their own, `added`: float32 [step_tokens, hidden], what
    all of them give, and `zeros`: [hidden]. `routing`: the operands that `Routing`'s operations
    share; `groups`: those of choosing among groups, which share words with others'.
    """

    def __init__(
        self,
        arena: HugePageArena,
        spec: ModelSpec,
        mixture: Mixture,
        max_tokens: int,
        step_tokens: int,
    ) -> None:
        num_rows = max_tokens * mixture.experts_per_token

        def taken(count: int) -> int:
            return arena.take(FLOAT_BYTES * count).ctypes.data

        self.mixture, self.activation = mixture, spec.activation
        self.hidden_size, self.intermediate_size = spec.hidden_size, spec.intermediate_size
        self.rows = RowBuffers(arena, num_rows, max(spec.hidden_size, spec.intermediate_size))
        self.logits = taken(max_tokens * mixture.num_experts)
        self.sums = taken(num_rows * 2 * spec.intermediate_size)
        self.given = taken(num_rows * spec.hidden_size)
        self.gates = taken(max_tokens)
        self.added = self.zeros = 0
        if mixture.has_own_norms:
            self.added = taken(step_tokens * spec.hidden_size)
            self.zeros = taken(spec.hidden_size)
        scale = arena.take(FLOAT_BYTES).view(np.float32)
        scale[:] = mixture.weight_scale
        self.routing: dict[int, int] = {
            Routing.LOGITS: self.logits,
            Routing.NUM_EXPERTS: mixture.num_experts,
            Routing.PER_TOKEN: mixture.experts_per_token,
            Routing.NORMALISES: int(mixture.normalises_weights),
            Routing.IS_SIGMOID: int(mixture.scores == "sigmoid"),
            Routing.SCALE: 0 if mixture.weight_scale == 1 else scale.ctypes.data,
            Routing.CHOSEN: taken(num_rows),
            Routing.WEIGHTS: taken(num_rows),
            Routing.PLACES: taken(num_rows),
            Routing.TOKENS: taken(num_rows),
            Routing.RUNS: taken(run_words(mixture.num_experts)),
        }
        self.groups: dict[int, int] = {
            Routing.NUM_GROUPS: mixture.num_groups if mixture.num_groups > 1 else 0,
            Routing.GROUPS_PER_TOKEN: mixture.groups_per_token,
        }
