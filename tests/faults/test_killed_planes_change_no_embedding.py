"""A compute plane is killed while texts of a call are computed: their embeddings stay the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from hetero_infer import Client, TextEmbedding
from tests.faults.deployment import Deployment, deployed
from tests.golden.prompts import PROMPTS
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.model

TEXTS = [f"{number}: " + " ".join(PROMPTS.values())[: 250 + 30 * number] for number in range(10)]


def embed(deployment: Deployment, texts: Sequence[str]) -> list[TextEmbedding]:
    with Client(deployment.address) as client:
        return client.embed(texts, timeout_s=PATIENCE_S)


def bytes_of(found: Sequence[TextEmbedding]) -> list[bytes]:
    return [one.values.tobytes() for one in found]


@pytest.mark.slow
def test_texts_are_summed_up_anew_on_the_plane_that_comes_next(target) -> None:
    config = target.config(log_level="info", pooling="mean", prefill_chunk=64, max_num_blocks=128)
    with deployed(config) as deployment, deployment.explained():
        expected = embed(deployment, TEXTS)
        done = deployment.metrics.completed_requests
        (plane,) = deployment.compute
        found: list[TextEmbedding] = []
        call = threading.Thread(target=lambda: found.extend(embed(deployment, TEXTS)))
        call.start()
        wait_until(lambda: deployment.metrics.completed_requests >= done + 2, "two texts are done")
        plane.kill()
        assert deployment.metrics.completed_requests < done + len(TEXTS)
        plane.start()
        call.join(PATIENCE_S)
        assert not call.is_alive()
        metrics = deployment.metrics
        assert (metrics.num_plane_losses, metrics.failed_requests) == (1, 0)
        if target.keeps_bits:
            assert bytes_of(found) == bytes_of(expected)
        else:
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours.values, theirs.values, atol=0.05)
        wait_until(lambda: deployment.memory.used_blocks == 0, "no block is used")
