"""Seeded random models of two layers, small enough for a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from compute_plane.cpu.executor import CpuExecutor
from compute_plane.cpu.packed_adapters import pack_adapters
from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.memory.kv_pool import KvPool, pool_layout
from compute_plane.memory.state_pool import make_states
from compute_plane.model.adapter import Adapter
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.gemma4 import turning_divisors
from compute_plane.model.heads import Heads
from compute_plane.model.latents import Latents
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.rope_scaling import FrequencyDivisors, RopeScaling
from compute_plane.model.short_convolution import ShortConvolution
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.executor.tiny_sources import ArraySource
from tests.compute_plane.model.llama_weights import LlamaWeights
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


def with_states_beside(spec: ModelSpec, *, has_norm: bool = False) -> ModelSpec:
    """Return a shape whose layers have attention and Mamba-2, as in Falcon-H1."""
    layers = frozenset(range(spec.num_layers))
    mamba2 = Mamba2(8, 32, 64, 4, 1e-6, layers, num_groups=2, has_norm=has_norm)
    return replace(spec, architecture="falcon-h1", recurrence=mamba2)


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


def with_gemma4(spec: ModelSpec, *, has_experts: bool = False) -> ModelSpec:
    """Return a shape of five layers, two with heads of another size; or of two with experts.

    The last two of five read keys and values of the second and third.
    """
    if has_experts:
        mixture = Mixture(7, 3, shared_size=96, has_own_norms=True)
        return with_heads_of_two_sizes(replace(spec, num_layers=2, mixture=mixture))
    spec = replace(
        spec, num_layers=5, kv_sources=(0, 1, 2, 2, 1), late_mlp_size=192, layer_input_size=32
    )
    return with_heads_of_two_sizes(spec, frozenset({0, 2, 3}))


def with_heads_of_two_sizes(spec: ModelSpec, local: frozenset[int] | None = None) -> ModelSpec:
    """Return a shape like Gemma 4 31B. `local`: layers with windows; None: every other one.

    Then the others have no values but their keys.
    """
    layers = frozenset(range(spec.num_layers))
    others = frozenset(range(1, spec.num_layers, 2)) if local is None else layers - local
    return replace(
        spec, architecture="gemma4", score_scale=1.0, logits_cap=5.0,
        global_heads=Heads(spec.num_heads, 1, 2 * spec.head_dim), layers_with_global_heads=others,
        layers_without_values=others if local is None else frozenset(), local_rope_theta=100.0,
        layers_with_local_rope=layers - others, layers_with_window=layers - others, window=24,
        rope_scaling=FrequencyDivisors(turning_divisors(2 * spec.head_dim, 0.25, 1.0)),
    )  # fmt: skip


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
    adapters: Sequence[Adapter] = (),
) -> CpuExecutor:
    """Return the CPU executor on these weights, stored in `formats` (float32 where not named).

    Its states, if the model has any, are NaN, as those of a previous owner might have been.
    """
    packed = pack_weights(spec, ArraySource(spec, weights, formats, orders), dtype)
    states = make_states(spec, NUM_STATES)
    if states is not None:
        states.data[:] = 0xFF
    return CpuExecutor(
        spec,
        packed,
        pool,
        num_threads=num_threads,
        keep_logits=keep_logits,
        states=states,
        adapters=pack_adapters(adapters, packed.parts, dtype) if adapters else None,
    )


def pool_for(
    spec: ModelSpec,
    num_blocks: int,
    block_size: int,
    dtype: str = "float32",
    num_host_blocks: int = 0,
) -> KvPool:
    """Return a pool whose every value is NaN, as a previous owner might have left it."""
    pool = KvPool(pool_layout(spec, dtype, block_size), num_blocks, num_host_blocks)
    pool.data[:] = 0xFF
    return pool
