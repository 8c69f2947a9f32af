"""Steps of tiny models on the kernels, in the simulator, and on the reference operations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.cuda.weights import DTYPES
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.torch_executors import RecordingDriver, tiny_plan, torch_executor
from tests.golden.batch_driver import BatchDriver, DrivenSequence

NUM_BLOCKS, BLOCK_SIZE = 12, 16
Formats = Mapping[str, TensorFormat]
PROMPTS = [4, 5, 6, 7, 8, 9, 10], [11, 12]


def operations_on(
    launcher: SimulatedLauncher, spec: ModelSpec, formats: Formats, dtype: str
) -> KernelOperations:
    """Return the operations of a tiny model whose weights are in such formats."""
    plan = tiny_plan(spec, DTYPES[dtype], formats)
    return KernelOperations(
        launcher, spec, dtype, BLOCK_SIZE, plan.quantized, has_dense=plan.has_dense,
        experts=plan.experts,
    )  # fmt: skip


def logits_of(
    spec: ModelSpec,
    formats: Formats,
    dtype: str,
    launcher: SimulatedLauncher | None,
    prompts: tuple[list[int], ...] = PROMPTS,
) -> list[np.ndarray]:
    """Return the logits of two prompts, and of a decode replayed from a graph.

    On kernels if there is a launcher for them. Whatever was drawn, the same tokens follow.
    """
    operations = None
    if launcher is not None:
        operations = operations_on(launcher, spec, formats, dtype)
    made = torch_executor(
        spec, RecordingDriver(), dtype=DTYPES[dtype], num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE, operations=operations, keep_logits=True, formats=formats,
    )  # fmt: skip
    made._pools.device.zero_()
    made.capture_decode_graph(len(prompts))
    driver = BatchDriver(made, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    rows = [DrivenSequence(list(prompt)) for prompt in prompts]
    found = []
    for token in (13, 14):
        output = made.execute(driver.batch(rows))
        assert output.logits is not None
        assert not output.failed_rows
        found.append(output.logits)
        for row in rows:
            row.num_computed = len(row.tokens)
            row.tokens.append(token)
    return found
