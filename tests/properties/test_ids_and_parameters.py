"""Requests are numbered once, and taken in exactly if every parameter is in its range."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hypothesis import example, given, settings
from hypothesis import strategies as st

from control_plane.core.errors import ContextLengthError, RequestNeverFitsError
from control_plane.core.generation_params import NOT_WITH_BEAMS, GenerationParams
from control_plane.core.limits import RequestLimits
from control_plane.engine.admission import Admission
from control_plane.text.simple_tokenizer import SimpleTokenizer
from planes.errors import EngineError, ValidationError


def admission(limits: RequestLimits) -> Admission:
    return Admission(SimpleTokenizer(), limits, vocab_size=259, eos_token_ids=(257,))


def test_no_two_requests_have_the_same_id_whichever_threads_they_come_in_on():
    taken_in = admission(RequestLimits(64, 4, 64))

    def take(_: int) -> list[int]:
        params = GenerationParams(max_tokens=1)
        return [taken_in.make_request([1], params, arrival_time=0.0).id for _ in range(500)]

    with ThreadPoolExecutor(4) as threads:
        ids = [number for numbers in threads.map(take, range(4)) for number in numbers]
    assert len(set(ids)) == len(ids) == 2000


def refusal(check: Callable[[], None]) -> EngineError | None:
    """What a check raises."""
    try:
        check()
    except EngineError as error:
        return error
    return None


RANGES = {
    "max_tokens": lambda v: is_integer(v) and v >= 1,
    "temperature": lambda v: is_real(v) and 0 <= v <= 2,
    "top_p": lambda v: is_real(v) and 0 < v <= 1,
    "seed": lambda v: v is None or (is_integer(v) and 0 <= v < 2**64),
    "top_k": lambda v: is_integer(v) and 0 <= v < 2**32,
    "min_p": lambda v: is_real(v) and 0 <= v <= 1,
    "repetition_penalty": lambda v: is_real(v) and 0 < v <= 100,
    "presence_penalty": lambda v: is_real(v) and -2 <= v <= 2,
    "frequency_penalty": lambda v: is_real(v) and -2 <= v <= 2,
    "num_logprobs": lambda v: v is None or (is_integer(v) and 0 <= v <= 20),
    "n": lambda v: is_integer(v) and 1 <= v <= 128,
    "beam_width": lambda v: v is None or (is_integer(v) and 1 <= v <= 10),
    "min_tokens": lambda v: is_integer(v) and v >= 0,
}


PLAIN = dataclasses.asdict(GenerationParams())


def is_integer(value: object) -> bool:
    return type(value) is int


def is_real(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


numbers = st.one_of(
    st.sampled_from([0, 1, 2, 10, 11, 20, 21, 100, 128, 129, -1, -2, 2**32, 2**64 - 1, 2**64]),
    st.integers(),
    st.floats(),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, 2.0000001, 1e-300]),
)
values = st.one_of(numbers, numbers, st.sampled_from([None, True, "1", (), b"2"]))


@settings(max_examples=400, deadline=None)
@given(chosen=st.dictionaries(st.sampled_from(sorted(RANGES)), values, max_size=3))
@example(chosen={"beam_width": 10, "n": 10})
@example(chosen={"beam_width": 2, "n": 3})
@example(chosen={"max_tokens": 2, "min_tokens": 3})
@example(chosen={"max_tokens": 3, "min_tokens": 3})
@example(chosen={"max_tokens": 1, "min_tokens": 2, "beam_width": 0})
def test_parameters_are_accepted_exactly_if_each_is_in_its_range(chosen):
    wrong = {name for name, value in chosen.items() if not RANGES[name](value)}
    params = GenerationParams(**chosen)
    # Where several are wrong, any of them may be named.
    if "max_tokens" in chosen and wrong.isdisjoint({"max_tokens", "min_tokens"}):
        wrong |= {"min_tokens"} if params.min_tokens > params.max_tokens else set()
    if params.beam_width is not None and "beam_width" not in wrong:
        if "n" not in wrong and params.n > params.beam_width:
            wrong.add("n")
        wrong |= {name for name in NOT_WITH_BEAMS if getattr(params, name) != PLAIN[name]}
    error = refusal(params.validate)
    if error is None:
        assert not wrong
    else:
        assert error.field in wrong
        assert error.field in error.message


@settings(max_examples=300, deadline=None)
@given(
    num_prompt_tokens=st.integers(0, 40),
    max_tokens=st.integers(1, 40),
    width=st.integers(1, 4),
    max_model_len=st.integers(2, 50),
    block_size=st.integers(1, 9),
    num_blocks=st.integers(1, 30),
)
def test_a_request_is_taken_in_exactly_if_it_fits_alone(
    num_prompt_tokens, max_tokens, width, max_model_len, block_size, num_blocks
):
    limits = RequestLimits(max_model_len, block_size, num_blocks)
    length = num_prompt_tokens + max_tokens
    # Block i of a beam is the prompt's, and shared, if the prompt fills it.
    last_blocks = range(-(-(length - 1) // block_size))
    needed = sum(1 if (i + 1) * block_size <= num_prompt_tokens else width for i in last_blocks)
    error = refusal(lambda: limits.check(num_prompt_tokens, max_tokens, width))
    if num_prompt_tokens == 0:
        assert (type(error), error.field) == (ValidationError, "prompt")
    elif length > max_model_len:
        field = "prompt" if num_prompt_tokens >= max_model_len else "max_tokens"
        assert (type(error), error.field) == (ContextLengthError, field)
    elif needed > num_blocks:
        assert type(error) is RequestNeverFitsError
    else:
        assert error is None
