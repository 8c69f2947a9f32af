"""The CUDA executor in a real deployment whose compute plane is killed while clients read.

Without `--device` it runs on torch's CPU device. The model is tiny and random, so that this is a
look at the link and its faults; the embedded model has `test_named_faults_change_no_text`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from bench.gpu.random_model import TINY, write_model
from compute_plane.model.loader import load_model
from control_plane.core.generation_params import GenerationParams
from tests.faults.crowd import Answer, Asked, Crowd, check_answers, hear_all
from tests.faults.deployment import Deployment, deployed
from tests.judging import Judge

REQUESTS = [
    Asked(
        f"Prompt number {number} " * (1 + number % 4),
        GenerationParams(
            max_tokens=24 + 6 * number,
            temperature=(0.0, 0.8)[number % 2],
            seed=number,
            n=2 if number == 4 else 1,
            ignore_eos=True,
        ),
    )
    for number in range(5)
]
NUM_TOKENS = sum(asked.params.max_tokens * asked.params.n for asked in REQUESTS)


@dataclass(frozen=True, slots=True)
class Stage:
    """A deployment, what it says when nothing happens, and the judge of that."""

    deployment: Deployment
    calm: list[Answer]
    judge: Judge


@pytest.fixture(scope="module")
def stage(cuda_target, tmp_path_factory) -> Iterator[Stage]:
    model = str(write_model(TINY, tmp_path_factory.mktemp("model")))
    config = cuda_target.config(
        model=model, dtype="float32", max_num_blocks=96, num_threads=1, log_level="info"
    )
    judge = Judge(cuda_target, load_model(model))
    with deployed(config) as deployment:
        yield Stage(deployment, hear_all(deployment.address, REQUESTS), judge)
    judge.close()


@pytest.mark.wide
def test_the_plane_says_what_it_is_and_gives_every_token(stage):
    (plane,) = stage.deployment.compute
    described = plane.describe()
    assert described.executor == "cuda"
    assert described.model.vocab_size == TINY.vocab_size
    assert sum(answer.num_tokens for answer in stage.calm) == NUM_TOKENS
    with Crowd(stage.deployment.address) as crowd:
        crowd.ask(REQUESTS)
        check_answers(stage.judge, crowd.readers, crowd.answers(), stage.calm)


@pytest.mark.wide
def test_no_token_is_lost_and_each_follows_from_those_before_it(stage):
    deployment = stage.deployment
    (plane,) = deployment.compute
    losses = deployment.metrics.num_plane_losses
    with deployment.explained(), Crowd(deployment.address) as crowd:
        crowd.ask(REQUESTS)
        crowd.progress.wait_for(NUM_TOKENS // 4)
        assert crowd.progress.num_open > 1
        plane.kill()
        plane.start()
        check_answers(stage.judge, crowd.readers, crowd.answers(), stage.calm)
    assert deployment.metrics.num_plane_losses == losses + 1
    assert deployment.metrics.failed_requests == 0
