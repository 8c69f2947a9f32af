from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.core.embedding import NOTHING_GENERATED, Embedding, Pooling
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from hetero_infer.replay.comparison import rules_for
from hetero_infer.replay.fitting import check_features
from hetero_infer.replay.replay_plane import PlaneLostError, ReplayPlane
from planes.errors import ConfigError
from protos.hetero.compute.v1 import compute_pb2
from tests.compute_plane.rpc.plane_harness import BLOCK_SIZE, Harness
from tests.hetero_infer.replay.replay_bench import (
    PROMPTS,
    RecordedRun,
    read,
    record,
    replay,
    tamper,
    with_tokens,
    write,
)

SAMPLED = GenerationParams(max_tokens=12, seed=5, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def planes() -> Iterator[tuple[Harness, Harness]]:
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        harnesses = Harness(Path(a)), Harness(Path(b))
        yield harnesses
        for harness in harnesses:
            harness.close()


@pytest.fixture(scope="module")
def recording(planes, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "run"
    record(planes[0], path)
    return path


@pytest.fixture
def other(planes) -> Iterator[Harness]:
    """The plane to replay on, as it was before the test."""
    yield planes[1]
    vars(planes[1].executor).pop("execute", None)


def test_the_same_numerics_give_the_same_tokens_numbers_and_blocks(recording, other):
    report = replay(other, recording)
    assert report.num_differences == 0
    assert report.num_sessions == 1
    assert report.num_tokens == report.num_compared >= 14 + 2 * 9 + 11 + 5
    assert report.num_blocks > 20
    assert report.rules.is_exact


def test_clients_are_told_the_same_with_and_without_a_recording(planes, tmp_path):
    recorded = record(planes[0], tmp_path / "run")
    plain = RecordedRun(planes[0], None)
    news = plain.ask()
    plain.close()

    def told(updates):
        tokens, logprobs = {}, {}
        for update in updates:
            key = (update.request_id, update.sample_index)
            tokens.setdefault(key, []).extend(update.new_token_ids)
            logprobs.setdefault(key, []).extend(update.logprobs)
        return tokens, logprobs

    assert told(recorded) == told(news)
    assert [bool(logprobs) for logprobs in told(news)[1].values()].count(True) == 1


def test_a_damaged_block_is_named_with_its_tokens(recording, other):
    damaged = []

    def damage(number, batch, output):
        if number == 6:  # after the prompts: a block that nobody writes any more
            block = int(batch.block_tables[0, 1])
            damaged.append((block, other.executor.pool[block].tolist()))
            other.executor.pool[block, 2] ^= 1
        return output

    tamper(other, damage)
    report = replay(other, recording)
    (block, tokens) = damaged[0]
    named = [found for found in report.differences if found.what == "KV block"]
    assert [found.block for found in named] == [block]
    assert f"tokens {' '.join(map(str, tokens))}" in named[0].note
    assert f"positions {BLOCK_SIZE} to {2 * BLOCK_SIZE - 1}" in named[0].note
    assert {found.step for found in report.differences} == {7}
    assert any(found.what == "token" for found in report.differences)
    assert report.is_stopped


def test_a_block_that_is_filled_with_other_bytes_is_named_although_no_token_differs(
    recording, other
):
    filled = []

    def miswrite(_, batch, output):
        if filled or len(batch.digest_blocks) != 1:
            return output
        filled.append(batch.digest_blocks[0])
        return dataclasses.replace(output, block_digests=[output.block_digests[0] ^ 1])

    tamper(other, miswrite)
    (found,) = replay(other, recording, finds_all=True).differences
    assert (found.what, found.block) == ("KV block", filled[0])
    assert int(found.recorded, 16) ^ 1 == int(found.replayed, 16)
    assert "tokens " in found.note


def test_hidden_states_that_differ_are_named_and_equal_ones_are_not(planes, other, tmp_path):
    path = tmp_path / "run"
    embedding = Embedding(Pooling.MEAN)
    text = Request(1, list(b"a text of some blocks"), NOTHING_GENERATED, embedding=embedding)
    run = RecordedRun(planes[0], path)
    run.ask(requests=[text])
    run.close()
    assert replay(other, path).num_differences == 0

    def change(_, batch, output):
        assert batch.embeddings
        return dataclasses.replace(output, embeddings=output.embeddings * 1.25)

    tamper(other, change)
    (found,) = replay(other, path, finds_all=True).differences
    assert (found.what, found.row, found.note) == (
        "hidden states", 0, "0.25 of their length apart",
    )  # fmt: skip
    assert replay(other, path, finds_all=True, tolerance=0.3).num_differences == 0


def test_a_wrong_block_id_in_a_batch_is_found_where_its_block_is_filled(recording, other):
    messages = read(recording)
    batches = [m for m in messages if isinstance(m, compute_pb2.ExecutionBatch)]
    used = {block for batch in batches for block in batch.new_block_ids}
    used |= {block for batch in batches for start in batch.starts for block in start.block_ids}
    batch = next(b for b in batches if b.new_block_ids and b.slots[0] == 0 and not b.starts)
    assert batch.new_block_counts[0] == 1
    right = batch.new_block_ids[0]
    batch.new_block_ids[0] = max(used) + 1
    report = replay(other, write(messages), finds_all=True)
    assert {found.block for found in report.differences} == {right}
    assert all(found.what == "KV block" for found in report.differences)


def test_another_token_is_reported_once_because_its_slot_is_led_back(recording, other):
    def draw_another(number, _, output):
        return with_tokens(output, 1, 33) if number == 4 else output

    tamper(other, draw_another)
    report = replay(other, recording, finds_all=True)
    (found,) = report.differences
    assert (found.what, found.step, found.row) == ("token", 4, 1)
    assert found.replayed.startswith("33 ")
    assert "full blocks of its table are as they were filled" in found.note


def test_another_log_probability_is_reported_with_its_token(recording, other):
    def shift(number, _, output):
        if number != 5:
            return output
        first, *rest = output.sample_logprobs
        return dataclasses.replace(
            output, sample_logprobs=[dataclasses.replace(first, logprob=-99.0), *rest]
        )

    tamper(other, shift)
    (found,) = replay(other, recording, finds_all=True).differences
    assert (found.what, found.step, found.row, found.replayed) == ("log-probability", 5, 0, "-99.0")


def test_slots_that_begin_as_others_do_are_replayed_like_all(planes, other, tmp_path):
    asked = [
        ("a text that samples have in common", GenerationParams(max_tokens=6, seed=2, n=3)),
        ("a text that beams have in common", GenerationParams(max_tokens=8, seed=1, beam_width=3)),
    ]
    record(planes[0], tmp_path / "run", asked)
    messages = read(tmp_path / "run")
    batches = [m for m in messages if isinstance(m, compute_pb2.ExecutionBatch)]
    begun = [start for batch in batches for start in batch.starts if start.HasField("prefix")]
    assert len(begun) > 10
    assert max(len(start.token_ids) for start in begun) == 1
    assert replay(other, tmp_path / "run").num_differences == 0

    def draw_another(number, _, output):
        return with_tokens(output, -1, 33) if number == 5 else output

    tamper(other, draw_another)
    (found,) = replay(other, tmp_path / "run", finds_all=True).differences
    assert (found.what, found.step) == ("token", 5)
    assert "full blocks of its table are as they were filled" in found.note
    with pytest.raises(ConfigError, match="starts slots with what others have"):
        check_features(
            compute_pb2.ExecutionBatch(step_id=1, starts=begun[:1]), compute_pb2.DescribeResponse()
        )


def test_a_row_that_fails_on_one_plane_only_is_reported(recording, other):
    def fail(number, _, output):
        return dataclasses.replace(output, failed_rows={0: "NaN"}) if number == 3 else output

    tamper(other, fail)
    (found,) = replay(other, recording, finds_all=True).differences
    assert (found.what, found.step, found.recorded, found.replayed) == (
        "row failure",
        3,
        "none",
        "NaN",
    )


def of_other_numerics(path: Path) -> bytes:
    messages = read(path)
    messages[0].numerics_id = "simulated/elsewhere"
    return write(messages)


def test_unequal_numerics_may_draw_another_token_where_probabilities_agree(planes, other, tmp_path):
    record(planes[0], tmp_path / "run", [("sampled prompt", SAMPLED)])
    data = of_other_numerics(tmp_path / "run")
    tamper(other, lambda n, _, output: with_tokens(output, 0, 33) if n in (3, 5) else output)
    report = replay(other, data)
    assert (report.num_differences, report.num_near_ties) == (0, 2)
    assert not report.rules.is_exact
    assert report.num_blocks == 0


def test_unequal_numerics_excuse_no_other_probability_of_the_recorded_token(
    planes, other, tmp_path
):
    record(planes[0], tmp_path / "run", [("sampled prompt", SAMPLED)])
    data = of_other_numerics(tmp_path / "run")

    def confuse(number, batch, output):
        if number == 3:
            other.executor.pool[batch.block_tables[0, 0], 0] ^= 1  # the probe reads what is wrong
            return with_tokens(output, 0, 33)
        return output

    tamper(other, confuse)
    report = replay(other, data)
    assert [found.what for found in report.differences] == ["token"]
    assert report.num_near_ties == 0


def test_a_tolerance_of_zero_asks_unequal_numerics_for_every_bit(recording, other):
    report = replay(other, of_other_numerics(recording), tolerance=0.0)
    assert report.num_differences == 0
    assert report.num_blocks > 20


def test_a_new_session_in_the_recording_starts_from_nothing(planes, other, tmp_path):
    run = RecordedRun(planes[0], tmp_path / "run")
    run.ask()
    run.loop.close()
    run.ask(PROMPTS[:2])
    run.close()
    report = replay(other, tmp_path / "run")
    assert (report.num_sessions, report.num_differences) == (2, 0)


def test_batches_without_an_answer_are_run_and_not_compared(recording, other):
    messages = read(recording)
    last = max(i for i, m in enumerate(messages) if isinstance(m, compute_pb2.ExecutionOutput))
    report = replay(other, write(messages[:last]))
    assert (report.num_unanswered, report.num_differences) == (1, 0)


def test_a_batch_that_is_refused_on_one_plane_only_ends_its_session(recording, other):
    messages = read(recording)
    batches = [m for m in messages if isinstance(m, compute_pb2.ExecutionBatch)]
    batches[3].positions[0] += 1
    report = replay(other, write(messages), finds_all=True)
    (found,) = report.differences
    assert (found.what, found.recorded, found.step) == ("refusal", "none", batches[3].step_id)
    assert "positions[0]" in found.replayed
    assert report.num_skipped == len(batches) - 4


def test_a_plane_that_another_controller_uses_is_left_alone(other):
    other.open("somebody else")
    plane = ReplayPlane(other.address)
    with pytest.raises(PlaneLostError, match=r"another controller uses.*--take-over"):
        plane.open()
    plane.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda p: setattr(p, "block_size", 8), "block_size"),
        (lambda p: setattr(p, "num_blocks", 1), "max_num_blocks"),
        (lambda p: setattr(p.limits, "max_slots", 1), "max_slots"),
        (lambda p: setattr(p.model, "vocab_size", 7), "vocab_size"),
        (lambda p: setattr(p.model, "sha256", "ab"), "model"),
        (lambda p: p.features.remove("logprobs"), "compute"),
    ],
)
def test_a_plane_that_the_recording_does_not_fit_is_refused(planes, change, field):
    recorded, replaying = planes[0].describe(), planes[1].describe()
    recorded.model.sha256 = "cd"
    change(replaying)
    with pytest.raises(ConfigError) as refused:
        rules_for(recorded, replaying)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("dtype", "numerics_id", "tolerance"),
    [
        ("float32", "cpu/avx2/F32/kv-float32-16", 0.01),
        ("float32", "cpu/avx2/F32/kv-bfloat16-16", 0.5),
        ("bfloat16", "cuda/x", 0.5),
        ("float16", "cuda/x/float16/kv-float16-16", 0.1),
        ("float16", "cuda/x/float16/kv-bfloat16-16", 0.5),
        ("float32", "cpu/avx2/F32/kv-int8-16", 1.0),
        ("bfloat16", "cuda/x/bfloat16/kv-float8-16/graphs-1-2", 1.0),
        ("Q4_1, Q8_0", "cpu/amx/Q4_1, Q8_0/kv-bfloat16-16", 1.0),
    ],
)
def test_the_coarser_plane_gives_the_tolerance(dtype, numerics_id, tolerance):
    exact = compute_pb2.DescribeResponse(numerics_id="other/kv-float32-16")
    exact.model.dtype = "float32"
    coarse = compute_pb2.DescribeResponse(numerics_id=numerics_id)
    coarse.model.dtype = dtype
    assert rules_for(exact, coarse).tolerance == tolerance
    assert rules_for(coarse, exact).tolerance == tolerance
    assert rules_for(coarse, coarse).tolerance == 0.0


def a_draft(batch):
    batch.query_lens[0] += 1
    batch.draft_counts.append(1)
    batch.draft_ids.append(0)


def a_constraint(batch):
    batch.constraints.add(row=0, allowed_tokens=b"\xff")


def a_constraint_behind_a_draft(batch):
    batch.constraints.add(row=0, allowed_tokens=b"\xff", num_drafts=1)


def hidden_states(batch):
    batch.embeddings.add(row=0, part=compute_pb2.EMBEDDING_PART_LAST)


@pytest.mark.parametrize(
    ("feature", "add", "said"),
    [
        ("drafts", a_draft, "speculative_tokens"),
        ("constraints", a_constraint, "constraints"),
        ("draft_constraints", a_constraint_behind_a_draft, "grammar_drafts"),
        ("embeddings", hidden_states, "wants hidden states"),
    ],
)
def test_what_a_plane_does_not_take_is_not_replayed_on_it(
    recording, other, monkeypatch, feature, add, said
):
    messages = read(recording)
    batches = [m for m in messages if isinstance(m, compute_pb2.ExecutionBatch)]
    add(next(b for b in batches if len(b.query_lens) == 1))
    described = ReplayPlane.describe

    def without(plane):
        answer = described(plane)
        answer.features.remove(feature)
        return answer

    monkeypatch.setattr(ReplayPlane, "describe", without)
    assert replay(other, recording).num_differences == 0  # in which there is none
    with pytest.raises(ConfigError, match=said):
        replay(other, write(messages))
