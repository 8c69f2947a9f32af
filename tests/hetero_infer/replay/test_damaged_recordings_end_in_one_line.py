from __future__ import annotations

import contextlib
import io
import random

import pytest

from control_plane.engine.recording_file import MAX_RECORD_BYTES, encode_length
from hetero_infer.replay.recorded_state import RecordedState
from hetero_infer.replay.recording_reader import (
    MAX_UNANSWERED,
    RecordedStep,
    RecordingError,
    RecordingReader,
    SessionStart,
)
from protos.hetero.compute.v1 import compute_pb2
from tests.hetero_infer.replay.replay_bench import write

PLANE = compute_pb2.DescribeResponse(
    block_size=4, limits=compute_pb2.BatchLimits(max_tokens=40, max_rows=4, max_slots=4)
)


def batch(step_id: int, **parts) -> compute_pb2.ExecutionBatch:
    return compute_pb2.ExecutionBatch(step_id=step_id, **parts)


def output(step_id: int) -> compute_pb2.ExecutionOutput:
    return compute_pb2.ExecutionOutput(step_id=step_id, sampled_token_ids=[9])


ROW = {"slots": [1], "query_lens": [5], "positions": [0], "sampled_rows": [0]}
START = compute_pb2.SlotStart(slot=1, token_ids=range(5), num_prompt_tokens=5, block_ids=[3, 4])
MESSAGES = [
    PLANE,
    batch(1, starts=[START], **ROW),
    batch(2, slots=[1], query_lens=[1], positions=[5], sampled_rows=[0]),
    output(1),
    output(2),
    PLANE,
    batch(1, starts=[START], **ROW),
]


def read(data: bytes) -> tuple[list, bool]:
    reader = RecordingReader(io.BytesIO(data), "file")
    return list(reader), reader.is_truncated


def test_batches_are_paired_with_their_answers_and_sessions_counted():
    items, is_truncated = read(write(MESSAGES))
    kinds = [
        item.number if isinstance(item, SessionStart) else (item.batch.step_id, bool(item.output))
        for item in items
    ]
    assert kinds == [1, (1, True), (2, True), 2, (1, False)]
    assert not is_truncated


def test_a_recording_cut_anywhere_gives_what_is_whole():
    data = write(MESSAGES)
    header = len(write(MESSAGES[:1]))
    borders = {len(write(MESSAGES[:count])) for count in range(1, len(MESSAGES) + 1)}
    for end in range(header, len(data)):
        items, is_truncated = read(data[:end])
        assert isinstance(items[0], SessionStart)
        assert is_truncated == (end not in borders)
    for end in range(header):
        with pytest.raises(RecordingError, match="not a recording: it has no whole record"):
            read(data[:end])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"#!/bin/sh\n" * 40, "not a recording"),
        (write(MESSAGES[1:]), "does not begin with a header"),
        (write([PLANE, output(1)]), "an output of step 1 without its batch"),
        (write([PLANE, batch(2), output(1)]), "an output of step 1 without its batch"),
        (write([PLANE]) + b"\x00", "a record of no known kind"),
        (write([PLANE]) + b"\x02\x12\x05", "it is no Record"),
        (write([PLANE, *map(batch, range(1, MAX_UNANSWERED + 2))]), "have no output"),
        (write([compute_pb2.DescribeResponse()]), "a block_size of 0"),
    ],
)
def test_what_is_no_recording_is_called_so(data, why):
    with pytest.raises(RecordingError, match=why) as refused:
        read(data)
    assert "\n" not in refused.value.message


def test_a_length_is_bounded_before_anything_is_read():
    class Counting(io.BytesIO):
        largest = 0

        def read(self, size=-1):
            self.largest = max(self.largest, size)
            return super().read(size)

    for length in (MAX_RECORD_BYTES + 1, (1 << 35) - 1, 1 << 60):
        file = Counting(write([PLANE]) + encode_length(length) + bytes(100))
        with pytest.raises(RecordingError, match="longer than"):
            list(RecordingReader(file, "file"))
        assert file.largest < 1000


def test_random_damage_is_noticed_or_harmless():
    data = write(MESSAGES)
    chance = random.Random(7)
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with contextlib.suppress(RecordingError):
            items, _ = read(bytes(damaged))
            state = RecordedState(PLANE)
            for item in items:
                if isinstance(item, RecordedStep):
                    state.apply(item.batch)
                    if item.output is not None:
                        state.commit(item.batch, item.output)


@pytest.mark.parametrize(
    ("field", "parts"),
    [
        ("positions", {"positions": []}),
        ("query_lens", {"query_lens": [4_000_000_000]}),
        ("token_counts", {"token_counts": [2], "token_ids": [1]}),
        ("new_block_counts", {"new_block_ids": [1]}),
        ("sampled_rows", {"sampled_rows": [1]}),
        ("sampled_slots", {"sampled_slots": [1, 2]}),
    ],
)
def test_columns_that_do_not_belong_together_are_named(field, parts):
    with pytest.raises(RecordingError, match=f"{field} of step 7"):
        RecordedState(PLANE).apply(batch(7, **{**ROW, **parts}))


def test_what_a_block_holds_follows_copies_and_swaps_and_ends_with_the_next_write():
    state = RecordedState(PLANE)
    first = batch(1, starts=[START], digest_blocks=[3], **ROW)
    assert state.apply(first) == [(0, 0)]
    answer = output(1)
    answer.block_digests.append(77)
    state.commit(first, answer)
    assert state.slot(1).tokens == [0, 1, 2, 3, 4, 9]
    assert state.known_digests(1) == {0: 77}
    assert state.block_tokens(1, 0) == [0, 1, 2, 3]
    copy = compute_pb2.BlockCopy(slot=1, logical_index=0, source_block=3, destination_block=8)
    move = compute_pb2.BlockMove(source_block=8, destination_block=0)
    state.apply(batch(2, copies=[copy]))
    assert state.known_digests(1) == {0: 77}
    state.apply(batch(3, swap_out=[move], released=[1]))
    back = compute_pb2.BlockMove(source_block=0, destination_block=4)
    again = compute_pb2.SlotStart(slot=1, token_ids=range(6), num_prompt_tokens=5, block_ids=[4, 5])
    parts = {"slots": [1], "query_lens": [1], "positions": [5]}
    state.apply(batch(4, swap_in=[back], starts=[again], **parts))
    assert state.known_digests(1) == {0: 77}
    state.apply(batch(5, slots=[1], query_lens=[1], positions=[3]))
    assert state.known_digests(1) == {}
