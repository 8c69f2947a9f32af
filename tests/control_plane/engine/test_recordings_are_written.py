from __future__ import annotations

import builtins
import errno
import io
import os
import threading

import pytest
from structlog.testing import capture_logs

from control_plane.engine import recording_file
from control_plane.engine.recording import Recorder
from control_plane.engine.recording_file import RecordingFile, encode_length
from planes.errors import ConfigError
from protos.hetero.compute.v1 import compute_pb2, recording_pb2
from tests.waiting import wait_until

PLANE = compute_pb2.DescribeResponse(block_size=4, features=["block_digests", "logprobs"])


def start(slot: int, num_tokens: int, blocks: list[int], num_logprobs: int | None = None):
    return compute_pb2.SlotStart(
        slot=slot,
        token_ids=range(num_tokens),
        num_prompt_tokens=num_tokens,
        block_ids=blocks,
        sampling=compute_pb2.SamplingParams(num_logprobs=num_logprobs),
    )


def answer(step_id: int, num_samples: int):
    return compute_pb2.ExecutionOutput(
        step_id=step_id,
        sampled_token_ids=range(num_samples),
        sample_logprobs=[
            compute_pb2.SampleLogprobs(sample=k, logprob=-k) for k in range(num_samples)
        ],
        block_digests=[7],
    )


@pytest.fixture
def recorder(tmp_path):
    made = Recorder(str(tmp_path / "run"), clock=lambda: 12.5)
    made.opened(PLANE)
    yield made
    made.close()


def test_the_file_holds_what_was_sent_and_received_each_with_its_length(recorder, tmp_path):
    batch = compute_pb2.ExecutionBatch(step_id=1, slots=[0], query_lens=[2], positions=[0])
    recorder.sent(batch)
    recorder.received(answer(1, 0))
    recorder.close()
    header = recording_pb2.RecordingHeader(
        format_version=1, started_at_us=12_500_000, plane=PLANE.SerializeToString()
    )
    records = [
        recording_pb2.Record(header=header),
        recording_pb2.Record(batch=batch.SerializeToString()),
        recording_pb2.Record(output=answer(1, 0).SerializeToString()),
    ]
    parts = [record.SerializeToString() for record in records]
    assert (tmp_path / "run").read_bytes() == b"".join(bytes([len(part)]) + part for part in parts)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o600


def test_every_block_that_a_batch_fills_is_asked_for(recorder):
    batch = compute_pb2.ExecutionBatch(
        step_id=1,
        starts=[start(0, 9, [5, 6, 7]), start(1, 3, [8])],
        slots=[0, 1],
        query_lens=[9, 3],
        positions=[0, 0],
    )
    recorder.sent(batch)
    assert list(batch.digest_blocks) == [5, 6]
    batch = compute_pb2.ExecutionBatch(
        step_id=2,
        copies=[
            compute_pb2.BlockCopy(slot=1, logical_index=0, source_block=8, destination_block=9)
        ],
        slots=[0, 1],
        query_lens=[1, 2],
        positions=[9, 3],
        new_block_counts=[0, 1],
        new_block_ids=[3],
    )
    recorder.sent(batch)
    assert list(batch.digest_blocks) == [9]
    batch = compute_pb2.ExecutionBatch(step_id=3, slots=[1], query_lens=[3], positions=[5])
    recorder.sent(batch)
    assert list(batch.digest_blocks) == [3]


def test_the_blocks_of_a_slot_that_began_as_another_one_are_known(recorder):
    recorder.sent(
        compute_pb2.ExecutionBatch(
            step_id=1,
            starts=[start(0, 9, [5, 6, 7])],
            slots=[0],
            query_lens=[9],
            positions=[0],
        )
    )
    second, third = start(1, 1, [8]), start(0, 1, [9])
    second.prefix.CopyFrom(compute_pb2.SlotPrefix(slot=0, num_tokens=8, num_blocks=2))
    third.prefix.CopyFrom(compute_pb2.SlotPrefix(slot=1, num_tokens=8, num_blocks=1))
    batch = compute_pb2.ExecutionBatch(
        step_id=2,
        released=[0],
        starts=[second, third],
        slots=[0, 1],
        query_lens=[3, 4],
        positions=[5, 8],
    )
    recorder.sent(batch)
    assert list(batch.digest_blocks) == [9, 8]


def test_a_block_that_drafts_may_fill_is_not_asked_for(recorder):
    batch = compute_pb2.ExecutionBatch(
        step_id=1,
        starts=[start(0, 5, [5, 6]), start(1, 4, [7])],
        slots=[0, 1],
        query_lens=[4, 4],
        positions=[4, 0],
        draft_counts=[3, 0],
        draft_ids=[1, 2, 3],
    )
    recorder.sent(batch)
    assert list(batch.digest_blocks) == [7]


def test_log_probabilities_are_asked_for_and_reach_only_who_asked(recorder):
    batch = compute_pb2.ExecutionBatch(
        step_id=1,
        starts=[start(0, 4, [1]), start(1, 4, [2], num_logprobs=3), start(2, 4, [2])],
        slots=[0, 1],
        query_lens=[4, 4],
        positions=[0, 0],
        sampled_rows=[0, 1, 1],
        sampled_slots=[0, 1, 2],
    )
    recorder.sent(batch)
    assert [s.sampling.num_logprobs for s in batch.starts] == [0, 3, 0]
    assert all(s.sampling.HasField("num_logprobs") for s in batch.starts)
    # The answer to the first batch comes when a later one has given slot 1 away.
    later = compute_pb2.ExecutionBatch(
        step_id=2,
        starts=[start(1, 4, [4])],
        slots=[1, 0],
        query_lens=[4, 1],
        positions=[0, 4],
        sampled_rows=[0, 1],
    )
    recorder.sent(later)
    first, second = answer(1, 3), answer(2, 2)
    first.draft_logprobs.extend(first.sample_logprobs)
    recorder.received(first)
    recorder.received(second)
    assert [entry.sample for entry in first.sample_logprobs] == [1]
    assert [entry.sample for entry in first.draft_logprobs] == [1]
    assert list(second.sample_logprobs) == []
    assert list(first.block_digests) == []


def prompt_in_slot_0(step_id: int, num_logprobs: int | None = None) -> compute_pb2.ExecutionBatch:
    return compute_pb2.ExecutionBatch(
        step_id=step_id,
        starts=[start(0, 4, [1], num_logprobs)],
        slots=[0],
        query_lens=[4],
        positions=[0],
        sampled_rows=[0],
    )


def test_log_probabilities_reach_who_asks_in_a_slot_of_which_nobody_had(recorder):
    recorder.sent(prompt_in_slot_0(1))
    recorder.sent(prompt_in_slot_0(2, num_logprobs=2))
    first, second = answer(1, 1), answer(2, 1)
    recorder.received(first)
    recorder.received(second)
    assert [len(output.sample_logprobs) for output in (first, second)] == [0, 1]


def test_of_a_session_that_was_lost_with_its_steps_under_way_the_next_one_knows_nothing(recorder):
    recorder.sent(prompt_in_slot_0(5))
    recorder.opened(PLANE)
    recorder.sent(prompt_in_slot_0(1))
    output = answer(1, 1)
    recorder.received(output)
    assert list(output.sample_logprobs) == []


def test_a_plane_that_has_neither_is_asked_for_neither(tmp_path):
    recorder = Recorder(str(tmp_path / "run"))
    recorder.opened(compute_pb2.DescribeResponse(block_size=4))
    batch = compute_pb2.ExecutionBatch(
        step_id=1, starts=[start(0, 4, [1])], slots=[0], query_lens=[4], positions=[0]
    )
    recorder.sent(batch)
    recorder.close()
    assert list(batch.digest_blocks) == []
    assert not batch.starts[0].sampling.HasField("num_logprobs")


class FullDisk(io.BytesIO):
    def write(self, _):
        raise OSError(28, "No space left on device")


def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_file, "open", lambda *_: FullDisk(), raising=False)
    with capture_logs() as logs:
        recorder = Recorder(str(tmp_path / "run"))
        recorder.opened(PLANE)
        recorder.close()
        recorder = Recorder(str(tmp_path / "other"))
        recorder.opened(PLANE)
        recorder._file._thread.join()
        assert not recorder.is_recording
        batch = compute_pb2.ExecutionBatch(
            step_id=1, starts=[start(0, 4, [1])], slots=[0], query_lens=[4], positions=[0]
        )
        recorder.sent(batch)
        assert not batch.digest_blocks
        recorder.received(answer(1, 0))
    stops = [line for line in logs if line["event"].startswith("recording stopped")]
    assert [line["error"] for line in stops][-1] == "No space left on device"
    assert [line["file"] for line in stops].count(str(tmp_path / "other")) == 1


def test_log_probabilities_of_a_recording_that_ended_still_reach_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_file, "MAX_RECORD_BYTES", 1000)
    recorder = Recorder(str(tmp_path / "run"))
    recorder.opened(PLANE)
    parts = {"slots": [0], "query_lens": [4], "positions": [0], "sampled_rows": [0]}
    recorder.sent(compute_pb2.ExecutionBatch(step_id=1, starts=[start(0, 4, [1])], **parts))
    recorder.sent(compute_pb2.ExecutionBatch(step_id=2, starts=[start(1, 999, [2])]))
    assert not recorder.is_recording
    recorder.sent(compute_pb2.ExecutionBatch(step_id=3, **parts))
    for step_id in (1, 2, 3):
        output = answer(step_id, 1)
        recorder.received(output)
        assert step_id == 2 or not output.sample_logprobs
    recorder.close()


def test_a_disk_that_is_slow_ends_the_recording_before_memory_does(tmp_path, monkeypatch):
    may_write = threading.Event()

    class SlowDisk(io.BytesIO):
        def write(self, data):
            may_write.wait()
            return len(data)

    monkeypatch.setattr(recording_file, "open", lambda *_: SlowDisk(), raising=False)
    file = RecordingFile(str(tmp_path / "run"), max_waiting_bytes=100)
    with capture_logs() as logs:
        for _ in range(20):
            file.write(b"0123456789")
    assert not file.is_recording
    may_write.set()
    file.close()
    assert [line["event"] for line in logs] == ["recording stopped; requests go on"]


def test_what_is_recorded_is_in_the_file_while_the_recording_goes_on(tmp_path):
    """Or a control plane that is killed would take the last of it along."""
    file = RecordingFile(str(tmp_path / "run"))
    file.write(b"abc")
    wait_until(lambda: (tmp_path / "run").read_bytes() == b"\x03abc", "the record in the file")
    file.close()


def test_a_file_that_holds_something_is_not_overwritten_but_an_empty_one_is_taken(tmp_path):
    empty = tmp_path / "empty"
    empty.touch(mode=0o644)
    RecordingFile(str(empty)).close()
    assert empty.stat().st_mode & 0o777 == 0o600
    empty.write_text("something")
    for name in ("empty.1", "empty.2"):  # what is there is kept: a control plane begins anew
        file = RecordingFile(str(empty))
        assert file.path == str(tmp_path / name)
        file.write(b"record")
        file.close()
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "target")
    os.mkfifo(pipe)
    for path, why in (
        (link, "cannot write"),
        (pipe, "cannot write"),
        (tmp_path, "cannot write"),
        (tmp_path / "nowhere" / "run", "No such file"),
        ("a\0b", "cannot write"),
    ):
        with pytest.raises(ConfigError, match=why) as refused:
            RecordingFile(str(path))
        assert refused.value.field == "record"
    assert empty.read_text() == "something"
    assert not (tmp_path / "target").exists()


def test_two_that_record_under_one_name_before_either_has_written_keep_a_file_each(tmp_path):
    first, second = (RecordingFile(str(tmp_path / "run")) for _ in range(2))
    first.write(b"the first")
    second.write(b"2nd")
    first.close()
    second.close()
    assert second.path == str(tmp_path / "run.1")
    assert (tmp_path / "run").read_bytes() == b"\x09the first"
    assert (tmp_path / "run.1").read_bytes() == b"\x032nd"


def test_the_log_names_the_file_that_is_written(tmp_path):
    (tmp_path / "run").write_bytes(b"kept")
    with capture_logs() as logs:
        Recorder(str(tmp_path / "run")).close()
    assert logs == [{"event": "recording", "file": str(tmp_path / "run.1"), "log_level": "info"}]


def test_where_files_cannot_be_kept_a_recording_is_written_all_the_same(tmp_path, monkeypatch):
    def no_locks(_descriptor, _operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    file = RecordingFile(str(tmp_path / "run"))
    file.write(b"the first")
    file.close()
    assert (tmp_path / "run").read_bytes() == b"\x09the first"


@pytest.mark.parametrize("length", [0, 1, 127, 128, 300, 1 << 21, (1 << 28) - 1])
def test_lengths_are_varints_as_protobuf_writes_them(length):
    # Field 1 of a message that is a varint: its tag, then the number.
    header = recording_pb2.RecordingHeader(format_version=length).SerializeToString()
    assert encode_length(length) == (header[1:] if length else builtins.bytes(1))
