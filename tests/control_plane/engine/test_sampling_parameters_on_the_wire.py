"""Sampling parameters and log-probabilities between the engine's values and the planes' wire."""

from __future__ import annotations

import pytest

from control_plane.core.batch import SlotStart, StepBatch, TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from control_plane.core.limits import RequestLimits
from control_plane.engine.admission import Admission
from control_plane.engine.convert import batch_to_proto, result_from_proto
from control_plane.text.simple_tokenizer import SimpleTokenizer
from planes.errors import ValidationError
from protos.hetero.compute.v1 import compute_pb2


def on_the_wire(params: GenerationParams) -> compute_pb2.SamplingParams:
    batch = StepBatch(1, starts=(SlotStart(0, (1,), 1, (0,), params),))
    return batch_to_proto(batch, session=1, epoch=1, acked_step=0).starts[0].sampling


def test_every_parameter_reaches_the_wire() -> None:
    sampling = on_the_wire(
        GenerationParams(
            seed=1, temperature=0.5, top_p=0.25, top_k=40, min_p=0.125, repetition_penalty=1.5,
            presence_penalty=-0.5, frequency_penalty=0.75, logit_bias={7: -100, 3: 2.5},
            num_logprobs=0,
        )
    )  # fmt: skip
    assert sampling == compute_pb2.SamplingParams(
        seed=1, temperature=0.5, top_p=0.25, top_k=40, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=-0.5, frequency_penalty=0.75, num_logprobs=0,
        logit_bias=[
            compute_pb2.LogitBias(token_id=7, bias=-100),
            compute_pb2.LogitBias(token_id=3, bias=2.5),
        ],
    )  # fmt: skip
    assert sampling.HasField("num_logprobs")


def test_what_is_too_small_for_the_wire_does_not_turn_into_off() -> None:
    sampling = on_the_wire(GenerationParams(seed=1, top_p=1e-300, repetition_penalty=1e-300))
    assert sampling.top_p > 0
    assert sampling.repetition_penalty > 0
    assert not sampling.HasField("num_logprobs")


def test_log_probabilities_come_from_the_wire_by_sample() -> None:
    output = compute_pb2.ExecutionOutput(
        sampled_token_ids=[4, 5],
        sample_logprobs=[
            compute_pb2.SampleLogprobs(
                sample=1, logprob=-1.5, top_token_ids=[9, 5], top_logprobs=[-0.5, -1.5]
            )
        ],
    )
    assert result_from_proto(output).sample_logprobs == {
        1: TokenLogprobs(-1.5, (9, 5), (-0.5, -1.5))
    }


def test_a_bias_for_a_token_outside_of_the_vocabulary_is_refused() -> None:
    limits = RequestLimits(max_model_len=20, block_size=4, num_blocks=5)
    admission = Admission(SimpleTokenizer(), limits, vocab_size=259, eos_token_ids=(257,))
    params = GenerationParams(max_tokens=3, logit_bias={258: 1.0})
    request = admission.make_request([1], params, arrival_time=0.0)
    assert request.params.logit_bias == {258: 1.0}
    with pytest.raises(ValidationError, match="0 to 258, got 259") as caught:
        admission.make_request(
            [1], GenerationParams(max_tokens=3, logit_bias={259: 1.0}), arrival_time=0.0
        )
    assert caught.value.field == "logit_bias"
