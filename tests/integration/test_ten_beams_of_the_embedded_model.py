"""The widest beam search there is, of the embedded model through the Python API."""

from __future__ import annotations

import pytest

from compute_plane.model.loader import load_model
from compute_plane.model.source import DEFAULT
from hetero_infer import GenerationParams, InferenceEngine

pytestmark = [pytest.mark.model, pytest.mark.wide]

PROMPT = "The capital of France is"
WIDTH, MAX_TOKENS = 10, 8
PARAMS = GenerationParams(max_tokens=MAX_TOKENS, beam_width=WIDTH, n=WIDTH)


def test_a_model_with_two_end_tokens_has_ten_beams(target):
    with InferenceEngine(target.config(max_num_blocks=64)) as engine:
        engine.submit_request(PROMPT, PARAMS)
        (result,) = engine.run()
    assert result.success
    assert len({tuple(sample.output_tokens) for sample in result.samples}) == WIDTH


@pytest.mark.slow
def test_the_answers_are_those_of_transformers(target):
    import torch

    from tests.golden import record

    with InferenceEngine(target.config(dtype="float32", max_num_blocks=64)) as engine:
        prompt = engine.tokenizer.encode(PROMPT)
        engine.submit_request(prompt, PARAMS)
        (result,) = engine.run()
    ends = load_model(DEFAULT).assets.eos_token_ids
    assert len(ends) == 2
    with torch.inference_mode():
        found = record.load_model(record.model_path()).generate(
            torch.tensor([prompt]), num_beams=WIDTH, num_return_sequences=WIDTH, do_sample=False,
            max_new_tokens=MAX_TOKENS, eos_token_id=list(ends), pad_token_id=ends[0],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )  # fmt: skip
    expected = []
    for tokens in found[:, len(prompt) :].tolist():
        length = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        expected.append(tokens[:length])
    assert [list(sample.output_tokens) for sample in result.samples] == expected
