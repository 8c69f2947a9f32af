"""What rotation reads before it waits for the launch ahead is written by nothing else of its step.

Kernels say which arguments these are, and both simulators watch other kernels; torch's own
operations are watched here (ADR 0031).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.model.spec import ModelSpec
from tests.compute_plane.cuda.drawn_steps import decode_batch
from tests.compute_plane.cuda.torch_executors import RecordingDriver, torch_executor
from tests.compute_plane.executor.tiny_llama import tiny_spec

STILL = replace(tiny_spec(architecture="exaone4"), layers_without_rope=frozenset({1}))
SPECS = {
    "all layers turn": tiny_spec(),
    "one turns nothing": STILL,
    "none turns": replace(STILL, layers_without_rope=frozenset({0, 1})),
}


class Written(TorchDispatchMode):
    """Notes the memory that torch's operations make or write, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        read = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if is_tensor(leaf)}
        made = {id_of(leaf) for leaf in tree_leaves(found) if is_tensor(leaf)}
        is_writing = func._schema.is_mutable
        self.memory |= made if is_writing else made - read
        return found


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def id_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


class Watched(ReferenceOperations):
    """Notes whether what rotation reads at once was written in the step."""

    def __init__(self, spec: ModelSpec, written: Written) -> None:
        super().__init__(spec.activation)
        self._written = written
        self.layers: list[int] = []
        self.positions: list[list[int]] = []
        self.written_in_step: list[str] = []

    def rope_write_kv(self, out: Any, pool: Any, layer: int, *others: Any, **named: Any) -> None:
        _, angles, positions, kv_slots, *_ = others
        early = {"cos": angles[0], "sin": angles[1], "positions": positions, "slots": kv_slots}
        for name, tensor in early.items():
            if id_of(tensor) in self._written.memory:
                self.written_in_step.append(f"{name} of layer {layer}")
        self.layers.append(layer)
        self.positions.append(positions.tolist())
        super().rope_write_kv(out, pool, layer, *others, **named)


@pytest.mark.parametrize("kind", SPECS)
def test_positions_and_angles_of_a_step_are_not_of_its_making(kind: str) -> None:
    spec, written = SPECS[kind], Written()
    operations = Watched(spec, written)
    executor = torch_executor(spec, RecordingDriver(), operations=operations)
    executor.capture_decode_graph(4)
    executor.execute(decode_batch(position=5, rows=3))
    graph, operations.layers, operations.positions = executor._graphs._graphs[4], [], []
    with written:
        executor._model.run(graph.inputs.step)
    assert operations.layers == [0, 1]
    assert operations.written_in_step == []
    for layer, positions in zip(operations.layers, operations.positions, strict=True):
        at = 0 if layer in spec.layers_without_rope else 5
        assert positions == [at] * 3 + [0]
