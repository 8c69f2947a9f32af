"""Where every tensor of a model goes, planned before there is memory for it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from compute_plane.cpu.packed_latents import plan_latents
from compute_plane.cpu.packed_layers import (
    ExpertBiases,
    Feedforward,
    MatrixPart,
    Mixer,
    PackedAttention,
    PackedExperts,
    PackedLayer,
    PackedLayerInput,
    PackedLayerInputs,
    PackedMatrix,
    PackedMlp,
    PackedOwnNorms,
    PackedShared,
)
from compute_plane.cpu.packed_recurrences import (
    PackedConvolution,
    PackedDeltaNet,
    PackedMamba2,
    PackedRecurrence,
)
from compute_plane.cpu.packing_jobs import PackingJob, PlannedMatrix, packed_bytes
from compute_plane.executor.weight_formats import format_to_run, input_order_of
from compute_plane.model import (
    delta_net_layout,
    expert_layout,
    layer_inputs_layout,
    layout,
    mamba2_layout,
    short_convolution_layout,
)
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.layer_scale import layer_scale
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.recurrence import Recurrence
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import (
    ALL_ROWS,
    IntArray,
    RawTensor,
    TensorFormat,
    TensorSource,
)

UInt8Array = npt.NDArray[np.uint8]

ALIGNMENT: Final = 64


def plan_layer(plan: PackingPlan, spec: ModelSpec, source: TensorSource, layer: int) -> PackedLayer:
    """Plan one layer; addresses are offsets yet. Raises UnsupportedModelError."""

    def tensor(role: str, part: str = layout.WEIGHT) -> RawTensor:
        return source.tensor(layout.layer_tensor(layer, role, part))

    recurrence = spec.recurrence_of(layer)
    outputs = [source.tensor(name) for name in layout.output_norms(spec, layer)]
    norms = {name: source.tensor(name) for name in layout.input_norms(spec, layer)}

    def norm(role: str) -> int | None:
        found = norms.get(layout.layer_tensor(layer, role))
        return None if found is None else plan.vector(found)

    return PackedLayer(
        attn_norm=norm(layout.ATTN_NORM),
        mixer=_plan_mixer(plan, spec, source, layer, tensor) if spec.has_mixer(layer) else None,
        beside=_plan_recurrence(plan, recurrence, tensor)
        if recurrence is not None and spec.attends(layer)
        else None,
        mlp_norm=norm(layout.MLP_NORM),
        feedforward=_plan_feedforward(plan, spec, source, layer, tensor)
        if spec.has_mlp(layer)
        else None,
        output_norms=(plan.vector(outputs[0]), plan.vector(outputs[1])) if outputs else None,
        layer_input=PackedLayerInput(
            gate=plan.matrix([tensor(layer_inputs_layout.GATE)]),
            output=plan.matrix([tensor(layer_inputs_layout.OUTPUT)]),
            output_norm=plan.vector(tensor(layer_inputs_layout.OUTPUT_NORM)),
        )
        if spec.layer_input_size
        else None,
        scale=layer_scale(spec, source, layer),
    )


def plan_layer_inputs(
    plan: PackingPlan, spec: ModelSpec, source: TensorSource
) -> PackedLayerInputs | None:
    """Plan what the inputs of layers are made of; None: they have none."""
    if not spec.layer_input_size:
        return None
    return PackedLayerInputs(
        embedding=plan.matrix([source.tensor(layer_inputs_layout.EMBEDDING)]),
        projection=plan.matrix([source.tensor(layer_inputs_layout.PROJECTION)]),
        norm=plan.vector(source.tensor(layer_inputs_layout.PROJECTION_NORM)),
    )


def _plan_mixer(
    plan: PackingPlan,
    spec: ModelSpec,
    source: TensorSource,
    layer: int,
    tensor: Callable[..., RawTensor],
) -> Mixer:
    """Plan attention, or what a layer has in its place. `tensor`: by its role and part."""
    recurrence = spec.recurrence_of(layer)
    if spec.latents is not None:
        return plan_latents(plan, spec, tensor)
    if recurrence is None or spec.attends(layer):
        return _plan_attention(plan, spec, source, layer)
    return _plan_recurrence(plan, recurrence, tensor)


def _plan_recurrence(
    plan: PackingPlan, of: Recurrence, tensor: Callable[..., RawTensor]
) -> PackedRecurrence:
    """Plan what keeps a state. `tensor`: by its role and part."""
    if isinstance(of, DeltaNet):
        return _plan_delta_net(plan, tensor)
    if isinstance(of, Mamba2):
        return _plan_mamba2(plan, of, tensor)
    return _plan_convolution(plan, tensor)


def _plan_feedforward(
    plan: PackingPlan,
    spec: ModelSpec,
    source: TensorSource,
    layer: int,
    tensor: Callable[..., RawTensor],
) -> Feedforward:
    """Plan the MLP, or the mixture of a layer. `tensor`: by its role."""
    mixture = spec.mixture_of(layer)
    if mixture is not None:
        return _plan_experts(plan, spec, mixture, source, layer)
    *read, down = map(tensor, layout.mlp_roles(spec))
    return plan.mlp(read, down)


def _plan_attention(
    plan: PackingPlan, spec: ModelSpec, source: TensorSource, layer: int
) -> PackedAttention:
    """Plan a layer's attention."""

    def tensor(role: str) -> RawTensor:
        return source.tensor(layout.layer_tensor(layer, role))

    biases = layout.qkv_biases(spec, layer)
    norms = [source.tensor(name) for name in layout.head_norms(spec, layer)]
    o_bias = [source.tensor(name) for name in layout.output_bias(spec, layer)]
    sinks = [source.tensor(name) for name in layout.sinks(spec, layer)]
    roles = [layout.QUERY]
    if spec.kv_source_of(layer) == layer:
        roles += [layout.KEY, layout.VALUE]
    return PackedAttention(
        qkv=plan.fused([tensor(role) for role in roles]),
        o=plan.matrix([tensor(layout.OUTPUT)]),
        qkv_bias=plan.vector(*map(source.tensor, biases)) if biases else None,
        head_norms=(plan.vector(norms[0]), plan.vector(norms[1]) if norms[1:] else None)
        if norms
        else None,
        o_bias=plan.vector(*o_bias) if o_bias else None,
        sinks=plan.vector(*sinks, factor=math.log2(math.e)) if sinks else None,
        gate=plan.matrix([tensor(delta_net_layout.QUERY_GATE)]) if spec.gates_attention else None,
    )


def _plan_delta_net(plan: PackingPlan, tensor: Callable[..., RawTensor]) -> PackedDeltaNet:
    """Plan what a layer has in place of attention. `tensor`: by its role and part."""
    return PackedDeltaNet(
        rows=plan.fused([tensor(delta_net_layout.IN_QKV), tensor(delta_net_layout.IN_Z)]),
        # How much of a state stays is kept as exact as the file has it.
        gates=plan.matrix(
            [tensor(delta_net_layout.IN_B), tensor(delta_net_layout.IN_A)],
            target=TensorFormat.F32,
        ),
        convolution=plan.vector(tensor(delta_net_layout.CONVOLUTION), is_turned=True),
        rates=plan.vector(tensor(delta_net_layout.MIXER, delta_net_layout.RATES)),
        time_bias=plan.vector(tensor(delta_net_layout.MIXER, delta_net_layout.TIME_BIAS)),
        norm=plan.vector(tensor(delta_net_layout.NORM)),
        o=plan.matrix([tensor(delta_net_layout.OUT)]),
    )


def _plan_mamba2(plan: PackingPlan, of: Mamba2, tensor: Callable[..., RawTensor]) -> PackedMamba2:
    """Plan what a layer has in place of attention, or beside it. `tensor`: by its role and part."""

    def vector(part: str) -> int:
        return plan.vector(tensor(mamba2_layout.MIXER, part))

    return PackedMamba2(
        rows=plan.fused([tensor(mamba2_layout.IN_XBC), tensor(mamba2_layout.IN_Z)]),
        # How much of a state stays is kept as exact as the file has it.
        steps=plan.matrix([tensor(mamba2_layout.IN_D)], target=TensorFormat.F32),
        convolution=plan.vector(tensor(mamba2_layout.CONVOLUTION), is_turned=True),
        bias=plan.vector(tensor(mamba2_layout.CONVOLUTION, layout.BIAS)),
        rates=vector(mamba2_layout.RATES),
        time_bias=vector(mamba2_layout.TIME_BIAS),
        skips=vector(mamba2_layout.SKIPS),
        norm=plan.vector(tensor(mamba2_layout.NORM)) if of.has_norm else None,
        o=plan.matrix([tensor(mamba2_layout.OUT)]),
    )


def _plan_convolution(plan: PackingPlan, tensor: Callable[..., RawTensor]) -> PackedConvolution:
    """Plan what a layer has in place of attention. `tensor`: by its role and part."""
    return PackedConvolution(
        rows=plan.fused([tensor(short_convolution_layout.INPUTS)]),
        convolution=plan.vector(tensor(short_convolution_layout.CONVOLUTION), is_turned=True),
        o=plan.matrix([tensor(short_convolution_layout.OUT)]),
    )


def _plan_experts(
    plan: PackingPlan, spec: ModelSpec, mixture: Mixture, source: TensorSource, layer: int
) -> PackedExperts:
    """Plan a layer's mixture, whose experts must be stored alike."""

    def tensor(role: str, part: str = layout.WEIGHT) -> RawTensor:
        return source.tensor(layout.layer_tensor(layer, role, part))

    def biases(*parts: str) -> int:
        return plan.vector(
            *(
                tensor(expert_layout.expert_role(expert, part), layout.BIAS)
                for expert in range(mixture.num_experts)
                for part in parts
            )
        )

    # The choice of experts is kept as exact as the file has it.
    router = plan.matrix([tensor(expert_layout.ROUTER)], target=TensorFormat.F32)
    parts = expert_layout.parts_of(spec)
    first, stride_bytes = None, 0
    for expert in range(mixture.num_experts):
        start = plan.num_bytes
        tensors = [tensor(expert_layout.expert_role(expert, part)) for part in parts]
        mlp = plan.mlp(tensors[:-1], tensors[-1])
        if any(matrix.input_order is not None for matrix in mlp.matrices):
            raise UnsupportedModelError(
                tensors[0].path,
                f"experts whose inputs are sorted (act-order) are not supported: {tensors[0].name}",
            )
        if first is None:
            first, stride_bytes = mlp, plan.num_bytes - start
        elif mlp != first.moved(expert * stride_bytes):
            raise UnsupportedModelError(
                tensors[0].path,
                "experts of a layer must be stored in one format, the first one and that of "
                f"{tensors[0].name} are not",
            )
    if first is None:
        raise ValueError("a mixture has at least one expert")
    of_all = None
    if spec.has_all_biases:
        of_all = ExpertBiases(
            router=plan.vector(tensor(expert_layout.ROUTER, layout.BIAS)),
            gate_up=biases(expert_layout.GATE, expert_layout.UP),
            down=biases(expert_layout.DOWN),
        )
    correction = None
    if mixture.corrects_choice:
        correction = plan.vector(tensor(expert_layout.CORRECTION, layout.BIAS))
    return PackedExperts(
        router,
        first,
        stride_bytes,
        of_all,
        correction,
        _plan_shared(plan, spec, mixture, tensor),
        _plan_own_norms(plan, spec, mixture, tensor),
    )


def _plan_own_norms(
    plan: PackingPlan, spec: ModelSpec, mixture: Mixture, tensor: Callable[..., RawTensor]
) -> PackedOwnNorms | None:
    """Plan the norms of a mixture's parts. `tensor`: by its role and part."""
    if not mixture.has_own_norms:
        return None
    scale = expert_layout.SCALE
    return PackedOwnNorms(
        # What it reads is divided by √hidden, too.
        router=plan.vector(tensor(expert_layout.ROUTER, scale), factor=spec.hidden_size**-0.5),
        experts=plan.vector(tensor(expert_layout.EXPERTS_NORM)),
        shared_output=plan.vector(tensor(expert_layout.SHARED_OUTPUT_NORM)),
        experts_output=plan.vector(tensor(expert_layout.EXPERTS_OUTPUT_NORM)),
        expert_scales=plan.vector(tensor(f"{expert_layout.EXPERTS}.{expert_layout.DOWN}", scale)),
    )


def _plan_shared(
    plan: PackingPlan, spec: ModelSpec, mixture: Mixture, tensor: Callable[[str], RawTensor]
) -> PackedShared | None:
    """Plan what all tokens of a layer go through. `tensor`: by its role."""
    if not mixture.shared_size:
        return None
    *read, down = (
        tensor(f"{expert_layout.SHARED}.{part}") for part in expert_layout.parts_of(spec)
    )
    mlp = plan.mlp(read, down)
    gate = None
    if mixture.gates_shared:
        gate = plan.matrix([tensor(expert_layout.SHARED_GATE)], target=TensorFormat.F32)
    return PackedShared(mlp, gate)


class PackingPlan:
    """Where every tensor goes; made before the memory is."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._vectors: list[tuple[RawTensor, int, float, bool]] = []
        self._matrices: list[tuple[PlannedMatrix, PackedMatrix]] = []
        self.elements: Counter[tuple[TensorFormat, TensorFormat]] = Counter()
        self.parts: dict[int, list[MatrixPart]] = {}
        self.num_bytes = 0

    def vector(self, *tensors: RawTensor, factor: float = 1.0, is_turned: bool = False) -> int:
        """Take a place for a vector of float32, of all `tensors`, and return its offset.

        `factor`: what its elements are multiplied by. `is_turned`: of a matrix that is stored as
        one, columns follow each other.
        """
        start = at = self._take(4 * sum(tensor.num_elements for tensor in tensors))
        for tensor in tensors:
            self._vectors.append((tensor, at, factor, is_turned))
            at += 4 * tensor.num_elements
        return start

    def matrix(
        self,
        tensors: Sequence[RawTensor],
        first_column: int = 0,
        row_order: IntArray | None = None,
        target: TensorFormat | None = None,
    ) -> PackedMatrix:
        """Take a place for a matrix of the rows of all `tensors`, which run in one way.

        `row_order`: the order in which the rows of each are packed; None: the model's. `target`:
        the format it runs in; None: as the dtype says.
        """
        target = target or format_to_run(tensors[0], self._dtype)
        n, k = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        size = packed_bytes(target, n, k)
        order = input_order_of(tensors[0], target)
        matrix = PackedMatrix(
            target.label, n, k, self._take(size), size, first_column,
            None if order is None else order.astype(np.int32),
        )  # fmt: skip
        self._matrices.append((PlannedMatrix(tensors, target, row_order), matrix))
        if order is None and row_order is None:
            ends = itertools.accumulate(tensor.shape[0] for tensor in tensors)
            self.parts[matrix.address] = [
                MatrixPart(tensor.name, target.label, end - tensor.shape[0], tensor.shape[0])
                for tensor, end in zip(tensors, ends, strict=True)
            ]
        for tensor in tensors:
            self.elements[tensor.format, target] += tensor.num_elements
        return matrix

    def fused(
        self, tensors: Sequence[RawTensor], row_order: IntArray | None = None
    ) -> tuple[PackedMatrix, ...]:
        """Take places for matrices with the same input: one for each run that is read alike."""
        matrices: list[PackedMatrix] = []
        column = 0

        def way_of(tensor: RawTensor) -> tuple[TensorFormat, bytes | None]:
            order = self.input_order(tensor)
            target = format_to_run(tensor, self._dtype)
            return target, None if order is None else order.tobytes()

        for _, run in itertools.groupby(tensors, way_of):
            matrices.append(self.matrix(list(run), column, row_order))
            column += matrices[-1].n
        return tuple(matrices)

    def mlp(self, gate_up: Sequence[RawTensor], down: RawTensor) -> PackedMlp:
        """Take places for the matrices of an MLP. `gate_up`: without gate where there is none."""
        order = self.input_order(down)
        if order is not None:
            down = replace(down, input_order=None)
        mlp = PackedMlp(self.fused(gate_up, order), self.matrix([down]))
        if order is not None:  # nor are the inputs of this one in the model's
            del self.parts[mlp.down.address]
        return mlp

    def input_order(self, tensor: RawTensor) -> IntArray | None:
        """Return the order in which a matrix, as it runs, wants its inputs; None: the model's."""
        return input_order_of(tensor, format_to_run(tensor, self._dtype))

    def jobs(self, memory: UInt8Array) -> list[PackingJob]:
        """Return what is to be done, in pieces that threads can share."""
        jobs = []
        for tensor, start, factor, is_turned in self._vectors:
            out = memory[start : start + 4 * tensor.num_elements]
            jobs.append(PackingJob([tensor], TensorFormat.F32, out, ALL_ROWS, factor, is_turned))
        for planned, matrix in self._matrices:
            jobs += planned.jobs(memory[matrix.address : matrix.address + matrix.num_bytes])
        return jobs

    def converted(self) -> list[tuple[RawTensor, TensorFormat]]:
        """Return the tensors that run in another format than their file's, with that format."""
        return [
            (tensor, planned.target)
            for planned, _ in self._matrices
            for tensor in planned.tensors
            if tensor.format is not planned.target
        ]

    def _take(self, num_bytes: int) -> int:
        start = self.num_bytes
        self.num_bytes = -(-(start + num_bytes) // ALIGNMENT) * ALIGNMENT
        return start
