"""What is looked at before a step of decoding rows is launched: nothing wrong becomes an address.

It says no more than whether all is well: what is wrong is said by the ordinary way's checks
(`token_layout`, `compute_plane.cuda.batch_layout`), which take longer. Every step pays for it,
often on a processor that has slept: arrays that a run of steps shares, which nobody can write, are
looked at once, and what is to be equal is compared as bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from compute_plane.executor.block_tables import are_blocks

if TYPE_CHECKING:
    from compute_plane.executor.interface import ExecutionBatch
    from compute_plane.executor.token_layout import PoolShape

Array = npt.NDArray[Any]


class LastStep(Protocol):
    """The step launched last."""

    @property
    def num_samples(self) -> int:
        """Samples of it that a row may be waiting for."""
        ...


class DecodeChecks:
    """Checks steps of up to `most_rows` rows.

    `longest`: tokens of a sequence, at most. `last`: None where steps run in turn.
    """

    def __init__(
        self, shape: PoolShape, longest: int, last: LastStep | None, most_rows: int
    ) -> None:
        self._shape = shape
        self._longest = longest
        self._last = last
        self._every: Array = np.arange(most_rows, dtype=np.int32)
        self._sound: tuple[Array, Array] | None = None  # query lengths and sampled rows
        self._sound_tables: tuple[Array, Array] | None = None  # and the last place of each row

    def awaits_first(self, sources: Array) -> bool:
        """Whether rows await the first samples one after the other, by the order sent."""
        every = self._every[: len(sources)]
        return sources.dtype == np.int32 and sources.tobytes() == every.tobytes()

    def kv_slots(self, batch: ExecutionBatch) -> Array | None:
        """Return the slot of the pool that each row writes, int64 [S]; None: something is wrong."""
        num_rows = len(batch.query_lens)
        if not self._is_sound(batch, num_rows):
            return None
        positions, size = batch.positions, self._shape.block_size
        places = positions // size
        blocks = batch.block_tables[self._every[:num_rows], places]
        if not self._are_blocks(batch.block_tables, places, blocks):
            return None
        kv_slots: Array = blocks.astype(np.int64) * size
        kv_slots += positions - places * size
        return kv_slots if len(set(kv_slots.tolist())) == num_rows else None

    def _is_sound(self, batch: ExecutionBatch, num_rows: int) -> bool:
        """Whether all rows decode, and nothing that becomes an address is out of its range."""
        shape, tables = self._shape, batch.block_tables
        tokens, positions, seq_lens = batch.input_tokens, batch.positions, batch.seq_lens
        sampled, sources = batch.sampled_rows, batch.input_sources
        every = (batch.query_lens, tokens, positions, seq_lens, sampled, tables)
        if any(array.dtype != np.int32 for array in every) or tables.ndim != 2:
            return False
        if not (
            len(tokens) == len(positions) == len(seq_lens) == len(tables) == num_rows
            and len(sampled) == len(batch.sampling)
        ):
            return False
        if sources is not None and not (
            sources.shape == (num_rows,) and self._are_samples(sources)
        ):
            return False
        return bool(
            self._decodes(batch.query_lens, sampled)
            and (positions + 1).tobytes() == seq_lens.tobytes()
            # Of positions: the length behind the largest number is none. As unsigned numbers: a
            # negative one is too large.
            and positions.view(np.uint32).max()
            < min(self._longest, tables.shape[1] * shape.block_size)
            and tokens.view(np.uint32).max() < shape.vocab_size
        )

    def _are_blocks(self, tables: Array, places: Array, last: Array) -> bool:
        """Whether the entries of the rows up to `places` [S] are blocks; `last`: those there.

        Of tables that nobody can write, those that a step has used are not looked at again.
        """
        sound, num_blocks = self._sound_tables, self._shape.num_blocks
        before = None if sound is None or sound[0] is not tables else sound[1]
        if before is not None and before.tobytes() == places.tobytes():
            return True
        if before is not None and (places - before).max() <= 1:
            is_sound = bool(last.view(np.uint32).max() < num_blocks)
        else:
            is_sound = are_blocks(tables, places + 1, num_blocks)
        self._sound_tables = (tables, places) if is_sound and not tables.flags.writeable else None
        return is_sound

    def _are_samples(self, sources: Array) -> bool:
        """Whether sources are samples of the step before, or none."""
        num_samples = 0 if self._last is None else self._last.num_samples
        if self.awaits_first(sources):
            return len(sources) <= num_samples
        return bool(sources.min() >= -1 and sources.max() < num_samples)

    def _decodes(self, query_lens: Array, sampled: Array) -> bool:
        """Whether every row has one token, and samples are of rows that there are."""
        sound = self._sound
        if sound is not None and sound[0] is query_lens and sound[1] is sampled:
            return True
        is_sound = bool((query_lens == 1).all() and sampled.view(np.uint32).max() < len(query_lens))
        if is_sound and not (query_lens.flags.writeable or sampled.flags.writeable):
            self._sound = query_lens, sampled
        return is_sound
