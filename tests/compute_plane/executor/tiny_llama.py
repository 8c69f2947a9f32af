"""Seeded random models of two layers, small enough for a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.executor.cpu import CpuExecutor
from compute_plane.executor.packed_weights import pack_weights
from compute_plane.memory.kv_pool import KvPool
from compute_plane.memory.state_pool import make_states
from compute_plane.model import delta_net_layout, latent_layout, layout, mamba2_layout
from compute_plane.model.assets import ModelAssets
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.expert_layout import (
    ROUTER,
    bias_shapes,
    mixture_shapes,
    shared_shapes,
)
from compute_plane.model.latents import Latents
from compute_plane.model.loader import LoadedModel
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.quantize import convert_rows
from compute_plane.model.recurrence_layout import CONVOLUTIONS, recurrence_shapes
from compute_plane.model.rope_scaling import RopeScaling
from compute_plane.model.short_convolution import ShortConvolution
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import RawTensor, TensorFormat
from kernels.cpu.kv_layout import KvLayout
from tests.compute_plane.model.k_blocks import ENCODERS, k_blocks
from tests.compute_plane.model.llama_weights import LlamaLayer, LlamaWeights, layer_fields
from tests.golden.batch_driver import NUM_STATES

KERNEL_HEAD_DIM = 64
"""The smallest that CUDA's kernels are written for: of models that `--device cuda` is to run."""


def tiny_spec(
    rope_scaling: RopeScaling | None = None,
    *,
    tied: bool = False,
    quantisable: bool = False,
    architecture: str = "llama",
    head_dim: int = 16,
) -> ModelSpec:
    """Return a shape in which no two sizes are equal by accident.

    `quantisable`: rows are whole blocks of 32. `head_dim`: CUDA's kernels take `KERNEL_HEAD_DIM`.
    """
    return ModelSpec(
        name="tiny",
        architecture=architecture,
        vocab_size=131,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        hidden_size=96 if quantisable else 72,
        intermediate_size=160 if quantisable else 112,
        context_length=512,
        rope_theta=10_000.0,
        rope_scaling=rope_scaling,
        rms_norm_eps=1e-5,
        tie_embeddings=tied,
        num_parameters=0,
        weight_format="F32",
    )


def with_delta_net(spec: ModelSpec, architecture: str = "qwen35") -> ModelSpec:
    """Return a shape whose last layer attends; those before it have Gated DeltaNet."""
    layers = frozenset(range(spec.num_layers - 1))
    delta_net = DeltaNet(2, 4, 32, 64, 4, layers)
    return replace(spec, architecture=architecture, recurrence=delta_net)


def with_convolutions(spec: ModelSpec, architecture: str = "lfm2") -> ModelSpec:
    """Return a shape whose last layer attends; those before it have a gated convolution.

    Of a `quantisable` one: channels are a multiple of 32.
    """
    layers = frozenset(range(spec.num_layers - 1))
    convolutions = ShortConvolution(spec.hidden_size, 3, layers)
    return replace(spec, architecture=architecture, recurrence=convolutions)


def with_mamba2(spec: ModelSpec, architecture: str = "granitehybrid") -> ModelSpec:
    """Return a shape whose last layer attends; those before it have Mamba-2."""
    layers = frozenset(range(spec.num_layers - 1))
    return replace(spec, architecture=architecture, recurrence=Mamba2(8, 32, 64, 4, 1e-6, layers))


def with_single_layers(spec: ModelSpec, pattern: str = "M-*M-") -> ModelSpec:
    """Return a shape whose layers are one thing each, a letter of `pattern`, as in Nemotron-H."""
    mlps = frozenset(at for at, letter in enumerate(pattern) if letter == "-")
    layers = frozenset(range(len(pattern)))
    states = frozenset(at for at, letter in enumerate(pattern) if letter == "M")
    return replace(
        spec, architecture="nemotron_h", num_layers=len(pattern), layers_without_rope=layers,
        layers_without_mixer=mlps, layers_without_mlp=layers - mlps,
        recurrence=Mamba2(8, 32, 64, 4, 1e-6, states, num_groups=2),
    )  # fmt: skip


def with_latents(spec: ModelSpec) -> ModelSpec:
    """Return a shape whose heads attend over latents, of sizes that CUDA's kernels take."""
    latents = Latents(256, 32, 32, 96, 64, 0.2)
    return replace(
        spec, architecture="deepseek2", latents=latents, num_kv_heads=1, rotary_dim=32,
        head_dim=latents.row_size,
    )  # fmt: skip


def tiny_weights(spec: ModelSpec, seed: int = 0) -> LlamaWeights:
    """Return weights of a size at which logits differ clearly from token to token."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(0.15)

    def norm(size: int = spec.hidden_size) -> np.ndarray:
        return random.uniform(0.5, 1.5, size).astype(np.float32)

    def changes() -> dict[str, np.ndarray]:
        """What some architectures have besides; of Llama's other weights nothing changes."""
        sizes = {"q_bias": spec.query_size, "k_bias": spec.kv_size, "v_bias": spec.kv_size}
        heads = ("query_norm", "key_norm")
        found = {name: matrix(n) * 4 for name, n in sizes.items()} if spec.has_qkv_bias else {}
        if spec.has_head_norms:
            together = (spec.query_size, spec.kv_size)
            widths = together if spec.norms_heads_together else (spec.head_dim,) * 2
            found |= {name: norm(width) for name, width in zip(heads, widths, strict=True)}
        if spec.has_output_norms:
            found |= {"attn_output_norm": norm(), "mlp_output_norm": norm()}
        return found

    def mixture(layer: int) -> dict[str, np.ndarray]:
        """The router's logits differ enough for weights that are not all alike."""
        of = spec.mixture_of(layer)
        if of is None:
            return {}
        shapes = mixture_shapes(spec, of) | shared_shapes(spec, of)
        return {
            role: matrix(*shape) * (2 if role == ROUTER else 1) for role, shape in shapes.items()
        }

    def named(layer: int) -> dict[str, np.ndarray]:
        """Sinks, and vectors of mixtures and of models with all biases."""
        shapes = dict.fromkeys(layout.sinks(spec, layer), (spec.num_heads,))
        shapes |= dict.fromkeys(layout.output_bias(spec, layer), (spec.hidden_size,))
        of = spec.mixture_of(layer)
        if of is not None:
            for role, shape in bias_shapes(spec, of).items():
                shapes[layout.layer_tensor(layer, role, layout.BIAS)] = shape
        found = {name: matrix(*shape) * 4 for name, shape in shapes.items()}
        return found | mixer_weights(spec, layer, random)

    inner = spec.mlp_size or spec.intermediate_size
    embedding = matrix(spec.vocab_size, spec.hidden_size) * 4
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(
            LlamaLayer(
                attn_norm=norm(),
                q=matrix(spec.query_size, spec.hidden_size),
                k=matrix(spec.kv_size, spec.hidden_size),
                v=matrix(spec.kv_size, spec.hidden_size),
                o=matrix(spec.hidden_size, spec.attended_size),
                mlp_norm=norm(),
                gate=matrix(inner, spec.hidden_size),
                up=matrix(inner, spec.hidden_size),
                down=matrix(spec.hidden_size, inner),
                **changes(),
                mixture=mixture(index),
                named=named(index),
            )
            for index in range(spec.num_layers)
        ),
        final_norm=norm(),
        lm_head=embedding if spec.tie_embeddings else matrix(spec.vocab_size, spec.hidden_size),
    )


def mixer_weights(
    spec: ModelSpec, layer: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return the gate of a layer's attention, if it has one, or what it has in its place."""

    def matrix(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(0.15)

    recurrence = spec.recurrence_of(layer)
    if spec.latents is not None:
        shapes = latent_layout.latent_shapes(spec.latents, spec.num_heads, spec.hidden_size)
        return {
            layout.layer_tensor(layer, role): random.uniform(0.5, 1.5, shape).astype(np.float32)
            if len(shape) == 1
            else matrix(*shape) * 2
            for role, shape in shapes.items()
        }
    if recurrence is None:
        if not spec.gates_attention:
            return {}
        name = layout.layer_tensor(layer, delta_net_layout.QUERY_GATE)
        return {name: matrix(spec.query_size, spec.hidden_size)}
    found = {}
    for name, shape in recurrence_shapes(spec, recurrence).items():
        values = matrix(*shape)
        if name.endswith(delta_net_layout.RATES):  # some forget fast, some slowly
            values = -random.uniform(0.02, 2, shape).astype(np.float32)
        elif "norm" in name:
            values = random.uniform(0.5, 1.5, shape).astype(np.float32)
        elif len(shape) == 1 or any(role in name for role in CONVOLUTIONS):
            values *= 4
        found[f"{layout.PREFIX}layers.{layer}.{name}"] = values
    return found


class ArraySource:
    """Weights in memory as a model file would hold them, each matrix in a format of choice.

    `orders`: by a part of a matrix's name, a seed for the order that its columns are stored in.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: LlamaWeights,
        formats: Mapping[str, TensorFormat] | None,
        orders: Mapping[str, int] | None = None,
    ) -> None:
        arrays = {
            layout.EMBEDDING: weights.embedding,
            layout.FINAL_NORM: weights.final_norm,
            layout.LM_HEAD: weights.lm_head,
        }
        for index, layer in enumerate(weights.layers):
            for name, field in layer_fields(spec, index).items():
                arrays[name] = getattr(layer, field)
            for role, array in layer.mixture.items():
                arrays[layout.layer_tensor(index, role)] = array
            arrays |= layer.named
        self._tensors = {}
        for name in layout.tensor_shapes(spec):
            array, kind = arrays[name], _format_of(name, formats or {})
            seed = next((seed for part, seed in (orders or {}).items() if part in name), None)
            if seed is None:
                self._tensors[name] = raw_tensor(name, array, kind)
            else:
                order = np.random.default_rng(seed).permutation(array.shape[1])
                strewn = raw_tensor(name, np.ascontiguousarray(array[:, order]), kind)
                self._tensors[name] = replace(strewn, input_order=order)

    @property
    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> RawTensor:
        return self._tensors[name]

    def forget_pages(self) -> None:
        """Nothing is mapped."""


def model_in_memory(
    spec: ModelSpec,
    weights: LlamaWeights,
    formats: Mapping[str, TensorFormat] | None = None,
    orders: Mapping[str, int] | None = None,
) -> LoadedModel:
    """Return a model as a plane loads it, but for its text side, which it has none of."""
    source = ArraySource(spec, weights, formats, orders)
    return LoadedModel(spec, ModelAssets.__new__(ModelAssets), source, Path("memory"), None)


def _format_of(name: str, formats: Mapping[str, TensorFormat]) -> TensorFormat:
    """Return the format a tensor is stored in: by the part of its name that `formats` has."""
    vectors = (
        layout.BIAS, delta_net_layout.RATES, delta_net_layout.TIME_BIAS, mamba2_layout.SKIPS,
    )  # fmt: skip
    parts = ("norm", layout.SINKS, *CONVOLUTIONS)
    if name.endswith(vectors) or any(part in name for part in parts):
        return TensorFormat.F32
    return next((kind for part, kind in formats.items() if part in name), TensorFormat.F32)


def raw_tensor(name: str, array: np.ndarray, kind: TensorFormat) -> RawTensor:
    """Return an array as a stored tensor; 4 to 6 bits are rounded to here."""
    rows = array.reshape(-1, array.shape[-1])
    stored = np.ascontiguousarray(rows).view(np.uint8)
    if kind is TensorFormat.F16:
        stored = rows.astype(np.float16).view(np.uint8)
    elif kind in (TensorFormat.Q4_0, TensorFormat.Q4_1):
        stored = four_bit_blocks(rows, kind)
    elif kind.label in ENCODERS:
        stored = k_blocks(kind.label, rows)
    elif kind in (TensorFormat.Q5_0, TensorFormat.Q5_1, TensorFormat.MXFP4):
        stored = gguf.quants.quantize(rows, GgmlType[kind.label])
    elif kind is not TensorFormat.F32:
        f32 = TensorFormat.F32
        stored = convert_rows(stored, f32, kind, path=Path("memory"), name=name)
    return RawTensor(name, name, Path("memory"), kind, array.shape, stored)


def four_bit_blocks(rows: np.ndarray, kind: TensorFormat) -> np.ndarray:
    """Return rows [R, K] rounded to 4 bits in blocks of 32, as GGUF stores them."""
    values = rows.reshape(-1, 32).astype(np.float32)
    if kind is TensorFormat.Q4_1:
        low, high = values.min(axis=1), values.max(axis=1)
        numbers = [(high - low) / 15, low]
        quants = np.rint((values - low[:, None]) / np.maximum(numbers[0], 1e-9)[:, None])
    else:
        numbers = [np.abs(values).max(axis=1) / 7]
        quants = np.rint(values / np.maximum(numbers[0], 1e-9)[:, None]) + 8
    q = quants.astype(np.uint8)
    parts = [n.astype(np.float16).reshape(-1, 1).view(np.uint8) for n in numbers]
    blocks = np.concatenate([*parts, q[:, :16] | q[:, 16:] << 4], axis=1)
    return blocks.reshape(len(rows), -1)


def tiny_executor(
    spec: ModelSpec,
    weights: LlamaWeights,
    pool: KvPool,
    *,
    dtype: str = "auto",
    formats: Mapping[str, TensorFormat] | None = None,
    orders: Mapping[str, int] | None = None,
    num_threads: int = 2,
    keep_logits: bool = False,
) -> CpuExecutor:
    """Return the CPU executor on these weights, stored in `formats` (float32 where not named).

    Its states, if the model has any, are NaN, as those of a previous owner might have been.
    """
    packed = pack_weights(spec, ArraySource(spec, weights, formats, orders), dtype)
    states = make_states(spec, NUM_STATES)
    if states is not None:
        states.data[:] = 0xFF
    return CpuExecutor(
        spec, packed, pool, num_threads=num_threads, keep_logits=keep_logits, states=states
    )


def pool_for(
    spec: ModelSpec,
    num_blocks: int,
    block_size: int,
    dtype: str = "float32",
    num_host_blocks: int = 0,
) -> KvPool:
    """Return a pool whose every value is NaN, as a previous owner might have left it."""
    num_layers = len(spec.attending_layers())
    heads = spec.num_kv_heads, block_size, spec.head_dim, spec.value_dim
    kv_layout = KvLayout(dtype, num_layers, *heads)
    pool = KvPool(kv_layout, num_blocks, num_host_blocks)
    pool.data[:] = 0xFF
    return pool
