"""The model of the compute plane for models with states, which it keeps as what they took in.

A state is the cells of the tokens that it is of, as a pool has them. Each row's must be just the
tokens before it, as this row would have computed them: a copy that is missing, comes a step too
early, or is of another's state is found where it is used.
"""

from __future__ import annotations

from dataclasses import replace

from control_plane.core.batch import StepBatch
from control_plane.core.scheduler import SchedulerConfig
from tests.properties.model_plane import NO_NUMBER, Cell, ModelPlane, Row, must


def with_states(config: SchedulerConfig, num_kept: int, min_state_tokens: int) -> SchedulerConfig:
    """The limits of a scheduler whose plane has so many states beside those of its slots."""
    return replace(
        config,
        num_host_blocks=0,
        speculative_tokens=0,
        grammar_drafts=0,
        num_states=config.kept_states.start + num_kept,
        min_state_tokens=min_state_tokens,
    )


class StatePlane(ModelPlane):
    """Holds `num_states` states, those of the slots first; made like the plane it extends."""

    num_states = 0
    num_state_copies = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.states: dict[int, tuple[Cell, ...]] = {}

    def _move_blocks(self, batch: StepBatch) -> None:
        super()._move_blocks(batch)
        for source, destination in batch.state_copies:
            must(0 <= source < self.num_states, f"there is no state {source} to copy")
            must(0 <= destination < self.num_states, f"there is no state {destination} to fill")
            self.states[destination] = self.states.get(source, ())
            self.num_state_copies += 1

    def _poison(self, rows: list[Row], fail_row: int | None) -> set[int]:
        for row in rows:
            self._check_state(row)
        bad = super()._poison(rows, fail_row)
        for number, row in enumerate(rows):
            cells = [self._cell(row.slot, i) for i in range(row.end)]
            self.states[row.slot_id] = (NO_NUMBER,) * row.end if number in bad else tuple(cells)
        return bad

    def _check_state(self, row: Row) -> None:
        """What a row goes on from is of the tokens before it, or no numbers, if those may be."""
        slot = row.slot
        held = self.states.get(row.slot_id, ()) if row.first else ()
        must(len(held) == row.first, f"a row at {row.first} has a state of {len(held)} tokens")
        if NO_NUMBER in held:
            slot.is_poisoned = True
        elif not slot.is_poisoned:
            wanted = tuple(self._cell(slot, i) for i in range(row.first))
            must(held == wanted, f"the state of slot {row.slot_id} is of another's tokens")
