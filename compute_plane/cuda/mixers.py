"""What lets a token see those before it, layer by layer: attention, or a state.

    attention     norm → QKV, gates → biases, norms of heads, rotate, write K and V
                  → attention, with the layer's window → · sigmoid(gates)
    DeltaNet      norm → Q, K, V, Z, B, A → convolution, delta rule, norm, gate: through the states
    latents       `latent_mixer`
    convolution   norm → B, C, X → B · X, convolution, · C: through the states
    Mamba-2       norm → X, B, C, Z, D → convolution, scan, gate, norm: through the states
    both          norm → QKV → attention, and → X, B, C, Z, D → through the states

What they give is the input of the product behind them, or of the two products. Layers with
attention have keys and values in the pool, in the part of their kind of heads and by their number
among those, or attend to those of an earlier layer; those with a state have states, by number
likewise.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from compute_plane.cuda.latent_mixer import LatentMixer
from compute_plane.cuda.operands import (
    HeadChanges,
    LayerAttention,
    LayerConvolution,
    LayerDeltaNet,
    LayerMamba2,
)
from compute_plane.cuda.weights import (
    DeviceAttention,
    DeviceConvolution,
    DeviceDeltaNet,
    DeviceLatents,
    DeviceMamba2,
)
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.heads import Heads
from compute_plane.model.mamba2 import Mamba2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compute_plane.cuda.batch_layout import LateTokens, StepTensors
    from compute_plane.cuda.block_pools import BlockPools
    from compute_plane.cuda.layer_products import Hidden, LayerProducts
    from compute_plane.cuda.operands import StateRows
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.weights import DeviceLayer, DeviceRecurrence
    from compute_plane.model.recurrence import Recurrence
    from compute_plane.model.spec import ModelSpec

Angles: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines, float32 [positions, D/2] each."""
Turns: TypeAlias = tuple[Angles, Tensor]
"""Angles, and each token's place among them."""
Own = TypeVar("Own")
"""What a layer has of its own, of one kind."""


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A step, as a layer's mixer is given it.

    `late`: the tokens that alone go on behind it; None: all do. `out_of_states`: where what comes
    out of states is to lie, if it is given; a token in no row has there what it had.
    """

    step: StepTensors
    turns: Turns
    late: LateTokens | None = None
    out_of_states: Tensor | None = None

    def going_on(self, rows: Tensor) -> Tensor:
        """Return the rows of tokens that go on."""
        return rows if self.late is None else rows.index_select(0, self.late.tokens)


class Mixer(Protocol):
    """What a layer has to let a token see those before it."""

    def run(self, hidden: Hidden, norm: Tensor | None, given: LayerStep) -> tuple[Tensor, ...]:
        """Queue it; return the rows of tokens that go on, [R, …], for each product behind it.

        `norm`: weights of that before it. Attention comes first.
        """
        ...


class GoesThrough(Protocol):
    """Brings the tokens of rows through their states, in a layer by its number among those."""

    def __call__(
        self, out: Tensor, states: Tensor, layer: int, inputs: Tensor, rows: StateRows
    ) -> None:
        """Queue it; the arguments are those of `DeviceOperations.delta_net`."""
        ...


class AttentionMixer:
    """Attention of a layer, to keys and values of the layer that is `number` among those of `pool`.

    `heads`: its own. `changes`: of heads. `own`: what attention of the layer has of its own.
    """

    def __init__(
        self,
        products: LayerProducts,
        heads: Heads,
        weights: DeviceAttention,
        pool: Tensor,
        number: int,
        changes: HeadChanges,
        own: LayerAttention,
    ) -> None:
        self._products = products
        self._heads = heads
        self.weights = weights
        self._pool = pool
        self._number = number
        self._changes = changes
        self._own = own

    def run(self, hidden: Hidden, norm: Tensor | None, given: LayerStep) -> tuple[Tensor, ...]:
        """Queue it; return heads side by side, [R, H·D]."""
        products, weights = self._products, self.weights
        if weights.gate is None:
            return (self.attended(products.normed(hidden, norm, weights.qkv), given),)
        qkv, gates = products.both_normed(hidden, norm, weights.qkv, weights.gate)
        attended = self.attended(qkv, given)
        if len(attended):
            products.operations.gate_attended(attended, given.going_on(gates))
        return (attended,)

    def attended(self, qkv: Tensor, given: LayerStep) -> Tensor:
        """Queue what is behind the product; return as above. `qkv`: [T, (H + 2·G)·D]."""
        heads, pool, number, own = self._heads, self._pool, self._number, self._own
        operations, step = self._products.operations, given.step
        queries = torch.empty(
            (len(qkv), heads.num_heads, heads.head_dim), dtype=qkv.dtype, device=qkv.device
        )
        operations.rope_write_kv(
            queries, pool, number, qkv, *given.turns, step.kv_slots, self._changes
        )
        queries = given.going_on(queries)
        if given.late is not None:
            step = given.late.step
        num_decode = step.num_decode
        attended = torch.empty_like(queries)
        if num_decode:
            operations.attention_decode(
                attended[:num_decode],
                queries[:num_decode],
                pool,
                number,
                step.decode_tables,
                step.decode_lens,
                step.longest,
                own,
            )
        if step.prefill is not None:
            operations.attention_prefill(
                attended[num_decode:], queries[num_decode:], pool, number, step.prefill, own
            )
        return attended.view(len(attended), heads.query_size)


class RecurrentMixer:
    """What the layer that is `number` among those of `states` has in place of attention, or beside.

    `out_size`: what comes out of a token. `go_through`: the operation that brings them through.
    """

    def __init__(
        self,
        products: LayerProducts,
        weights: DeviceRecurrence,
        states: Tensor,
        number: int,
        out_size: int,
        go_through: GoesThrough,
    ) -> None:
        self._products = products
        self.inputs = weights.inputs
        self._states = states
        self._number = number
        self._out_size = out_size
        self._go_through = go_through

    def run(self, hidden: Hidden, norm: Tensor | None, given: LayerStep) -> tuple[Tensor, ...]:
        """Queue it; return what comes out of tokens, [R, out_size]."""
        return (self.gone_through(self._products.normed(hidden, norm, self.inputs), given),)

    def gone_through(self, inputs: Tensor, given: LayerStep) -> Tensor:
        """Queue what is behind the product; return as above. `inputs`: what it gives.

        All tokens go through their states, whoever goes on.
        """
        assert given.step.states is not None
        out = given.out_of_states
        if out is None:
            shape = len(inputs), self._out_size
            out = torch.empty(shape, dtype=inputs.dtype, device=inputs.device)
        self._go_through(out, self._states, self._number, inputs, given.step.states)
        return given.going_on(out)


class BothMixer:
    """Attention of a layer, and a state beside it that reads the same."""

    def __init__(
        self, products: LayerProducts, attention: AttentionMixer, recurrent: RecurrentMixer
    ) -> None:
        self._products = products
        self._attention = attention
        self._recurrent = recurrent

    def run(self, hidden: Hidden, norm: Tensor | None, given: LayerStep) -> tuple[Tensor, ...]:
        """Queue both; return what each of the two gives, as above."""
        attention, recurrent = self._attention, self._recurrent
        qkv, inputs = self._products.both_normed(
            hidden, norm, attention.weights.qkv, recurrent.inputs
        )
        gone = recurrent.gone_through(inputs, given)
        return attention.attended(qkv, given), gone


def mixers_of(
    products: LayerProducts,
    spec: ModelSpec,
    layers: Sequence[DeviceLayer],
    pools: BlockPools,
    growth: tuple[Tensor, int] | None,
) -> list[Mixer | None]:
    """Return those of a model's layers, None of one without.

    `growth`: of queries, as in `HeadChanges`.
    """
    made: list[Mixer | None] = []
    parts = dict(zip(spec.kinds_of_heads, pools.parts, strict=True))
    numbers = _numbers_in_the_pool(spec)
    state_numbers = {layer: number for number, layer in enumerate(spec.layers_with_state())}

    def recurrent(layer: int, weights: DeviceRecurrence) -> RecurrentMixer:
        of, states = spec.recurrence, pools.states
        if of is None or states is None:
            raise ValueError("a model with states needs a pool of them")
        go_through = _operation_of(products.operations, weights, of, spec.rms_norm_eps)
        number = state_numbers[layer]
        return RecurrentMixer(products, weights, states.device, number, of.out_size, go_through)

    for layer, one in enumerate(layers):
        weights = one.mixer
        if weights is None:
            made.append(None)
            continue
        if isinstance(weights, DeviceLatents):
            if spec.latents is None:
                raise ValueError("a model without latents has layers with them")
            made.append(
                LatentMixer(products, spec.latents, weights, pools.device, layer, spec.rms_norm_eps)
            )
            continue
        if not isinstance(weights, DeviceAttention):
            made.append(recurrent(layer, weights))
            continue
        changes = HeadChanges(
            weights.qkv_bias, weights.head_norms, spec.rms_norm_eps, growth,
            spec.norms_heads_together, spec.norms_values,
        )  # fmt: skip
        own = LayerAttention(spec.window_of(layer), weights.sinks, spec.scores_cap)
        heads, number = spec.heads_of(layer), numbers[spec.kv_source_of(layer)]
        attention = AttentionMixer(products, heads, weights, parts[heads], number, changes, own)
        if one.beside is None:
            made.append(attention)
        else:
            made.append(BothMixer(products, attention, recurrent(layer, one.beside)))
    return made


def _numbers_in_the_pool(spec: ModelSpec) -> dict[int, int]:
    """Return which of those of its kind of heads each layer with keys and values is."""
    numbers, so_far = {}, Counter[Heads]()
    for layer in spec.layers_with_keys():
        heads = spec.heads_of(layer)
        numbers[layer] = so_far[heads]
        so_far[heads] += 1
    return numbers


def _operation_of(
    operations: DeviceOperations,
    weights: DeviceRecurrence,
    of: Recurrence,
    eps: float,
) -> GoesThrough:
    """Return the operation that brings tokens through the states of a layer. `eps`: of norms."""
    if isinstance(weights, DeviceConvolution):
        return _given(operations.gated_convolution, LayerConvolution(weights.convolution))
    if isinstance(weights, DeviceMamba2) and isinstance(of, Mamba2):
        mamba2 = LayerMamba2(
            weights.convolution, weights.bias, weights.rates, weights.time_bias, weights.skips,
            weights.norm, of,
        )  # fmt: skip
        return _given(operations.mamba2, mamba2)
    if not isinstance(weights, DeviceDeltaNet) or not isinstance(of, DeltaNet):
        raise TypeError(f"{type(weights).__name__}, and sizes of {type(of).__name__}")
    own = LayerDeltaNet(
        weights.convolution, weights.rates, weights.time_bias, weights.norm, eps, of
    )
    return _given(operations.delta_net, own)


def _given(
    operation: Callable[[Tensor, Tensor, int, Tensor, StateRows, Own], None], own: Own
) -> GoesThrough:
    """Return an operation that is given what a layer has of its own."""

    def go_through(
        out: Tensor, states: Tensor, layer: int, inputs: Tensor, rows: StateRows
    ) -> None:
        operation(out, states, layer, inputs, rows, own)

    return go_through
