"""The Python API: samples, beams, priorities, states, and parts of one's own."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest

from hetero_infer import (
    ConfigError,
    EngineConfig,
    GenerationParams,
    InferenceEngine,
    KVCacheManager,
    RequestState,
    Scheduler,
    ValidationError,
)
from hetero_infer.client import Client, Delta
from hetero_infer.local_planes import (
    compute_socket,
    control_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import PlaneStartError, wait_all_ready

SMALL = EngineConfig(executor="simulated", block_size=4, max_num_blocks=64, max_batch_size=8)


@pytest.fixture(scope="module")
def engine():
    with InferenceEngine(SMALL) as engine:
        yield engine


def test_samples_are_told_apart_and_the_first_is_that_of_a_single_one(engine):
    params = GenerationParams(max_tokens=12, seed=3, ignore_eos=True)
    engine.submit_request("Hello", params)
    (single,) = engine.run()
    engine.submit_request("Hello", GenerationParams(max_tokens=12, seed=3, ignore_eos=True, n=4))
    (several,) = engine.run()
    assert several.output_text == several.samples[0].output_text == single.output_text
    assert len({sample.output_text for sample in several.samples}) == 4
    assert {sample.finish_reason for sample in several.samples} == {"length"}
    assert (single.generated_tokens, several.generated_tokens) == (12, 48)
    assert several.cached_tokens == 4
    assert engine.get_memory_stats().used_blocks == 0


def test_a_beam_search_gives_its_best_answers_first(engine):
    answers = {}
    for width, n in ((1, 1), (3, 1), (3, 3)):
        params = GenerationParams(max_tokens=6, beam_width=width, n=n, ignore_eos=True)
        engine.submit_request("Hello", params)
        (result,) = engine.run()
        assert result.success
        answers[width, n] = [sample.output_tokens for sample in result.samples]
    assert answers[3, 3][:1] == answers[3, 1]
    assert len({tuple(tokens) for tokens in answers[3, 3]}) == 3


def test_a_search_too_wide_is_refused_when_it_is_submitted():
    with InferenceEngine(EngineConfig(executor="simulated", max_num_seqs=2)) as engine:
        with pytest.raises(ValidationError, match=r"at most max_num_seqs \(2\), .* got 3"):
            engine.submit_request("x", GenerationParams(beam_width=3))
        assert not engine.has_pending_work()


def test_states_and_times_of_requests_can_be_watched(engine):
    params = GenerationParams(max_tokens=5, ignore_eos=True)
    ids = [engine.submit_request("abc", params), engine.submit_request("b", params, priority=3)]
    listed = engine.list_requests()
    assert [info.request_id for info in listed] == ids
    assert [info.priority for info in listed] == [0, 3]
    assert {info.state for info in listed} == {RequestState.PENDING}
    results = engine.run()
    for result in results:
        states = [change.state.value for change in result.history]
        assert states == ["pending", "prefill", "decode", "completed"]
        times = [change.at for change in result.history]
        assert times == sorted(times)
    assert engine.list_requests() == []


def test_a_salt_keeps_tenants_apart(engine):
    cached = []
    for salt in ("ours", "ours", "theirs"):
        engine.submit_request("q" * 21, GenerationParams(max_tokens=2), cache_salt=salt)
        cached += [result.cached_tokens for result in engine.run()]
    assert cached == [0, 20, 0]


OWN = """
    from hetero_infer import KVCacheManager, Scheduler

    seen = []

    class Mine(Scheduler):
        def schedule(self, now=0.0):
            seen.append("schedule")
            return super().schedule(now)

    def pages(num_blocks, block_size, *, prefix_cache, roles_matter):
        seen.append(("pages", num_blocks, block_size, prefix_cache, roles_matter))
        return KVCacheManager(num_blocks, block_size)

    def broken(config, kv_cache):
        raise LookupError("not today")
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """The module's name; it lies in the working directory, and only there."""
    (tmp_path / "my_scheduling.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    return "my_scheduling"


def test_a_scheduler_and_a_kv_cache_manager_of_ones_own_are_classes_or_functions(engine):
    made = []

    class Mine(Scheduler):
        def __init__(self, config, kv_cache):
            super().__init__(config, kv_cache)
            made.append("scheduler")

    def pages(num_blocks, block_size, *, prefix_cache, roles_matter):
        made.append((num_blocks, block_size, prefix_cache, roles_matter))
        return KVCacheManager(num_blocks, block_size)

    params = GenerationParams(max_tokens=9, seed=1)
    with InferenceEngine(SMALL, scheduler=Mine, kv_cache=pages) as own:
        own.submit_request("Hello", params)
        (result,) = own.run()
    assert made == [(64, 4, True, False), "scheduler"]
    engine.submit_request("Hello", params)
    assert result.output_text == engine.run()[0].output_text


@pytest.mark.wide
def test_a_control_plane_process_takes_them_by_name_from_where_it_is_started(own_module, engine):
    config = EngineConfig(
        executor="simulated",
        block_size=4,
        max_num_blocks=64,
        scheduler=f"{own_module}:Mine",
        kv_cache_manager=f"{own_module}:pages",
    )
    params = GenerationParams(max_tokens=9, seed=1, ignore_eos=True)
    engine.submit_request("Hello", params)
    expected = engine.run()[0].output_text
    with private_directory() as directory:
        compute, control = compute_socket(directory), control_socket(directory)
        with (
            start_compute_plane(config, compute) as compute_plane,
            start_control_plane(config, compute, f"--listen={control}") as control_plane,
        ):
            wait_all_ready([compute_plane, control_plane])
            with Client(control) as client:
                events = list(client.stream("Hello", params))
    assert "".join(event.text for event in events if isinstance(event, Delta)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheduler": "nowhere:Thing"}, "scheduler: nowhere:Thing cannot be imported"),
        ({"kv_cache": 5}, "kv_cache_manager: 5 must be callable, got int"),
        ({"config": EngineConfig(scheduler="mine")}, "must be module:attribute, got 'mine'"),
    ],
)
def test_what_is_no_part_is_said_before_anything_is_started(arguments, message):
    with pytest.raises(ConfigError, match=message):
        InferenceEngine(**arguments)


def test_a_part_that_cannot_be_made_says_why(monkeypatch, own_module):
    monkeypatch.syspath_prepend(".")
    with pytest.raises(ConfigError, match="making it failed: LookupError: not today"):
        InferenceEngine(SMALL, scheduler=f"{own_module}:broken")


def test_a_control_plane_process_without_its_part_ends_with_one_line():
    config = EngineConfig(executor="simulated", scheduler="nowhere:Thing")
    with private_directory() as directory:
        compute, control = compute_socket(directory), control_socket(directory)
        with (
            start_control_plane(
                config, compute, f"--listen={control}", on_output=lambda _: None
            ) as plane,
            pytest.raises(PlaneStartError) as caught,
        ):
            plane.wait_ready()
    assert caught.value.exit_status == 2
    assert "scheduler: nowhere:Thing cannot be imported" in caught.value.output[-1]


def test_stops_and_log_probabilities_are_those_of_the_wire(engine):
    whole = GenerationParams(max_tokens=40, temperature=0.0, num_logprobs=2, num_prompt_logprobs=1)
    engine.submit_request("hello", whole)
    [plain] = engine.run()
    stop = plain.output_text[10:13]
    engine.submit_request("hello", dataclasses.replace(whole, stop=(stop,)))
    [stopped] = engine.run()
    before = plain.output_text[: plain.output_text.index(stop)]
    assert stopped.output_text == before
    assert stopped.output_tokens == list(before.encode())
    assert (stopped.finish_reason, stopped.samples[0].matched_stop) == ("stop", stop)
    assert stopped.samples[0].logprobs == plain.samples[0].logprobs[: len(before)]
    assert len(plain.samples[0].logprobs) == len(plain.output_tokens)
    assert stopped.prompt_logprobs == plain.prompt_logprobs
    assert len(plain.prompt_logprobs) == len("hello") - 1
    assert engine.get_memory_stats().used_blocks == 0
