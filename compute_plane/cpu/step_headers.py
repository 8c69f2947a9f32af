"""The headers of a step: what of it lies where, for every piece and every group of logits rows."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from compute_plane.cpu.adapter_runs import NO_RUNS
from compute_plane.cpu.state_rows import NO_ROWS
from compute_plane.memory.huge_pages import huge_page_array
from kernels.cpu.board import MAX_CHUNKS
from kernels.cpu.operation import HEADER_WORDS, StepWord

if TYPE_CHECKING:
    from kernels.cpu.attention_plan import AttentionPlan

Words = npt.NDArray[np.int64]

TOKENS_A_CHUNK: Final = 8
"""Tokens of a chunk of an operation that goes token by token, about."""
MOST_TOKEN_CHUNKS: Final = 16
ADAPTER_CHUNKS: Final = 4
"""Chunks of what adapters add, for each run of tokens."""
SCRATCH_ALIGNMENT: Final = 4096
"""Scratch memory of different workers lies on different pages, beyond which a processor fetches
nothing ahead: lines that another works in would go to and fro."""

NONE_TAKEN: Final = np.zeros(0, dtype=np.int64)


class PieceArrays(NamedTuple):
    """A piece of a step's tokens: T tokens of S rows, C-contiguous.

    `token_ids`, `positions`: [T]. `kv_places`: [T], block · block_size + offset. `block_tables`:
    [S, M], all rows of the step. `attention`: how it is cut. `state_rows`:
    `compute_plane.cpu.state_rows`, of models with states. `taken`: [T], of tokens that go on alone,
    which of the step they are (`compute_plane.cpu.late_tokens`). `adapter_runs`:
    `compute_plane.cpu.adapter_runs`.
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    kv_places: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int32]
    attention: AttentionPlan
    state_rows: npt.NDArray[np.int32] = NO_ROWS
    taken: npt.NDArray[np.int64] = NONE_TAKEN
    adapter_runs: npt.NDArray[np.int32] = NO_RUNS


class StepHeaders:
    """Headers at addresses that stay (late workers may still read them), made as they are needed.

    `scratch_bytes`: what each of `num_threads` workers needs. `experts_per_token`: of a mixture.
    `state_parts`: that a row goes through, in layers with states (`Recurrence.num_parts`).
    """

    def __init__(
        self,
        num_threads: int,
        scratch_bytes: int,
        experts_per_token: int = 0,
        state_parts: int = 0,
    ) -> None:
        size = -(-scratch_bytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        self._scratch = huge_page_array(num_threads * size, purpose="scratch memory")
        self._scratch_bytes = size
        self._experts_per_token = experts_per_token
        self._state_parts = state_parts
        self._headers: list[Words] = []

    def others(self) -> StepHeaders:
        """Return headers beside these, with the same scratch memory: one step runs at a time."""
        others = copy(self)
        others._headers = []
        return others

    def address(self, index: int) -> int:
        """Return the address of header `index`."""
        return int(self._at(index).ctypes.data)

    def describe_tokens(
        self, index: int, first_token: int, piece: PieceArrays, num_kv_heads: int
    ) -> None:
        """Describe a piece of the step's tokens in header `index`; the arrays must stay alive."""
        header = self._at(index)
        token_ids, positions, kv_places, block_tables, attention, state_rows, taken, runs = piece
        items, tokens, merges, slots = attention
        num_tokens = len(token_ids)
        header[StepWord.NUM_TOKENS] = num_tokens
        header[StepWord.FIRST_TOKEN] = first_token
        header[StepWord.TOKEN_IDS] = token_ids.ctypes.data
        header[StepWord.POSITIONS] = positions.ctypes.data
        header[StepWord.KV_PLACES] = kv_places.ctypes.data
        header[StepWord.BLOCK_TABLES] = block_tables.ctypes.data
        header[StepWord.TABLE_WIDTH] = block_tables.shape[1]
        header[StepWord.ATTENTION_ITEMS] = items.ctypes.data
        header[StepWord.NUM_ATTENTION_ITEMS] = len(items)
        header[StepWord.ATTENTION_TOKENS] = tokens.ctypes.data
        header[StepWord.PARTIAL_SLOTS] = slots.ctypes.data
        header[StepWord.TOKEN_CHUNKS] = _row_chunks(num_tokens)
        header[StepWord.ATTENTION_CHUNKS] = min(len(items) * num_kv_heads, MAX_CHUNKS)
        header[StepWord.ATTENTION_MERGES] = merges.ctypes.data
        header[StepWord.NUM_ATTENTION_MERGES] = len(merges)
        header[StepWord.MERGE_CHUNKS] = min(len(merges), MAX_CHUNKS)
        header[StepWord.STATE_ROWS] = state_rows.ctypes.data
        header[StepWord.NUM_STATE_ROWS] = len(state_rows)
        header[StepWord.STATE_CHUNKS] = min(len(state_rows) * self._state_parts, MAX_CHUNKS)
        header[StepWord.TAKEN_TOKENS] = taken.ctypes.data
        header[StepWord.ADAPTER_RUNS] = runs.ctypes.data
        header[StepWord.NUM_ADAPTER_RUNS] = len(runs)
        header[StepWord.ADAPTER_CHUNKS] = min(ADAPTER_CHUNKS * len(runs), MAX_CHUNKS)
        expert_rows = num_tokens * self._experts_per_token
        header[StepWord.NUM_EXPERT_ROWS] = expert_rows
        header[StepWord.EXPERT_ROW_CHUNKS] = _row_chunks(expert_rows)

    def describe_logits(
        self, index: int, *, out_tokens: npt.NDArray[np.int64], samples: Words
    ) -> None:
        """Describe rows of logits and what is drawn from them in header `index`."""
        header = self._at(index)
        header[StepWord.NUM_OUT_ROWS] = len(out_tokens)
        header[StepWord.OUT_TOKENS] = out_tokens.ctypes.data
        header[StepWord.NUM_SAMPLES] = len(samples)
        header[StepWord.SAMPLES] = samples.ctypes.data
        header[StepWord.OUT_CHUNKS] = _row_chunks(len(out_tokens))
        header[StepWord.SAMPLE_CHUNKS] = min(len(samples), MAX_CHUNKS)

    def _at(self, index: int) -> Words:
        while index >= len(self._headers):
            header = np.zeros(HEADER_WORDS, dtype=np.int64)
            header[StepWord.SCRATCH] = self._scratch.ctypes.data
            header[StepWord.SCRATCH_BYTES] = self._scratch_bytes
            self._headers.append(header)
        return self._headers[index]


def _row_chunks(num_rows: int) -> int:
    return min(-(-num_rows // TOKENS_A_CHUNK), MOST_TOKEN_CHUNKS)
