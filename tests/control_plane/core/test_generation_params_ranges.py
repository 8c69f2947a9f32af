"""Every sampling parameter has a range, and a refusal names field, limit and value."""

from __future__ import annotations

import math

import pytest

from control_plane.core.generation_params import GenerationParams
from planes.errors import ValidationError

BAD = [
    ("top_k", -1, "integer in 0 to"),
    ("top_k", 2.0, "integer in 0 to"),
    ("top_k", True, "integer in 0 to"),
    ("top_k", 2**32, "integer in 0 to"),
    ("min_p", -0.01, "in 0 to 1"),
    ("min_p", 1.01, "in 0 to 1"),
    ("min_p", math.nan, "in 0 to 1"),
    ("repetition_penalty", 0.0, "greater than 0"),
    ("repetition_penalty", -1.0, "greater than 0"),
    ("repetition_penalty", math.inf, "at most 100"),
    ("presence_penalty", 2.1, "in -2.0 to 2.0"),
    ("presence_penalty", math.nan, "in -2.0 to 2.0"),
    ("frequency_penalty", -2.1, "in -2.0 to 2.0"),
    ("frequency_penalty", "1", "in -2.0 to 2.0"),
    ("num_logprobs", 21, "in 0 to 20"),
    ("num_logprobs", -1, "in 0 to 20"),
    ("num_logprobs", 1.0, "in 0 to 20"),
    ("logit_bias", [(1, 2.0)], "must map token ids"),
    ("logit_bias", {-1: 1.0}, "token ids as keys, got -1"),
    ("logit_bias", {"1": 1.0}, "token ids as keys, got '1'"),
    ("logit_bias", {7: 100.5}, "got 100.5 for token 7"),
    ("logit_bias", {7: math.nan}, "got nan for token 7"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024 entries, got 1025"),
    ("length_penalty", 2.0, "means nothing without beam_width, got 2.0"),
    ("early_stopping", True, "means nothing without beam_width, got True"),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_a_value_out_of_range_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        GenerationParams(**{field: value}).validate()  # type: ignore[arg-type]
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("logit_bias", {28: -100}),
        ("num_logprobs", 0),
        ("stop", ("x",)),
        ("stop_token_ids", (7,)),
        ("min_tokens", 1),
    ],
)
def test_what_a_beam_search_does_not_keep_to_is_refused(field, value):
    with pytest.raises(ValidationError, match=rf"{field} must be unset with beam_width \(3\), got"):
        GenerationParams(beam_width=3, **{field: value}).validate()


def test_min_tokens_are_at_most_what_somebody_gave_as_max_tokens() -> None:
    GenerationParams(max_tokens=7, min_tokens=7).validate()
    GenerationParams(min_tokens=2000).validate()  # nobody gave one: it becomes so many
    with pytest.raises(ValidationError, match=r"at most max_tokens \(7\), got 8") as refused:
        GenerationParams(max_tokens=7, min_tokens=8).validate()
    assert refused.value.field == "min_tokens"
    for wrong in (-1, 1.0, True, None):
        with pytest.raises(ValidationError, match="min_tokens must be an integer of at least 0"):
            GenerationParams(min_tokens=wrong).validate()


def test_how_tokens_are_drawn_means_nothing_to_a_beam_search():
    GenerationParams(beam_width=3, temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=1).validate()


def test_the_ends_of_every_range_are_allowed() -> None:
    GenerationParams(
        top_k=0, min_p=0, repetition_penalty=1e-30, presence_penalty=-2, frequency_penalty=-2.0,
        logit_bias={0: -100.0}, num_logprobs=0,
    ).validate()  # fmt: skip
    GenerationParams(
        top_k=2**32 - 1, min_p=1.0, repetition_penalty=100, presence_penalty=2,
        frequency_penalty=2.0, logit_bias=dict.fromkeys(range(1024), 100), num_logprobs=20,
    ).validate()  # fmt: skip


def test_parameters_with_a_bias_can_be_a_key() -> None:
    assert hash(GenerationParams(logit_bias={1: 2.0})) == hash(GenerationParams())
    assert GenerationParams(logit_bias={1: 2.0}) != GenerationParams()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("logprobs", ": did you mean 'num_logprobs'?"), ("max_token", "max_tokens"), ("x", "no 'x'")],
)
def test_a_parameter_that_nobody_knows_is_named_with_the_nearest(name, hint):
    with pytest.raises(TypeError, match="GenerationParams has no") as refused:
        GenerationParams(**{name: 1})
    assert hint in str(refused.value)
