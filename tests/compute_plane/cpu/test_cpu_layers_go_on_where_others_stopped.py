"""The CPU engine's walk through a model's last layers alone, given what the first ones leave.

The first layers are run by another engine of the same kind, so the whole model's bits must come out
of the two parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from compute_plane.cpu.executor import CpuExecutor
from compute_plane.cpu.packed_layers import PackedWeights
from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.cpu.pieces import sort_tokens
from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput
from compute_plane.executor.token_layout import PoolShape, lay_out_tokens
from compute_plane.model import layout
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorFormat
from planes.errors import ValidationError
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_spec
from tests.compute_plane.executor.tiny_sources import ArraySource
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SPEC = replace(tiny_spec(quantisable=True), num_layers=4)
NUM_BLOCKS, BLOCK_SIZE = 60, 4
QUANTISED = {"proj": TensorFormat.Q8_0}


def packed(spec: ModelSpec, formats: dict[str, TensorFormat], first_layer: int) -> PackedWeights:
    return pack_weights(
        spec, ArraySource(spec, tiny_weights(spec), formats), first_layer=first_layer
    )


def executor_of(first_layer: int, num_layers: int, formats: dict[str, TensorFormat]) -> CpuExecutor:
    """Return the engine for some layers."""
    spec = replace(SPEC, num_layers=first_layer + num_layers)
    pool = pool_for(replace(spec, num_layers=num_layers), NUM_BLOCKS, BLOCK_SIZE, "bfloat16")
    weights = packed(spec, formats, first_layer)
    return CpuExecutor(spec, weights, pool, num_threads=1, keep_logits=True)


class TwoParts:
    """Two engines that share a model's layers, as one."""

    def __init__(self, cut: int, formats: dict[str, TensorFormat]) -> None:
        self.first = executor_of(0, cut, formats)
        self.first._model.late = None  # its last layer is not the model's: all tokens go on
        self.last = executor_of(cut, SPEC.num_layers - cut, formats)

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        return self.last.execute(batch, lambda: self._rows(batch))

    def _rows(self, batch: ExecutionBatch) -> np.ndarray:
        self.first.execute(batch)
        tokens = lay_out_tokens(batch, PoolShape(NUM_BLOCKS, BLOCK_SIZE, SPEC.vocab_size))
        prompt_lens = batch.prompt_lens if self.first.tells_prompts_apart else None
        places = sort_tokens(tokens, prompt_lens).places(np.arange(len(tokens.token_ids)))
        return self.first._model.hidden[places]


def logits_of(execute: Callable[[ExecutionBatch], ExecutionOutput]) -> list[bytes]:
    """Return the logits of steps of long and short rows, prompts and generated tokens mixed."""
    driver = BatchDriver(None, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)  # type: ignore[arg-type]
    random = np.random.default_rng(3)
    rows = [
        DrivenSequence(random.integers(0, SPEC.vocab_size, length).tolist(), num_prompt=length // 2)
        for length in (9, 30, 1, 14)
    ]
    found = []
    for chunk in (5, 8, 40, None, None):
        batch = driver.batch(rows, chunk)
        output = execute(batch)
        driver.commit(rows, batch, output)
        assert output.logits is not None
        found.append(output.logits.tobytes())
    return found


@pytest.mark.parametrize("formats", [{}, QUANTISED], ids=["float32", "quantised"])
def test_two_parts_of_a_model_give_its_bits_wherever_it_is_cut(
    formats: dict[str, TensorFormat],
) -> None:
    with executor_of(0, SPEC.num_layers, formats) as whole:
        expected = logits_of(whole.execute)
    for cut in range(1, SPEC.num_layers):
        parts = TwoParts(cut, formats)
        with parts.first, parts.last:
            assert logits_of(parts.execute) == expected, cut


@pytest.mark.parametrize("tied", [False, True])
def test_only_what_the_last_layers_need_is_packed(tied: bool) -> None:
    spec = replace(SPEC, tie_embeddings=tied)
    whole, last = packed(spec, {}, 0), packed(spec, {}, 3)
    assert last.embedding is None
    assert len(last.layers) == 1
    shapes = layout.tensor_shapes(spec)
    left_out = [name for name in shapes if any(f"layers.{layer}." in name for layer in range(3))]
    if not tied:
        left_out.append(layout.EMBEDDING)
    missing = sum(4 * int(np.prod(shapes[name])) for name in left_out)
    # Matrices are packed in panels of 16 columns.
    assert 0 <= whole.num_bytes - last.num_bytes - missing < 0.1 * whole.num_bytes


def test_hidden_rows_are_given_to_last_layers_and_to_no_others() -> None:
    driver = BatchDriver(None, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)  # type: ignore[arg-type]
    batch = driver.batch([DrivenSequence([1, 2, 3])])
    with executor_of(2, 2, {}) as last, executor_of(0, 4, {}) as whole:
        with pytest.raises(ValueError, match="hidden rows"):
            last.execute(batch)
        with pytest.raises(ValueError, match="hidden rows"):
            whole.execute(batch, lambda: np.zeros((3, SPEC.hidden_size), np.float32))


def test_a_malformed_batch_is_refused_before_other_layers_run() -> None:
    driver = BatchDriver(None, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)  # type: ignore[arg-type]
    batch = driver.batch([DrivenSequence([1, 2, SPEC.vocab_size])])
    calls = []
    with executor_of(2, 2, {}) as last, pytest.raises(ValidationError):
        last.execute(batch, lambda: calls.append(1))  # type: ignore[arg-type, func-returns-value]
    assert not calls
