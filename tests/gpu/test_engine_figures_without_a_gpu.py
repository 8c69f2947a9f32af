"""What `make gpu` measures of the engine, with the reference operations and a tiny model."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from bench.gpu import engine_rival, engine_serving, engine_steps, step_answers, step_ways
from bench.gpu.engine_steps import PlaneFlags
from bench.gpu.findings import Findings
from bench.gpu.random_model import EIGHT_BILLION, ONE_BILLION, TINY, write_model
from compute_plane.cuda import launchers
from compute_plane.cuda.next_product import NextProduct
from compute_plane.model.loader import load_model
from hetero_infer.bench.load import StreamRecord
from kernels.cuda.fetched_weights import NOTHING
from kernels.cuda.operations import all_variants


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    monkeypatch.setattr(step_answers, "STEPS", 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(TINY, tmp_path_factory.mktemp("model") / "tiny")


def test_the_model_is_what_its_shape_says(model):
    loaded = load_model(str(model))
    assert loaded.spec.num_parameters == TINY.num_parameters
    assert loaded.spec.num_kv_heads == TINY.num_kv_heads
    tensors = [loaded.source.tensor(name).to_float32() for name in loaded.source.names]
    assert sum(tensor.nbytes for tensor in tensors) == 4 * TINY.num_parameters


def test_a_step_reads_every_weight_once_and_two_rows_of_keys_and_values_a_token():
    assert 1.2e9 < ONE_BILLION.num_parameters < 1.3e9
    assert ONE_BILLION.step_weight_bytes(2) == 2 * ONE_BILLION.num_parameters
    assert ONE_BILLION.kv_bytes_per_token(2) == 16 * 2 * 8 * 64 * 2
    flags = PlaneFlags("cuda", "bfloat16", "int8")
    read = [engine_steps.read_bytes(ONE_BILLION, flags, tokens) for tokens in (0, 3)]
    assert read == [2 * ONE_BILLION.num_parameters, read[0] + 3 * 16 * 2 * 8 * (64 + 4)]


def test_of_a_step_of_the_large_model_more_time_is_reading():
    assert 8.0e9 < EIGHT_BILLION.num_parameters < 8.1e9
    launches = EIGHT_BILLION.num_layers / ONE_BILLION.num_layers
    bytes_read = [shape.step_weight_bytes(2) for shape in (EIGHT_BILLION, ONE_BILLION)]
    assert bytes_read[0] > 3 * launches * bytes_read[1]


@pytest.mark.slow
def test_a_model_may_be_measured_with_graphs_alone(model):
    work = engine_steps.Workload(
        batches=(1,), context=20, steps=2, warm_up=1, repeats=2, eager_batches=()
    )
    found = Findings()
    flags = PlaneFlags("cpu", "float32")
    engine_steps.measure_steps(found, TINY, model, flags, gb_per_s=10.0, work=work)
    (one,) = found.values["engine_steps"]["batches"]
    assert set(one) >= {"graphs", "of_read_time"}
    assert "eager" not in one
    assert found.failures == []


def test_steps_without_graphs_are_measured_where_graphs_fail(model, monkeypatch):
    executor_on = engine_steps.executor_on

    def fails_with_graphs(*given):
        if given[-1].uses_graphs:
            raise RuntimeError("capture failed")
        return executor_on(*given)

    monkeypatch.setattr(engine_steps, "executor_on", fails_with_graphs)
    work = engine_steps.Workload(
        batches=(1,), context=20, steps=2, warm_up=1, repeats=2, profiled_batches=()
    )
    found = Findings()
    flags = PlaneFlags("cpu", "float32")
    engine_steps.measure_steps(found, TINY, model, flags, gb_per_s=10.0, work=work)
    ways = [way.name for way in step_ways.WAYS if way.uses_graphs and way.batches_of(work)]
    assert found.failures == [f"decode steps {way}: RuntimeError: capture failed" for way in ways]
    (one,) = found.values["engine_steps"]["batches"]
    assert one["eager"]["median_ms"] > 0
    assert found.targets == []


@pytest.mark.wide
def test_steps_are_measured_with_and_without_graphs(model):
    work = engine_steps.Workload(
        batches=(1, 3, 17), context=20, steps=2, warm_up=1, repeats=2, profiled_batches=(),
        has_extra=True,
    )  # fmt: skip
    found = Findings()
    flags = PlaneFlags("cpu", "float32")
    engine_steps.measure_steps(found, TINY, model, flags, gb_per_s=10.0, work=work)
    figures = found.values["engine_steps"]
    one, three, many = figures["batches"]
    assert (one["rows"], three["rows"], many["rows"]) == (1, 3, 17)
    per_token = TINY.kv_bytes_per_token(4)
    assert three["read_bytes"] - one["read_bytes"] == 2 * 20 * per_token
    assert one["read_ms"] == pytest.approx(one["read_bytes"] / 10e9 * 1e3)
    assert one["of_read_time"] == pytest.approx(one["graphs"]["median_ms"] / one["read_ms"])
    assert one["graphs_of_eager"] > 0
    assert one["own_of_library"] > 0
    assert one["own_of_late"] > 0
    assert three["own_of_early"] > 0
    assert many["own_of_unfetched"] > 0
    assert many["own_of_more_fetched"] > 0
    assert "own_of_library" not in many
    assert "own_of_unfetched" not in three
    assert found.failures == []
    assert "eager" not in three  # only where graphs are compared
    assert len(found.targets) == 4


def test_added_products_with_wide_panels_wait_for_the_launch_ahead_in_service():
    kernels = [one for one in all_variants(every=True) if one.expectation.begins_early]
    waiting = {one.name for one in kernels if not launchers.begins_before_end(one)}
    assert waiting == {
        f"dense_matmul_added_{biased}{dtype}_m{columns}_n32"
        for biased in ("", "biased_")
        for dtype in ("bfloat16", "float16")
        for columns in (8, 16)
    }
    with step_ways.EARLY.taken():
        assert all(launchers.begins_before_end(one) for one in kernels)
    with step_ways.LATE.taken():
        assert not any(launchers.begins_before_end(one) for one in kernels)


def test_what_is_fetched_ahead_of_a_product_is_taken_away_by_a_way():
    product = NextProduct(torch.empty(8192, 4096, dtype=torch.bfloat16))
    fetched = product.fetch_plan(64).num_bytes
    with step_ways.UNFETCHED.taken():
        assert product.fetch_plan(64) == NOTHING
    with step_ways.MORE_FETCHED.taken():
        assert product.fetch_plan(64).num_bytes == 2 * fetched


@pytest.mark.wide
def test_launches_that_begin_early_must_say_what_others_say(model, monkeypatch):
    ways = []

    def answers(executor, rows, blocks_of_row):
        ways.append(launchers.BEGINS_EARLY)
        said = step_answers.answers(executor, rows, blocks_of_row)
        assert [len(step) for step in said] == [3] * (1 + step_answers.STEPS)
        assert len({one for step in said for one in step}) == 3 * len(said)  # none like another
        return said if len(ways) < 2 else [*said[:2], *([((1, 0.0),)] * 3)]

    monkeypatch.setattr(engine_steps, "answers", answers)
    work = engine_steps.Workload(
        batches=(3,),
        context=20,
        steps=2,
        warm_up=1,
        repeats=1,
        eager_batches=(),
        profiled_batches=(),
    )
    found = Findings()
    flags = PlaneFlags("cpu", "float32")
    engine_steps.measure_steps(found, TINY, model, flags, gb_per_s=10.0, work=work)
    assert ways == [("",), ()]
    assert found.failures == ["launches that begin early say something else, 3 rows from step 2 on"]


@pytest.mark.wide
def test_the_whole_engine_is_measured_and_a_rival_that_fails_is_a_line(model, monkeypatch, capsys):
    def missing(*_, **__):
        raise ModuleNotFoundError("No module named 'transformers'")

    monkeypatch.setattr(engine_rival, "transformers_tokens_per_second", missing)
    monkeypatch.setattr(engine_serving, "IDLE_STREAMS", 2)
    found = Findings()
    config = engine_serving.engine_config(
        model, device="cpu", dtype="float32", max_num_blocks=64, num_threads=1
    )
    load = engine_serving.Load(
        levels=(1, 2), prompt_tokens=8, output_tokens=10, many=3, many_prompt_tokens=8,
        many_output_tokens=4,
    )  # fmt: skip
    engine_serving.measure_engine(found, config, load)
    one, two = found.values["engine_serving"]
    assert (one["streams"], two["streams"]) == (1, 2)
    assert two["step_ms"] > 0
    assert two["plane_step_ms"] > 0
    assert 0 <= two["idle_share"] <= 1
    assert [target["name"] for target in found.targets] == [
        "idle share of the device between decode steps of 2 streams"
    ]
    engine_serving.compare_with_transformers(found, config, load, seconds=10)
    assert found.values["throughput"]["output_tokens_per_second"] > 0
    why = "ModuleNotFoundError: No module named 'transformers'"
    assert found.values["throughput"]["transformers"] == {"unavailable": why}
    assert f"transformers' continuous batching: {why}" in capsys.readouterr().out


def test_a_step_at_the_client_is_timed_while_all_streams_decode():
    def stream(*arrivals: float) -> StreamRecord:
        return StreamRecord(4, 0.0, arrivals, (1,) * len(arrivals), arrivals[-1])

    # From 3 s to 6 s each has three steps.
    records = [stream(1, 2, 3, 4, 5, 6), stream(3, 4, 5, 6, 7)]
    assert engine_serving.step_milliseconds_of(records) == pytest.approx(1000)


@pytest.mark.slow
def test_transformers_batches_the_same_prompts(model):
    rate = engine_rival.transformers_tokens_per_second(
        model, [[5, 6, 7], [8, 9]], 4, device="cpu", dtype="float32", seconds=120,
        settings={"num_blocks": 16, "page_size": 32, "max_batch_tokens": 64},
    )  # fmt: skip
    assert rate > 0


def test_a_rival_that_was_killed_is_not_explained_by_what_it_said_last(monkeypatch):
    killed = subprocess.CompletedProcess([], -9, "", "a warning\n")
    monkeypatch.setattr(engine_rival.subprocess, "run", lambda *_, **__: killed)
    with pytest.raises(RuntimeError, match=r"^ended by signal 9$"):
        engine_rival.transformers_tokens_per_second(
            Path("m"), [[1]], 1, device="cpu", dtype="float32", seconds=1
        )


def test_a_rival_that_gives_too_little_is_no_figure(monkeypatch):
    output = types.SimpleNamespace(generated_tokens=[1])
    model = types.SimpleNamespace(generate_batch=lambda **_: {"a": output})
    model.to = lambda _: model
    model.eval = lambda: model
    fake = types.SimpleNamespace(
        AutoModelForCausalLM=types.SimpleNamespace(from_pretrained=lambda *_, **__: model),
        GenerationConfig=lambda **_: None,
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    job = {
        "model": "m", "prompts": [[1]], "output_tokens": 4, "device": "cpu", "dtype": "float32",
        "settings": None,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="1 tokens of 4"):
        engine_rival.measure(job)
