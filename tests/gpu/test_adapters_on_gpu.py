"""Rows with adapters on a GPU: what merged weights give on tensors, and the same bits again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from bench.gpu.device import why_no_device
from compute_plane.config import ComputePlaneConfig
from compute_plane.executor.registry import ExecutorContext, build_executor
from compute_plane.model.tensor import TensorFormat
from hetero_infer.replay.comparison import BFLOAT16_TOLERANCE
from tests.compute_plane.cuda.adapted_models import (
    ADAPTERS_OF_ROWS,
    errors_of_rows,
    merged_logits,
    step_logits,
    two_adapters,
)
from tests.compute_plane.cuda.torch_executors import tiny_model
from tests.compute_plane.executor.tiny_llama import KERNEL_HEAD_DIM, tiny_spec

SIZES = {"num_blocks": 60, "block_size": 16}
SPEC = tiny_spec(quantisable=True, head_dim=KERNEL_HEAD_DIM)
Q8_0 = TensorFormat.Q8_0


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize(
    ("architecture", "formats"),
    [("llama", {}), ("llama", {"proj": Q8_0}), ("gemma3", {}), ("qwen2", {"gate_proj": Q8_0})],
    ids=["dense", "gates in turns", "norms behind", "formats of two kinds"],
)
def test_rows_of_all_adapters_and_of_none_get_theirs_in_one_batch(
    architecture: str, formats: Mapping[str, TensorFormat], chunk: int | None
) -> None:
    reason = why_no_device()
    if reason is not None:
        pytest.skip(f"no CUDA device: {reason}")
    spec = replace(SPEC, architecture=architecture)
    model = tiny_model(spec, formats)
    adapters = two_adapters(model.source)
    context = ExecutorContext(
        spec=spec, model=model, dtype="auto", kv_cache_dtype="auto", instruction_set="auto",
        device="cuda", max_tokens=128, num_threads=2, max_rows=8, max_slots=8, keep_logits=True,
        kernel_cache=ComputePlaneConfig().kernel_cache_root, adapters=adapters, **SIZES,
    )  # fmt: skip
    executor = build_executor("cuda", context).executor

    found = step_logits(executor, ADAPTERS_OF_ROWS, chunk=chunk, **SIZES)

    of_merged = merged_logits(spec, model.source, adapters, chunk, **SIZES)
    assert max(errors_of_rows(found, of_merged, ADAPTERS_OF_ROWS)) < BFLOAT16_TOLERANCE
    again = step_logits(executor, ADAPTERS_OF_ROWS, chunk=chunk, **SIZES)
    for one, other in zip(found, again, strict=True):
        for row, logits in one.items():
            np.testing.assert_array_equal(logits, other[row])
