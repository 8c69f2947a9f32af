"""Tiny models with drawn adapters, and the same models with an adapter merged into the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from compute_plane.cuda.planned_adapters import plan_adapters
from compute_plane.cuda.weight_plan import WeightPlan, plan_weights
from compute_plane.cuda.weights import DTYPES
from compute_plane.executor.interface import ExecutionBatch, GPUExecutor
from compute_plane.model.adapter import ROLES, Adapter, LowRankPair
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import RawTensor, TensorFormat, TensorSource
from tests.compute_plane.cuda.torch_executors import torch_executor
from tests.compute_plane.executor.tiny_sources import ArraySource, raw_tensor
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32

Formats = Mapping[str, TensorFormat]
PROMPTS = range(3, 26), [30, 31, 32], [50], range(60, 71), [80, 81]
ADAPTERS_OF_ROWS = 2, 0, 1, 2, 1
"""In no order: rows of one adapter are not neighbours."""


def drawn_adapter(
    source: TensorSource,
    name: str,
    *,
    rank: int = 4,
    roles: Sequence[str] = ROLES,
    is_taken: Callable[[str], bool] = lambda _: True,
    seed: int = 5,
) -> Adapter:
    """Return one that changes all matrices of some roles, each by about a third of what it is."""
    random, pairs = np.random.default_rng(seed), {}
    for tensor_name in source.names:
        if any(f".{role}.weight" in tensor_name for role in roles) and is_taken(tensor_name):
            rows, columns = source.tensor(tensor_name).shape
            down = random.standard_normal((rank, columns), dtype=np.float32) * 0.15
            up = random.standard_normal((rows, rank), dtype=np.float32) * 0.15
            pairs[tensor_name] = LowRankPair(down.astype(np.float32), up.astype(np.float32))
    assert pairs
    return Adapter(name, pairs)


def two_adapters(source: TensorSource) -> tuple[Adapter, Adapter]:
    """Return one that changes everything it can, and one that changes some, of another rank."""
    everything = drawn_adapter(source, "everything")
    some = drawn_adapter(
        source, "some", rank=3, roles=("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"),
        seed=6,
    )  # fmt: skip
    return everything, some


class MergedSource:
    """A model's tensors with an adapter, if there is one, added to its matrices, in float32."""

    def __init__(self, source: TensorSource, adapter: Adapter | None) -> None:
        self._source = source
        self._pairs = {} if adapter is None else adapter.pairs

    @property
    def names(self) -> Sequence[str]:
        return self._source.names

    def tensor(self, name: str) -> RawTensor:
        tensor = self._source.tensor(name)
        if len(tensor.shape) == 1:
            return tensor
        values, pair = tensor.to_float32(), self._pairs.get(name)
        if pair is not None:
            values = values + pair.up @ pair.down
        return raw_tensor(name, values, TensorFormat.F32)

    def forget_pages(self) -> None:
        """Nothing is mapped."""


def source_of(
    spec: ModelSpec, formats: Formats | None = None, orders: Mapping[str, int] | None = None
) -> ArraySource:
    """Return the tiny weights of a model."""
    return ArraySource(spec, tiny_weights(spec), formats, orders)


def adapted_plan(
    spec: ModelSpec,
    source: TensorSource,
    adapters: Sequence[Adapter],
    dtype: torch.dtype = torch.float32,
) -> WeightPlan:
    """Return the plan of a model with adapters; what is quantised stays so."""
    (name,) = (name for name, known in DTYPES.items() if known == dtype)
    plan = plan_weights(spec, source, name)
    return replace(plan, adapters=plan_adapters(plan, adapters)) if adapters else plan


def with_adapters(batch: ExecutionBatch, adapters: Sequence[int]) -> ExecutionBatch:
    """Return a batch whose rows are computed with these, 0 with none; as the slots have it."""
    return replace(batch, adapters=int32(adapters if any(adapters) else []))


StepLogits = list[dict[int, np.ndarray]]
"""Of each step those of the rows that were sampled, by row."""


def step_logits(
    executor: GPUExecutor,
    adapters: Sequence[int],
    *,
    chunk: int | None = None,
    num_steps: int = 3,
    num_blocks: int = 60,
    block_size: int = 4,
) -> StepLogits:
    """Return the logits of steps up to `num_steps` in which every row decodes.

    Whatever is drawn, the same tokens follow. `adapters`: of the rows of `PROMPTS`.
    """
    driver = BatchDriver(executor, num_blocks=num_blocks, block_size=block_size)
    rows, found = [DrivenSequence(list(prompt)) for prompt in PROMPTS], list[Any]()
    while num_steps:
        batch = with_adapters(driver.batch(rows, chunk), adapters)
        output = executor.execute(batch)
        assert not output.failed_rows
        assert output.logits is not None
        found.append(dict(zip(batch.sampled_rows.tolist(), output.logits, strict=True)))
        num_steps -= int(batch.query_lens.max()) == 1
        for row, sequence in enumerate(rows):
            sequence.num_computed = int(batch.seq_lens[row])
            if row in batch.sampled_rows:
                sequence.tokens.append(90 + (row + len(sequence.tokens)) % 30)
    return found


def merged_logits(
    spec: ModelSpec,
    source: TensorSource,
    adapters: Sequence[Adapter],
    chunk: int | None,
    **sizes: int,
) -> list[StepLogits]:
    """Return what models give that have no adapter, or each in turn, in their weights."""
    found = []
    for adapter in (None, *adapters):
        plan = adapted_plan(spec, MergedSource(source, adapter), ())
        merged = torch_executor(spec, plan=plan, keep_logits=True, **sizes)  # type: ignore[arg-type]
        found.append(step_logits(merged, [0] * len(PROMPTS), chunk=chunk, **sizes))
    return found


def errors_of_rows(
    found: StepLogits, of_merged: Sequence[StepLogits], adapters: Sequence[int]
) -> list[float]:
    """Return how far the logits of each row are off, in units of their spread."""
    return [
        float(np.abs(ours - expected).max() / max(1.0, expected.std()))
        for step, logits in enumerate(found)
        for row, ours in logits.items()
        for expected in [of_merged[adapters[row]][step][row]]
    ]
