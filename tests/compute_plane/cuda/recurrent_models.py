"""Tiny models in which layers that keep states of sequences and others take turns, and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from compute_plane.executor.interface import ExecutionBatch, GPUExecutor
from compute_plane.model import (
    delta_net_layout,
    layout,
    mamba2_layout,
    short_convolution_layout,
)
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.loader import LoadedModel
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.short_convolution import ShortConvolution
from compute_plane.model.spec import Mixture
from kernels.reference.gated_convolution import gated_convolution
from kernels.reference.mamba2 import Mamba2State, Mamba2Weights, mamba2
from tests.compute_plane.executor.tiny_llama import tiny_spec, with_states_beside
from tests.compute_plane.model.delta_net_forward import Forward
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SIZES = DeltaNet(2, 4, 32, 64, 4, frozenset({0, 2}))
SPEC = replace(tiny_spec(), num_layers=4, architecture="qwen35", recurrence=SIZES)
NUM_BLOCKS, BLOCK_SIZE = 60, 4
MIXTURE = Mixture(5, 2, shared_size=48, gates_shared=True)
TILED = replace(SPEC, recurrence=replace(SIZES, value_heads_tiled=True))
CONVOLUTIONS = ShortConvolution(96, 3, frozenset({0, 2}))
LFM2 = replace(
    tiny_spec(quantisable=True), num_layers=4, architecture="lfm2", recurrence=CONVOLUTIONS
)
MAMBA2 = Mamba2(8, 32, 64, 4, 0.02, frozenset({0, 2}))
# The architecture is one whose attention the forward pass below has: layers are what is computed.
GRANITE4 = replace(tiny_spec(), num_layers=4, architecture="lfm2", recurrence=MAMBA2)
FALCON = with_states_beside(tiny_spec())
SPECS = {
    "Qwen3.5": SPEC,
    "Qwen3.5 as GGUF files have it": TILED,
    "Qwen3-Next": replace(SPEC, architecture="qwen3next", mixture=MIXTURE),
    "LFM2": LFM2,
    "Granite 4 H": GRANITE4,
    "Falcon-H1": FALCON,
    "Falcon-H1, norm behind the state": with_states_beside(tiny_spec(), has_norm=True),
}
PROMPTS: Sequence[Sequence[int]] = (range(3, 14), [20], [30, 31, 32], range(40, 47))


class UngatedForward(Forward):
    """Of models whose attention has no gates."""

    def _attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        return 2 * super()._attention(layer, x)  # sigmoid(0) of it

    def _of(self, layer: int, role: str, part: str = layout.WEIGHT) -> np.ndarray:
        if role == delta_net_layout.QUERY_GATE:
            return np.zeros((self._spec.query_size, self._spec.hidden_size), np.float32)
        return super()._of(layer, role, part)


class ConvolutionForward(UngatedForward):
    """Of models with gated convolutions."""

    def delta_net(self, layer: int, of: object, x: np.ndarray) -> np.ndarray:
        """Return what a layer has in place of attention makes of rows [T, hidden]."""
        assert isinstance(of, ShortConvolution)
        inputs, taps, out = (
            self._of(layer, role)
            for role in (
                short_convolution_layout.INPUTS,
                short_convolution_layout.CONVOLUTION,
                short_convolution_layout.OUT,
            )
        )
        empty = np.zeros((of.kernel_size - 1, of.channels), np.float32)
        return gated_convolution((x @ inputs.T).astype(np.float32), taps, empty) @ out.T


class Mamba2Forward(UngatedForward):
    """Of models with Mamba-2."""

    def delta_net(self, layer: int, of: object, x: np.ndarray) -> np.ndarray:
        """Return what a layer has in place of attention makes of rows [T, hidden]."""
        assert isinstance(of, Mamba2)
        own = mamba2_layout
        rows = x @ np.concatenate([self._of(layer, own.IN_XBC), self._of(layer, own.IN_Z)]).T
        vectors = [self._of(layer, own.MIXER, part) for part in (own.RATES, own.TIME_BIAS)]
        weights = Mamba2Weights(
            self._of(layer, own.CONVOLUTION),
            self._of(layer, own.CONVOLUTION, layout.BIAS),
            *vectors,
            self._of(layer, own.MIXER, own.SKIPS),
            self._of(layer, own.NORM) if of.has_norm else None,
            of.norm_eps,
            of.num_groups,
        )
        steps = x @ self._of(layer, own.IN_D).T
        out = mamba2(rows, steps, weights, Mamba2State.empty(weights, of.inner_size))
        return out @ self._of(layer, own.OUT).T


def forward_of(model: LoadedModel) -> Forward:
    """Return what computes a model by the formulas alone."""
    if isinstance(model.spec.recurrence, Mamba2):
        return Mamba2Forward(model)
    is_convolution = isinstance(model.spec.recurrence, ShortConvolution)
    return ConvolutionForward(model) if is_convolution else Forward(model)


def driven(executor: GPUExecutor, *, seed: int = 0) -> BatchDriver:
    return BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, seed=seed)


def sequences(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[DrivenSequence]:
    return [DrivenSequence(list(prompt)) for prompt in prompts]


def logits_behind(
    executor: GPUExecutor, texts: Sequence[Sequence[int]], chunks: Sequence[int]
) -> list[np.ndarray]:
    """Return the logits behind the last token of each text, and how many it had, step by step.

    Every step takes `chunks[i]` tokens of each text at most, the last one as many as are left.
    """
    driver, rows = driven(executor), sequences(texts)
    found: dict[int, np.ndarray] = {}
    chunk = iter(chunks)
    while running := [row for row in rows if row.num_computed < len(row.tokens)]:
        batch = driver.batch(running, next(chunk, None))
        output = executor.execute(batch)
        assert not output.failed_rows
        assert output.logits is not None
        for row, end in zip(running, batch.seq_lens, strict=True):
            row.num_computed = int(end)
        for row, logits in zip(batch.sampled_rows, output.logits, strict=True):
            found[rows.index(running[row])] = logits
    return [found[index] for index in range(len(rows))]


def shuffled(batch: ExecutionBatch, order: Sequence[int]) -> ExecutionBatch:
    """Return a batch with its rows in another order."""
    ends = np.cumsum(batch.query_lens)
    tokens = np.concatenate([np.arange(ends[r] - batch.query_lens[r], ends[r]) for r in order])
    places = np.argsort(order)
    return replace(
        batch,
        **{name: getattr(batch, name)[tokens] for name in ("input_tokens", "positions")},
        **{
            name: getattr(batch, name)[list(order)]
            for name in (
                "seq_lens", "block_tables", "is_prefill", "prompt_lens", "query_lens", "states",
            )
        },
        sampled_rows=places[batch.sampled_rows].astype(np.int32),
    )  # fmt: skip
