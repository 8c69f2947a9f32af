"""What a decoder of the Llama kind is: its architecture and its numbers, without its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from compute_plane.model.architectures import ARCHITECTURES, Activation

MAX_LAYERS = 4096
MAX_VOCAB_SIZE = 1 << 21
MAX_CONTEXT_LENGTH = (1 << 31) - 1  # positions are int32


MAX_EXPERTS: Final = 1024
MAX_EXPERTS_PER_TOKEN: Final = 64

LEAST_SCALING: Final = 1e-6
MOST_SCALING: Final = 1e6
"""Beyond these the numbers of a scaling make frequencies that float32 cannot hold."""

YARN_BETA_FAST: Final = 32.0
YARN_BETA_SLOW: Final = 1.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """RoPE frequency scaling by position interpolation: all frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """RoPE frequency scaling of YaRN (Peng et al. 2023).

    Pairs that turn more than `beta_fast` times in `original_context_length` positions are kept,
    those that turn less than `beta_slow` times are divided by `factor`, and those between are
    interpolated. `truncate`: the first and the last pair between are whole ones. Cosines and sines
    are multiplied by `attention_factor`. `query_growth`: from the original length on queries are
    multiplied by more and more (`compute_plane.model.rope.query_growth`); 0: they are not.
    """

    factor: float
    original_context_length: int
    attention_factor: float
    beta_fast: float = YARN_BETA_FAST
    beta_slow: float = YARN_BETA_SLOW
    truncate: bool = True
    query_growth: float = 0.0


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """RoPE frequency scaling of Llama 3.1 ("llama3" in Hugging Face configurations).

    Frequencies with a wavelength above `original_context_length / low_freq_factor` are divided by
    `factor`, those below `original_context_length / high_freq_factor` are kept, and those between
    are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """RoPE frequency scaling given as one divisor per frequency, D/2 of them.

    This is how GGUF files store Llama 3 scaling (tensor `rope_freqs.weight`).
    """

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LongContexts:
    """What contexts that are long have: `divisors` of their own, and so many positions."""

    divisors: tuple[float, ...]
    context_length: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """RoPE frequency scaling of LongRoPE (Ding et al. 2024).

    `divisors`: one per frequency; those of contexts up to `original_context_length` ("short
    factors"). Longer contexts have others, for their first tokens too, so keys that are in the
    cache would be wrong where a context grows beyond: it ends there. Or all contexts, short ones
    too, have what `long` ones have (`compute_plane.model.exact_context.with_long_contexts`); None:
    they do, or the files do not say. Cosines and sines are multiplied by `attention_factor`, in
    contexts of any length.
    """

    divisors: tuple[float, ...]
    original_context_length: int
    attention_factor: float
    long: LongContexts | None = None


RopeScaling = LinearScaling | YarnScaling | Llama3Scaling | FrequencyDivisors | LongRopeScaling


def yarn_attention_factor(factor: float, mscale: float = 0, mscale_all_dim: float = 0) -> float:
    """Return the attention factor of a model that names none; the last two count together only."""

    def of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        below = of(mscale_all_dim)
        return of(mscale) / below if below else math.inf
    return of(1.0)


def long_rope_attention_factor(factor: float, original_context_length: int) -> float:
    """Return the attention factor of a LongRoPE model that names none; `factor`: longer so much."""
    if factor <= 1 or original_context_length <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_context_length))


def scaled_context_length(context_length: int, scaling: RopeScaling | None) -> int:
    """Return how many positions a model has for which its file says `context_length`.

    Files of models with linear scaling say what they had before it, and those with YaRN may. (A
    file with Llama 3 scaling says what it has, and so does Gemma's.)
    """
    scaled = float(context_length)
    if isinstance(scaling, LinearScaling):
        scaled *= scaling.factor
    elif isinstance(scaling, YarnScaling):
        scaled = max(scaled, scaling.original_context_length * scaling.factor)
    return int(min(scaled, MAX_CONTEXT_LENGTH)) if scaled != context_length else context_length


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts that each layer has in place of one MLP (`compute_plane.model.mixture`).

    A token goes through `experts_per_token` of `num_experts`. `normalises_weights`: their weights
    are a softmax over the chosen ones, otherwise over all.
    """

    num_experts: int
    experts_per_token: int
    normalises_weights: bool = True

    def faults(self) -> list[str]:
        """Return what makes these numbers no mixture, one line each; empty if sound."""
        faults = []
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            faults.append(f"num_experts must be 1 to {MAX_EXPERTS}, got {self.num_experts}")
        most = max(1, min(MAX_EXPERTS_PER_TOKEN, self.num_experts))
        if not 1 <= self.experts_per_token <= most:
            faults.append(f"experts_per_token must be 1 to {most}, got {self.experts_per_token}")
        return faults


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder of the Llama kind.

    RMSNorm before attention and MLP unless the architecture has none there, rotary positions in the
    half-split convention (element i of a head turns with element i + D/2), grouped-query attention,
    a gated MLP or a `mixture` of such (None: one MLP), no biases but those of the architecture (a
    model with others is refused when it is read).

    `architecture`: one of ARCHITECTURES; "llama" also for Mistral models, which are the same but
    for their windows. `head_dim`: need not be hidden_size / num_heads. `intermediate_size`: of
    the MLP, or of each expert. `context_length`: how many positions are computed exactly.
    `tie_embeddings`: the embedding is also the output matrix. `num_parameters`: tied matrices count
    once. `weight_format`: the storage format that holds most parameters, such as "Q4_1" or "BF16".
    `rope_scaling`: None for plain RoPE. `rotary_dim`: how many elements of a head turn, the first
    ones in a Hugging Face file; None: all. `layers_without_rope`: in which no head turns.
    `embedding_scale`: what rows of the embedding are multiplied by. `score_scale`: what scores are;
    None: 1/√head_dim. `logits_scale`: what logits are. (`compute_plane.model.multipliers`, which
    changes `rms_norm_eps` too.) `window`: how many positions a token sees in `layers_with_window`,
    the last ones up to its own (`compute_plane.model.windows`). `local_rope_theta`: the base of
    `layers_with_local_rope`, which have no scaling; None: there are none. `pooling`: what an
    embedding is made of (`compute_plane.model.pooling`); empty: the files do not say.
    """

    name: str
    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    context_length: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tie_embeddings: bool
    num_parameters: int
    weight_format: str
    rotary_dim: int | None = None
    layers_without_rope: frozenset[int] = frozenset()
    embedding_scale: float = 1.0
    score_scale: float | None = None
    logits_scale: float = 1.0
    mixture: Mixture | None = None
    window: int | None = None
    layers_with_window: frozenset[int] = frozenset()
    local_rope_theta: float | None = None
    layers_with_local_rope: frozenset[int] = frozenset()
    pooling: str = ""
    lacks_qkv_bias: bool = False

    def window_of(self, layer: int) -> int | None:
        """Return how many positions a token sees in a layer; None: all up to its own."""
        return self.window if layer in self.layers_with_window else None

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return ARCHITECTURES[self.architecture].has_qkv_bias and not self.lacks_qkv_bias

    @property
    def has_head_norms(self) -> bool:
        """Whether query and key heads are normalised before they are rotated."""
        return ARCHITECTURES[self.architecture].has_head_norms

    @property
    def has_output_norms(self) -> bool:
        """Whether what attention and MLP give is normalised before it is added."""
        return ARCHITECTURES[self.architecture].has_output_norms

    @property
    def has_input_norms(self) -> bool:
        """Whether what attention and MLP read is normalised."""
        return ARCHITECTURES[self.architecture].has_input_norms

    @property
    def has_sinks(self) -> bool:
        """Whether query heads have a score each beside those of tokens."""
        return ARCHITECTURES[self.architecture].has_sinks

    @property
    def has_all_biases(self) -> bool:
        """Whether attention's output, router and experts have biases as well."""
        return ARCHITECTURES[self.architecture].has_all_biases

    @property
    def activation(self) -> Activation:
        """The name of what gates the MLP."""
        return ARCHITECTURES[self.architecture].activation

    @property
    def norms_begin_at_one(self) -> bool:
        """Whether weights of norms are what is stored and 1, which 16 bits would not hold."""
        return ARCHITECTURES[self.architecture].norms_begin_at_one

    @property
    def num_turning(self) -> int:
        """How many elements of a head turn."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; that of all value heads is the same."""
        return self.num_kv_heads * self.head_dim


def faults_of(spec: ModelSpec) -> list[str]:
    """Return everything that makes these numbers no model, one line each; empty if sound."""
    limits = {
        "vocab_size": MAX_VOCAB_SIZE,
        "num_layers": MAX_LAYERS,
        "num_heads": 1 << 16,
        "num_kv_heads": 1 << 16,
        "head_dim": 1 << 12,
        "hidden_size": 1 << 20,
        "intermediate_size": 1 << 24,
        "context_length": MAX_CONTEXT_LENGTH,
    }
    faults = []
    for field, maximum in limits.items():
        value = getattr(spec, field)
        if not 1 <= value <= maximum:
            faults.append(f"{field} must be 1 to {maximum}, got {value}")
    if spec.head_dim % 2:
        faults.append(f"head_dim must be even for rotary positions, got {spec.head_dim}")
    turning = spec.rotary_dim
    if turning is not None and (turning % 2 or not 2 <= turning <= spec.head_dim):
        faults.append(
            f"rotary positions must turn an even number of elements, 2 to head_dim "
            f"({spec.head_dim}), got {turning}"
        )
    if spec.num_kv_heads >= 1 and spec.num_heads % spec.num_kv_heads:
        faults.append(
            f"num_heads must be a multiple of num_kv_heads, "
            f"got {spec.num_heads} and {spec.num_kv_heads}"
        )
    for name in ("rope_theta", "local_rope_theta"):
        theta = getattr(spec, name)
        if theta is not None and not (math.isfinite(theta) and theta >= 1):
            faults.append(f"{name} must be finite and at least 1, got {theta}")
    if not 0 < spec.rms_norm_eps < 1:
        faults.append(f"rms_norm_eps must be between 0 and 1, got {spec.rms_norm_eps}")
    if spec.mixture is not None and (spec.has_output_norms or spec.activation == "gelu"):
        faults.append(f"mixtures of experts are not computed in {spec.architecture} models")
    return faults + _scaling_faults(spec)


_SCALING_NUMBERS: Final = {
    **dict.fromkeys(
        ("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor",
         "high_freq_factor"),
        LEAST_SCALING,
    ),
    "query_growth": 0.0,
}  # fmt: skip
"""Numbers of scalings, by the least that they may be."""


def _divisor_faults(divisors: tuple[float, ...], num_pairs: int) -> list[str]:
    """Return what is wrong with the divisors of a head's frequencies."""
    if len(divisors) != num_pairs:
        return [
            f"RoPE scaling needs a divisor for each of {num_pairs} pairs of a head, "
            f"got {len(divisors)}"
        ]
    wrong = [divisor for divisor in divisors if not (math.isfinite(divisor) and divisor > 0)]
    return [f"RoPE divisors must be positive and finite, got {wrong[0]}"] if wrong else []


def _scaling_faults(spec: ModelSpec) -> list[str]:
    """Return what is wrong with the RoPE scaling."""
    scaling = spec.rope_scaling
    if scaling is None:
        return []
    if isinstance(scaling, FrequencyDivisors | LongRopeScaling):
        faults = _divisor_faults(scaling.divisors, spec.num_turning // 2)
        if isinstance(scaling, LongRopeScaling) and scaling.long is not None and not faults:
            faults = _divisor_faults(scaling.long.divisors, spec.num_turning // 2)
        if faults or isinstance(scaling, FrequencyDivisors):
            return faults
    for name, least in _SCALING_NUMBERS.items():
        value = getattr(scaling, name, 1.0)
        if not least <= value <= MOST_SCALING:
            return [f"RoPE {name} must be {least:g} to {MOST_SCALING:g}, got {value}"]
    if isinstance(scaling, LinearScaling):
        return []
    if not 1 <= scaling.original_context_length <= MAX_CONTEXT_LENGTH:
        return [
            f"RoPE original_max_position_embeddings must be 1 to {MAX_CONTEXT_LENGTH}, "
            f"got {scaling.original_context_length}"
        ]
    if isinstance(scaling, Llama3Scaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
        return [
            f"RoPE low_freq_factor must be below high_freq_factor, "
            f"got {scaling.low_freq_factor} and {scaling.high_freq_factor}"
        ]
    if isinstance(scaling, YarnScaling) and scaling.beta_slow >= scaling.beta_fast:
        return [
            f"RoPE beta_slow must be below beta_fast, "
            f"got {scaling.beta_slow} and {scaling.beta_fast}"
        ]
    if isinstance(scaling, YarnScaling) and spec.rope_theta == 1:
        return ["rope_theta must be more than 1 for RoPE scaling yarn"]
    return []
