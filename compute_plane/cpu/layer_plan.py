"""What of a model's layers goes into a `PackingPlan`, and as what."""

from __future__ import annotations

import math
from collections.abc import Callable

from compute_plane.cpu.packed_latents import plan_latents
from compute_plane.cpu.packed_layers import (
    ExpertBiases,
    Feedforward,
    Mixer,
    PackedAttention,
    PackedExperts,
    PackedLayer,
    PackedLayerInput,
    PackedLayerInputs,
    PackedOwnNorms,
    PackedShared,
)
from compute_plane.cpu.packed_recurrences import plan_recurrence
from compute_plane.cpu.packing_plan import PackingPlan
from compute_plane.model import delta_net_layout, expert_layout, layer_inputs_layout, layout
from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.layer_scale import layer_scale
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import RawTensor, TensorFormat, TensorSource


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
        beside=plan_recurrence(plan, recurrence, tensor)
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
    return plan_recurrence(plan, recurrence, tensor)


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
