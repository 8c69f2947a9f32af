"""The check of tiny models of all architectures: rehearsed on the stand-in, and on a played device.

That the stand-in says what the CPU executor does is what makes the latter a measure on a GPU.
"""

from __future__ import annotations

import types
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from bench.gpu import architectures, expected_logits, needed_kernels, teacher_steps
from bench.gpu.architecture_shapes import SHAPES
from bench.gpu.architectures import Runs, check_architectures
from bench.gpu.drawn_models import drawn_model
from bench.gpu.findings import Findings, PartOptions
from bench.gpu.model_kernels import kernels_of
from bench.gpu.step_ways import LATE, OWN
from compute_plane.config import ComputePlaneConfig
from compute_plane.cuda import launchers

OPTIONS = PartOptions(Path("not used"), 86_400)  # from now on, and these tests come when they come
DENSE, MIXED, FLOAT8 = (
    next(s for s in SHAPES if s.name == name) for name in ("OLMo 2", "gpt-oss", "Qwen3 in float8")
)


def named(shape):
    return shape.name


@pytest.mark.spread(1)
@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_the_cuda_executor_says_what_the_cpu_executor_says(shape, monkeypatch):
    monkeypatch.setattr(architectures, "ROUNDS", 1)
    found = Findings()

    runs = Runs(ComputePlaneConfig().kernel_cache_root, "cpu")
    check_architectures(found, OPTIONS, runs, [shape])

    assert found.failures == []
    (result,) = found.values["architectures"]
    assert result["model"] == shape.name
    assert 0 < result["largest_error"] < 1e-3
    num_rows = len(teacher_steps.PROMPTS)
    decoded = num_rows * teacher_steps.TOGETHER + teacher_steps.ALONE
    assert result["logits"] == decoded + num_rows + 2  # two rows decode while a prompt goes on


@pytest.mark.spread(7)
@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_there_are_kernels_for_every_shape(shape):
    names = {one.name for one in kernels_of(drawn_model(shape.spec, shape.formats), "bfloat16", 16)}
    assert "sampling_t256" in names
    assert any("mxfp4" in name for name in names) == (shape is MIXED)
    for label in ("_fp8_g128_", "_fp8_b"):
        assert any(f"experts{label}" in name for name in names) == (shape is FLOAT8)


@pytest.mark.wide
def test_kernels_of_the_shapes_are_built_ahead_and_not_checked_one_by_one():
    models = [drawn_model(shape.spec, shape.formats) for shape in SHAPES]
    own = {one for model in models for one in kernels_of(model, "bfloat16", 16)}
    assert own <= set(needed_kernels.built_variants())
    assert own - set(needed_kernels.needed_variants())


def test_every_shape_has_what_no_other_has():
    specs = [shape.spec for shape in SHAPES]
    assert len({spec.name for spec in specs}) == len(specs) == 18
    # Latents, Gemma 4 and Qwen3's mixtures twice, a Llama for its formats.
    assert len({spec.architecture for spec in specs}) == 15
    assert any(spec.layers_without_rope and spec.turns for spec in specs)
    windows = [spec.window for spec in specs if spec.window is not None]
    assert len(windows) == 6
    assert max(windows) < max(teacher_steps.PROMPTS)


@pytest.mark.parametrize("spec", [SHAPES[0].spec, DENSE.spec], ids=lambda spec: spec.name)
def test_steps_compute_every_token_once_in_every_kind_of_step(spec):
    steps = teacher_steps.batches(spec)
    rows_of = {tuple(table): row for row, table in enumerate(steps[0].block_tables.tolist())}
    texts: dict[int, list[int]] = {row: [] for row in rows_of.values()}
    for step in steps:
        tokens, positions = iter(step.input_tokens.tolist()), iter(step.positions.tolist())
        for table, count in zip(step.block_tables.tolist(), step.query_lens, strict=True):
            row = rows_of[tuple(table)]
            for _ in range(count):
                assert next(positions) == len(texts[row])
                texts[row].append(next(tokens))
    assert len(set(np.concatenate([list(table) for table in rows_of]).tolist())) == (
        teacher_steps.num_blocks()
    )
    sizes = [step.query_lens.tolist() for step in steps]
    assert sizes[:3] == [[5, 17, 24], [1, 1, 16], [1, 1, 1]]
    assert sizes[-1] == [1]
    assert [len(step.sampled_rows) for step in steps[:3]] == [2, 3, 3]
    has_states = spec.recurrence is not None
    assert [len(step.states) for step in (steps[0], steps[-1])] == [3 * has_states, has_states]
    assert not has_states or steps[-1].states.tolist() == [1]


class PlayedStep:
    def __init__(self, output):
        self.output = output

    def wait(self):
        pass

    def answer(self):
        return self.output


class PlayedExecutor:
    """Says of each step, in turn, the logits that it is given."""

    def __init__(self, logits):
        self._logits = logits
        self._step = 0

    def launch(self, _):
        logits = self._logits[self._step % len(self._logits)]
        self._step += 1
        return PlayedStep(types.SimpleNamespace(failed_rows={}, logits=logits))

    def execute(self, batch):
        return self.launch(batch).answer()

    execute_graph = execute

    def capture_decode_graph(self, _):
        pass


class PlayedRuns(Runs):
    """A device that says what the CPU executor says, changed by `change(logits, way, round)`."""

    def __init__(self, change=lambda *_: None, *, graphs="1-2-4"):
        super().__init__(Path("not used"))
        object.__setattr__(self, "change", change)
        object.__setattr__(self, "graphs", graphs)
        object.__setattr__(self, "ways", [])

    def expected(self, model):
        random = np.random.default_rng(0)
        return [
            random.standard_normal((len(step.sampled_rows), model.spec.vocab_size), np.float32)
            for step in teacher_steps.batches(model.spec)
        ]

    def build_kernels(self, model, say):
        pass

    @contextmanager
    def running(self, model, way):
        with way.taken():
            self.ways.append(launchers.BEGINS_EARLY)
            logits = []
            for number in range(architectures.ROUNDS if way is OWN else 1):
                one = [step.copy() for step in self.expected(model)]
                self.change(one, way, number)
                logits += one
            yield types.SimpleNamespace(
                executor=PlayedExecutor(logits), numerics_id=f"cuda/…/graphs-{self.graphs}"
            )


def check(runs, *shapes):
    found = Findings()
    check_architectures(found, OPTIONS, runs, shapes or [DENSE])
    return found


def test_what_is_right_is_a_row_of_the_report_and_goes_both_ways():
    runs = PlayedRuns()
    found = check(runs, DENSE, MIXED)
    assert found.failures == []
    assert [row["model"] for row in found.values["architectures"]] == [DENSE.name, MIXED.name]
    for row in found.values["architectures"]:
        assert (row["dtype"], row["tolerance"], row["graphs"]) == ("bfloat16", 0.5, [1, 2, 4])
        assert (row["largest_error"], row["logits_off"], row["rounds_of_other_bits"]) == (0, 0, 0)
    assert runs.ways == [("",), ()] * 2


@pytest.mark.parametrize("change", [1.0, np.nan])
def test_logits_beyond_the_tolerance_are_a_fault(change):
    def off(logits, *_):
        logits[4][1, 7] += change

    found = check(PlayedRuns(off))
    (row,) = found.values["architectures"]
    assert found.failures == [
        f"{DENSE.name}: 1 of {row['logits']} rows of logits are off, the first at step 4"
    ]


def test_some_rows_may_go_through_other_experts_and_not_most():
    def of_steps(count):
        def off(logits, *_):
            for step in logits[:count]:
                step[:, 0] += 1

        return off

    assert check(PlayedRuns(of_steps(2)), MIXED).failures == []
    (failure,) = check(PlayedRuns(of_steps(9)), MIXED).failures
    assert "rows of logits are off, the first at step 0" in failure


def test_a_round_of_other_bits_than_launches_in_turn_give_is_a_fault():
    def race(logits, way, number):
        if way is OWN and number in (2, 4):
            logits[number][0, 0] = np.nextafter(logits[number][0, 0], np.float32(9))

    found = check(PlayedRuns(race))
    assert found.failures == [
        f"{DENSE.name}: 2 of 6 rounds of launches that begin early gave other bits than launches "
        "in turn, from step 2 on"
    ]
    (row,) = found.values["architectures"]
    assert row["rounds_of_other_bits"] == 2


def test_a_device_without_graphs_is_a_fault():
    found = check(PlayedRuns(graphs="none"))
    assert found.failures == [f"{DENSE.name}: no decode graph was captured"]


def test_what_was_found_before_an_end_is_in_the_file(tmp_path):
    """A way that takes the process down takes no figure along that was known by then."""

    def fails(_, way, __):
        if way is LATE:
            content = (tmp_path / "found.json").read_text()
            assert '"largest_error": 0.0' in content
            raise RuntimeError("lost")

    found = Findings(tmp_path / "found.json")
    check_architectures(found, OPTIONS, PlayedRuns(fails), [DENSE, MIXED])
    assert found.failures == [f"{shape.name}: RuntimeError: lost" for shape in (DENSE, MIXED)]


def test_bits_are_compared_where_the_cpu_executor_fails():
    class Failing(PlayedRuns):
        def expected(self, model):
            if not self.ways:
                self.ways.append("asked")
                raise RuntimeError("no compiler")
            return super().expected(model)

    found = check(Failing())
    assert found.failures == [f"{DENSE.name}, on the CPU: RuntimeError: no compiler"]
    (row,) = found.values["architectures"]
    assert row["rounds_of_other_bits"] == 0
    assert "largest_error" not in row


def test_answers_that_were_brought_are_taken_and_others_made(tmp_path):
    class NotAsked(PlayedRuns):
        def expected(self, model):
            if not self.ways:
                raise RuntimeError("asked")
            return super().expected(model)

    runs = NotAsked()
    object.__setattr__(runs, "kernel_cache", tmp_path)
    brought = PlayedRuns()
    expected_logits.write(
        tmp_path, [DENSE], lambda shape: brought.expected(drawn_model(shape.spec, shape.formats))
    )
    assert expected_logits.read(tmp_path, MIXED) is None
    found = Findings()
    check_architectures(found, OPTIONS, runs, [DENSE])
    assert found.failures == []
    assert found.values["architectures"][0]["largest_error"] == 0
    # A file that is damaged has none, and what was made of other sources is another's.
    file = tmp_path / expected_logits.FILE
    content = file.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"PK" + b"\0" * 100):
        file.write_bytes(damaged)
        assert expected_logits.read(tmp_path, DENSE) is None


def test_a_row_that_fails_is_told():
    output = types.SimpleNamespace(failed_rows={1: "no"}, logits=None)
    executor = types.SimpleNamespace(execute=lambda _: output)
    with pytest.raises(RuntimeError, match=r"rows \[1\] failed"):
        teacher_steps.logits_of(executor, teacher_steps.batches(DENSE.spec)[:1])
