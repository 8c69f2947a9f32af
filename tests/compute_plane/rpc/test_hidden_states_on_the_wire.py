"""Hidden states of rows as a controller gets them, and planes that have none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compute_plane.executor.registry import BuiltExecutor, ExecutorContext, build_executor
from compute_plane.executor.simulated import SPEC, hidden_states
from protos.hetero.compute.v1 import compute_pb2
from tests.compute_plane.rpc.plane_harness import Harness, start

TEXT = b"a text"
ROW = {
    "starts": [start(0, TEXT, [0, 1])],
    "slots": [0],
    "query_lens": [len(TEXT)],
    "positions": [0],
    "embeddings": [compute_pb2.EmbeddingRequest(row=0, part=compute_pb2.EMBEDDING_PART_LAST)],
}


class HarnessWithout(Harness):
    """A plane whose executor knows nothing of hidden states."""

    def _build(self, name: str, context: ExecutorContext) -> BuiltExecutor:
        return replace(super()._build(name, context), gives_embeddings=False)


@pytest.fixture
def plain_plane(tmp_path: Path) -> Iterator[Harness]:
    harness = HarnessWithout(tmp_path)
    yield harness
    harness.close()


def test_they_are_float64_in_the_order_of_their_requests(shared_plane: Harness) -> None:
    described = shared_plane.describe()
    assert "embeddings" in described.features
    assert described.limits.max_embeddings == (32 << 20) // (8 * SPEC.hidden_size)
    controller = shared_plane.open()
    output = controller.execute_one(controller.batch(**ROW))
    [embedding] = output.embeddings
    tokens = np.frombuffer(TEXT, dtype=np.uint8).astype(np.int32)
    assert np.frombuffer(embedding.values, "<f8").tolist() == hidden_states(tokens).tolist()
    assert not output.sampled_token_ids


def test_a_plane_without_them_says_so_and_refuses_them_by_name(plain_plane: Harness) -> None:
    described = plain_plane.describe()
    assert "embeddings" not in described.features
    assert described.limits.max_embeddings == 0
    controller = plain_plane.open()
    with controller.stream() as stream:
        stream.send(controller.batch(**ROW))
        refusal = stream.receive().refusal
    assert refusal.reason == compute_pb2.REFUSAL_REASON_UNSUPPORTED
    assert refusal.field == "embeddings"


class OwnExecutor:
    """As a user may have written it before there were embeddings."""

    def execute(self, batch: object) -> None: ...

    def capture_decode_graph(self, batch_size: int) -> None: ...

    def execute_graph(self, batch: object) -> None: ...


class OwnExecutorWithEmbeddings(OwnExecutor):
    gives_embeddings = True


@pytest.mark.parametrize(
    ("factory", "gives"), [("OwnExecutor", False), ("OwnExecutorWithEmbeddings", True)]
)
def test_an_executor_of_ones_own_is_asked_if_it_says_that_it_gives_them(
    monkeypatch: pytest.MonkeyPatch, factory: str, gives: bool
) -> None:
    made = globals()[factory]
    monkeypatch.setattr(f"{__name__}.factory", lambda _context: made(), raising=False)
    context = ExecutorContext(
        SPEC, None, 4, 8, "float32", "auto", "auto", "cpu", 64, 1, Path("unused")
    )
    assert build_executor(f"{__name__}:factory", context).gives_embeddings is gives
