"""Beam search from scheduler to executor on a tiny model, beside that of transformers."""

from __future__ import annotations

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request, RequestState
from control_plane.core.scheduler import Scheduler, SchedulerConfig
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.compute_plane.executor.tiny_sources import model_in_memory
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.devices import Target
from tests.properties.executor_plane import ExecutorPlane

pytestmark = pytest.mark.slow

SPEC = tiny_spec()
EOS, PAD, SECOND_EOS = 0, 1, 2
NUM_BLOCKS, BLOCK_SIZE = 96, 4
PROMPTS = [[5, 6, 7], [9], [3, 3, 8, 7, 100, 101, 102, 103, 104], [11, 4]]
MAX_TOKENS = 12


def ours(
    target: Target,
    weights,
    params: list[GenerationParams],
    ends: frozenset[int] = frozenset({EOS}),
) -> list[list[list[int]]]:
    """The answers to all prompts, searched at once in a pool that they have to share."""
    kv_cache = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=True)
    config = SchedulerConfig(max_batch_size=16, max_num_seqs=16, memory_threshold=1.0)
    scheduler = Scheduler(config, kv_cache)
    requests = [
        Request(number, list(prompt), one, ends)
        for number, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True))
    ]
    for request in requests:
        scheduler.add_request(request)
    model = model_in_memory(SPEC, weights)
    with target.running(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE) as executor:
        plane = ExecutorPlane(executor, SPEC, NUM_BLOCKS, BLOCK_SIZE)
        while scheduler.has_pending_work():
            output = scheduler.schedule()
            assert output is not None
            result = plane.run(output.batch)
            assert result.refusal is None
            scheduler.commit(result)
        plane.close()
    assert all(request.state is RequestState.COMPLETED for request in requests)
    return [[sample.output_tokens for sample in request.samples] for request in requests]


def transformers_model(weights):
    from tests.compute_plane.executor.llama_of_transformers import transformers_model

    return transformers_model(SPEC, weights)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_the_answers_are_those_of_transformers(target, width, length_penalty, early_stopping):
    weights = tiny_weights(SPEC, seed=width)
    weights.lm_head[EOS] *= 2.5  # so that searches also end by themselves
    model = transformers_model(weights)
    params = GenerationParams(
        max_tokens=MAX_TOKENS, seed=0, beam_width=width, n=width,
        length_penalty=length_penalty, early_stopping=early_stopping,
    )  # fmt: skip
    num_ended = compare(model, params, ours(target, weights, [params] * len(PROMPTS)), [EOS])
    assert num_ended > 0 or width == 1


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("width", [7, 10])
def test_ten_beams_of_a_model_with_two_end_tokens_are_those_of_transformers(
    target, width, early_stopping
):
    weights = tiny_weights(SPEC, seed=width)
    weights.lm_head[[EOS, SECOND_EOS]] *= 2.5
    model = transformers_model(weights)
    params = GenerationParams(
        max_tokens=MAX_TOKENS, seed=0, beam_width=width, n=width, early_stopping=early_stopping
    )
    ends = [EOS, SECOND_EOS]
    answers = ours(target, weights, [params] * len(PROMPTS), frozenset(ends))
    assert compare(model, params, answers, ends) > 0


def compare(model, params: GenerationParams, answers, ends: list[int]) -> int:
    """Assert that the answers are those of transformers; how many of them ended by themselves."""
    import torch

    width, num_ended = params.beam_width, 0
    for prompt, samples in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            found = model.generate(
                torch.tensor([prompt]), num_beams=width, num_return_sequences=width,
                do_sample=False, max_new_tokens=MAX_TOKENS, length_penalty=params.length_penalty,
                early_stopping=params.early_stopping, eos_token_id=ends, pad_token_id=PAD,
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            )  # fmt: skip
        expected = []
        for tokens in found[:, len(prompt) :].tolist():
            length = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
            num_ended += length < len(tokens)
            expected.append(tokens[:length])
        # A padded answer is one that ended: ids of the padding never stand before the end.
        assert samples == expected
    return num_ended
