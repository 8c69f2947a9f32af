"""The Python API, with the simulated executor: its text depends on every token of the sequence."""

from __future__ import annotations

import pytest

from hetero_infer import (
    ConfigError,
    EngineConfig,
    EngineError,
    ExecutionError,
    GenerationParams,
    InferenceEngine,
    MemoryError,  # noqa: A004 - the family's public name
    SimpleTokenizer,
    ValidationError,
)
from tests.hetero_infer.small_engine import SMALL, run_alone

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def engine():
    """One engine for many tests: small enough that requests queue, chunk and preempt."""
    with InferenceEngine(
        EngineConfig(
            executor="simulated",
            block_size=4,
            max_num_blocks=64,
            max_batch_size=5,
            max_total_tokens=16,
            max_model_len=200,
        )
    ) as engine:
        yield engine


REQUESTS = [
    (
        f"prompt {i} " + "x" * (i * 7 % 60),
        GenerationParams(20 + i % 5 * 9, i % 3 * 0.8, 0.9, seed=i),
    )
    for i in range(24)
]


def test_requests_together_each_get_the_text_they_get_alone(engine):
    ids = [engine.submit_request(prompt, params) for prompt, params in REQUESTS]
    assert engine.has_pending_work()
    together = {result.request_id: result for result in engine.run()}
    assert not engine.has_pending_work()
    assert sorted(together) == ids
    assert engine.get_metrics().num_preemptions > 0
    for request_id, (prompt, params) in zip(ids, REQUESTS, strict=True):
        alone = run_alone(engine, prompt, params)
        assert together[request_id].output_tokens == alone.output_tokens
        assert together[request_id].output_text == alone.output_text


def test_requests_may_join_between_steps(engine):
    alone = [run_alone(engine, prompt, params) for prompt, params in REQUESTS[:6]]
    ids, results = [], {}
    for prompt, params in REQUESTS[:6]:
        ids.append(engine.submit_request(prompt, params))
        for _ in range(3):
            results |= {result.request_id: result for result in engine.step()}
    results |= {result.request_id: result for result in engine.run()}
    assert [results[i].output_text for i in ids] == [result.output_text for result in alone]


def test_a_result_says_what_was_generated(engine):
    result = run_alone(engine, "Hello", GenerationParams(max_tokens=7, seed=1, ignore_eos=True))
    assert result.success
    assert result.error is None
    assert result.finish_reason == "length"
    assert result.generated_tokens == len(result.output_tokens) == 7
    assert result.output_text == engine.tokenizer.decode(result.output_tokens)
    assert result.duration > 0


def test_a_prompt_may_be_token_ids(engine):
    text, params = "Hello", GenerationParams(max_tokens=9, seed=4)
    by_text = run_alone(engine, text, params)
    by_tokens = run_alone(engine, list(text.encode()), params)
    assert by_tokens.output_tokens == by_text.output_tokens


def test_after_the_run_no_block_is_in_use_and_the_counts_add_up(engine):
    before = engine.get_metrics()
    ids = [engine.submit_request(prompt, params) for prompt, params in REQUESTS[:7]]
    engine.step()
    assert engine.get_memory_stats().used_blocks > 0
    results = engine.run()
    assert len(results) <= len(ids)
    stats, after = engine.get_memory_stats(), engine.get_metrics()
    assert (stats.total_blocks, stats.used_blocks, stats.free_blocks) == (64, 0, 64)
    assert stats.num_sequences == 0
    assert after.total_requests - before.total_requests == 7
    assert after.completed_requests - before.completed_requests == 7
    assert after.failed_requests == before.failed_requests
    assert after.active_sequences == 0
    assert after.memory_utilization == 0.0
    assert after.average_latency_s > 0
    assert after.tokens_per_second > 0


def test_temperature_0_is_greedy_and_needs_no_seed(engine):
    params = GenerationParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    assert run_alone(engine, "a", params).output_text == run_alone(engine, "a", params).output_text


def test_the_limits_of_every_parameter_are_legal(engine):
    for params in (
        GenerationParams(max_tokens=1, temperature=2.0, top_p=1.0),
        GenerationParams(max_tokens=199, temperature=0, top_p=1e-6),
    ):
        assert run_alone(engine, "a", params).success


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GenerationParams(), "prompt must not be empty"),
        ([], GenerationParams(), "prompt must have at least 1 token"),
        ("a", {"max_tokens": 5}, "params must be GenerationParams, got {'max_tokens': 5}"),
        ("a", {}, "params must be GenerationParams, got {}"),
        ("a", GenerationParams(max_tokens=0), "max_tokens must be at least 1, got 0"),
        ("a", GenerationParams(temperature=-0.1), "temperature must be in 0 to 2.0, got -0.1"),
        ("a", GenerationParams(temperature=2.01), "temperature must be in 0 to 2.0, got 2.01"),
        ("a", GenerationParams(temperature=float("nan")), "temperature .* got nan"),
        ("a", GenerationParams(top_p=0.0), "top_p must be greater than 0 and at most 1, got 0.0"),
        ("a", GenerationParams(top_p=1.1), "top_p must be greater than 0 and at most 1, got 1.1"),
        (
            "aaa",
            GenerationParams(max_tokens=198),
            r"at most 197 after .* 3 .* \(max_model_len is 200\), got 198",
        ),
        ([70000], GenerationParams(), "token ids must be 0 to 258, got 70000"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_at_once(engine, prompt, params, message):
    with pytest.raises(ValidationError, match=message):
        engine.submit_request(prompt, params)
    assert not engine.has_pending_work()


@pytest.mark.parametrize("config", [{}, {"block_size": 16}, "c.json"])
def test_what_is_no_configuration_is_refused_as_such(config):
    with pytest.raises(ConfigError, match="config must be an EngineConfig, got "):
        InferenceEngine(config, executor="simulated")


def test_a_cancelled_request_ends_as_such_and_leaves_the_others_alone(engine):
    prompt, params = REQUESTS[3]
    alone = run_alone(engine, prompt, params)
    doomed = engine.submit_request("x", GenerationParams(max_tokens=150, ignore_eos=True))
    kept = engine.submit_request(prompt, params)
    engine.step()
    engine.cancel_request(doomed)
    results = {result.request_id: result for result in engine.run()}
    assert results[kept].output_text == alone.output_text
    assert not results[doomed].success
    assert results[doomed].finish_reason == "cancelled"
    assert results[doomed].error == "the request was cancelled"


def test_a_request_that_never_fits_is_refused_at_once_and_is_in_no_count():
    config = EngineConfig(executor="simulated", block_size=4, max_num_blocks=4)
    with InferenceEngine(config) as engine:
        kept = engine.submit_request("x", GenerationParams(max_tokens=16))
        with pytest.raises(MemoryError, match="needs 5 KV blocks of 4 tokens, the pool has 4"):
            engine.submit_request("x", GenerationParams(max_tokens=17))
        assert [result.request_id for result in engine.run()] == [kept]
        metrics = engine.get_metrics()
        assert (metrics.total_requests, metrics.failed_requests) == (1, 0)


@pytest.mark.parametrize(
    "edge",
    [{"top_p": 1e-300}, {"temperature": 1e-300}, {"temperature": 1e-42, "top_p": 5e-324}],
)
def test_values_too_small_for_the_wire_are_legal_and_hurt_nobody(engine, edge):
    kept_params = GenerationParams(max_tokens=9, seed=2)
    alone = run_alone(engine, "kept", kept_params)
    engine.submit_request("edge", GenerationParams(max_tokens=5, seed=1, **edge))
    kept = engine.submit_request("kept", kept_params)
    results = {result.request_id: result for result in engine.run()}
    assert all(result.success for result in results.values())
    assert results[kept].output_tokens == alone.output_tokens


@pytest.mark.parametrize("prompt", [None, 7, [1.5], ["a"], [[1]]])
def test_a_prompt_of_no_known_kind_is_refused_and_leaves_nothing_behind(engine, prompt):
    with pytest.raises(ValidationError, match="text or a sequence of token ids"):
        engine.submit_request(prompt)
    assert not engine.has_pending_work()
    assert run_alone(engine, (True, 2), GenerationParams(max_tokens=2)).success


def test_more_waiting_requests_than_allowed_are_refused():
    config = EngineConfig(executor="simulated", max_queued_requests=2)
    with InferenceEngine(config) as engine:
        params = GenerationParams(max_tokens=3)
        engine.submit_request("a", params)
        engine.submit_request("b", params)
        with pytest.raises(EngineError, match=r"max_queued_requests \(2\)"):
            engine.submit_request("c", params)
        assert len(engine.run()) == 2
        engine.submit_request("c", params)
        assert len(engine.run()) == 1


class LetterTokenizer:
    """Twenty-six letters, a space for everything else, and an end."""

    vocab_size = 28
    bos_token_id = None
    eos_token_id = 27
    pad_token_id = None

    def encode(self, text):
        return [ord(c) - 97 if "a" <= c <= "z" else 26 for c in text]

    def decode(self, tokens):
        return "".join(chr(97 + t) if t < 26 else " " for t in tokens if t != 27)


class StutteringTokenizer(SimpleTokenizer):
    """Cannot decode any text with a certain token."""

    unspeakable = -1

    def token_bytes(self, token_id):
        if token_id == self.unspeakable:
            raise LookupError("unspeakable")
        return super().token_bytes(token_id)


def test_a_tokenizer_that_fails_on_one_text_costs_no_other_request_its_own():
    tokenizer = StutteringTokenizer()
    with InferenceEngine(SMALL, tokenizer=tokenizer) as engine:
        params = GenerationParams(max_tokens=6, temperature=0, ignore_eos=True)
        alone = [run_alone(engine, prompt, params) for prompt in "ab"]
        tokenizer.unspeakable = next(
            t for t in alone[0].output_tokens if t not in alone[1].output_tokens
        )
        ids = [engine.submit_request(prompt, params) for prompt in "ab"]
        results = {result.request_id: result for result in engine.run()}
        bad, good = (results[i] for i in ids)
        assert (good.success, good.output_text) == (True, alone[1].output_text)
        assert (bad.success, bad.finish_reason, bad.output_text) == (False, "error", "")
        assert "LookupError('unspeakable')" in bad.error
        assert bad.output_tokens == alone[0].output_tokens


@pytest.mark.wide
def test_what_had_ended_before_an_error_broke_off_a_run_is_not_lost(monkeypatch):
    with InferenceEngine(SMALL) as engine:
        short = engine.submit_request("a", GenerationParams(max_tokens=2, ignore_eos=True))
        long = engine.submit_request("b", GenerationParams(max_tokens=50, ignore_eos=True))

        def break_off():
            if engine.get_metrics().completed_requests == 1:
                raise ExecutionError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(engine._compute, "keep_alive", break_off)
            with pytest.raises(ExecutionError, match="planted"):
                engine.run()
            assert [result.request_id for result in engine.step()] == [short]
        assert [result.request_id for result in engine.run()] == [long]


EXECUTOR = """
import numpy as np
from compute_plane.executor.interface import ExecutionOutput

class NextLetter:
    '''Answers every letter with the one after it, and z with the end.'''

    def __init__(self, context):
        assert context.block_size == 4

    def execute(self, batch):
        last = np.cumsum(batch.query_lens)[batch.sampled_rows] - 1
        tokens = batch.input_tokens[last] + 1
        return ExecutionOutput(next_tokens=np.where(tokens > 25, 27, tokens).astype(np.int32))

    def capture_decode_graph(self, batch_size):
        pass

    def execute_graph(self, batch):
        return self.execute(batch)
"""


@pytest.mark.wide
def test_a_custom_tokenizer_and_a_custom_executor_are_plugged_in(tmp_path, monkeypatch):
    (tmp_path / "my_executor.py").write_text(EXECUTOR)
    monkeypatch.syspath_prepend(str(tmp_path))
    with InferenceEngine(
        SMALL, tokenizer=LetterTokenizer(), executor="my_executor:NextLetter"
    ) as engine:
        result = run_alone(engine, "abc", GenerationParams(max_tokens=4, temperature=0))
        assert result.output_text == "defg"
        result = run_alone(engine, "xyz w", GenerationParams(max_tokens=9, temperature=0))
        assert (result.output_text, result.finish_reason) == ("xyz", "stop")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"executor": "__main__:Mine"}, "cannot live in __main__"),
        ({"tokenizer": object()}, "tokenizer: object has no .*decode.*encode.*vocab_size"),
        ({"executor": "quantum"}, "executor must be"),
        ({"config": EngineConfig(block_size=0)}, "block_size"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_started(arguments, message):
    with pytest.raises(ConfigError, match=message):
        InferenceEngine(**arguments)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused():
    with pytest.raises(ConfigError, match="the tokenizer has 500 tokens, the model's logits only"):
        InferenceEngine(SMALL, tokenizer=SimpleTokenizer(500))
