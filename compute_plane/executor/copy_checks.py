"""Checks of a batch's copies of blocks and states that need no slot: ends, limits, no support."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compute_plane.errors import InvalidBatch, UnsupportedBatch

if TYPE_CHECKING:
    from compute_plane.executor.batch_checks import SlotLimits
    from compute_plane.executor.step import StepBatch


def check_block_copies(batch: StepBatch, limits: SlotLimits) -> None:
    """Raise InvalidBatch for a copy between blocks or slots that there are not, or over another."""
    destinations: set[int] = set()
    for index, copy in enumerate(batch.copies):
        field = f"copies[{index}]"
        for name, value, limit in (
            ("slot", copy.slot, limits.max_slots),
            ("source_block", copy.source, limits.num_blocks),
            ("destination_block", copy.destination, limits.num_blocks),
        ):
            if not 0 <= value < limit:
                raise InvalidBatch(
                    f"{field}.{name} must be below {limit}, got {value}", field=f"{field}.{name}"
                )
        if copy.destination in destinations or copy.destination == copy.source:
            raise InvalidBatch(
                f"{field}.destination_block must be a block of its own, got {copy.destination}",
                field=f"{field}.destination_block",
            )
        destinations.add(copy.destination)


def check_swaps(batch: StepBatch, limits: SlotLimits) -> None:
    """Raise InvalidBatch unless both ends of moves exist and nothing is written twice."""
    for field, moves, sources, destinations in (
        ("swap_out", batch.swap_out, limits.num_blocks, limits.num_host_blocks),
        ("swap_in", batch.swap_in, limits.num_host_blocks, limits.num_blocks),
    ):
        if moves and not limits.num_host_blocks:
            raise UnsupportedBatch(f"{field}: this plane has no host pool", field=field)
        written = {copy.destination for copy in batch.copies} if field == "swap_in" else set()
        for index, move in enumerate(moves):
            for name, value, limit in (
                ("source_block", move.source, sources),
                ("destination_block", move.destination, destinations),
            ):
                if not 0 <= value < limit:
                    where = f"{field}[{index}].{name}"
                    raise InvalidBatch(f"{where} must be below {limit}, got {value}", field=where)
            if move.destination in written:
                where = f"{field}[{index}].destination_block"
                raise InvalidBatch(
                    f"{where} must be a block of its own, got {move.destination}", field=where
                )
            written.add(move.destination)


def check_state_copies(batch: StepBatch, limits: SlotLimits) -> None:
    """Raise InvalidBatch for a copy of a state that there is not, UnsupportedBatch for any."""
    if batch.state_copies and not limits.num_states:
        raise UnsupportedBatch(
            "state_copies: the model of this plane has no states", field="state_copies"
        )
    for index, copy in enumerate(batch.state_copies):
        for name, value in copy._asdict().items():
            if not 0 <= value < limits.num_states:
                field = f"state_copies[{index}].{name}"
                raise InvalidBatch(
                    f"{field} must be below {limits.num_states}, got {value}", field=field
                )
