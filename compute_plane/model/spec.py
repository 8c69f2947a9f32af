"""What a decoder is: its architecture and its numbers, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from compute_plane.model.architectures import ARCHITECTURES, Activation
from compute_plane.model.heads import Heads
from compute_plane.model.latents import Latents
from compute_plane.model.recurrence import Recurrence
from compute_plane.model.rope_scaling import LongRopeScaling, RopeScaling

if TYPE_CHECKING:
    from compute_plane.model.tensor_factors import TensorFactors

MAX_LAYERS = 4096
MAX_VOCAB_SIZE = 1 << 21
MAX_INTERMEDIATE_SIZE: Final = 1 << 24
MAX_EXPERTS: Final = 1024
MAX_EXPERTS_PER_TOKEN: Final = 64
MAX_WEIGHT_SCALE: Final = 1e6

Scores: TypeAlias = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts that layers have in place of one MLP (`compute_plane.model.mixture`).

    A token goes through `experts_per_token` of `num_experts`. `scores`: what the router's logits
    become. `normalises_weights`: weights are the chosen ones' scores over their sum, otherwise
    their scores; `weight_scale`: times this. `corrects_choice`: each expert has a number that its
    score has added where experts are chosen, and nowhere else. `shared_size`: width of an MLP that
    all tokens go through besides, 0: there is none; `gates_shared`: what it gives is multiplied by
    the sigmoid of a product of its own. `dense_layers`: how many layers, the first ones, have one
    MLP instead, `dense_size` wide. `num_groups`: as many runs of neighbours the experts are, and a
    token's lie in `groups_per_token` of them, those with the largest score, or where a correction
    is added with the largest sum of two. `has_own_norms`: what all tokens go through, the experts
    and the router have a norm each before them, the first two one behind them, too, and each expert
    a number that its weight is multiplied by (Gemma 4). `is_fused_in_gguf`: a GGUF file has gate
    and up of all experts in one tensor.
    """

    num_experts: int
    experts_per_token: int
    normalises_weights: bool = True
    scores: Scores = "softmax"
    weight_scale: float = 1.0
    corrects_choice: bool = False
    shared_size: int = 0
    gates_shared: bool = False
    dense_layers: int = 0
    dense_size: int = 0
    num_groups: int = 1
    groups_per_token: int = 1
    has_own_norms: bool = False
    is_fused_in_gguf: bool = False

    def faults(self) -> list[str]:
        """Return what makes these numbers no mixture, one line each; empty if sound."""
        faults = []
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            faults.append(f"num_experts must be 1 to {MAX_EXPERTS}, got {self.num_experts}")
        most = max(1, min(MAX_EXPERTS_PER_TOKEN, self.num_experts))
        if not 1 <= self.experts_per_token <= most:
            faults.append(f"experts_per_token must be 1 to {most}, got {self.experts_per_token}")
        if not 1 / MAX_WEIGHT_SCALE <= self.weight_scale <= MAX_WEIGHT_SCALE:
            faults.append(
                f"weight_scale must be {1 / MAX_WEIGHT_SCALE:g} to {MAX_WEIGHT_SCALE:g}, "
                f"got {self.weight_scale:g}"
            )
        if not 0 <= self.shared_size <= MAX_INTERMEDIATE_SIZE:
            faults.append(
                f"shared_size must be 0 to {MAX_INTERMEDIATE_SIZE}, got {self.shared_size}"
            )
        if self.has_own_norms and self.shared_size == 0:
            faults.append("a mixture with norms of its own has an MLP for all tokens, got none")
        if self.dense_layers and not 1 <= self.dense_size <= MAX_INTERMEDIATE_SIZE:
            faults.append(f"dense_size must be 1 to {MAX_INTERMEDIATE_SIZE}, got {self.dense_size}")
        return faults + self._faults_of_groups()

    def _faults_of_groups(self) -> list[str]:
        """Return why experts cannot lie in these groups; nothing of what other numbers are."""
        count, chosen = self.num_groups, self.groups_per_token
        if count < 1 or self.num_experts % count:
            return [f"num_groups must divide {self.num_experts} experts, got {count}"]
        size = self.num_experts // count
        if not 1 <= chosen <= count:
            return [f"groups_per_token must be 1 to {count}, got {chosen}"]
        if count == 1:
            return []
        faults = []
        if chosen * size < self.experts_per_token:
            faults.append(
                f"groups_per_token must be enough for {self.experts_per_token} experts, "
                f"got {chosen} groups of {size}"
            )
        if self.corrects_choice and size < 2:
            faults.append(
                f"num_groups must be at most {self.num_experts // 2}, for groups are chosen by "
                f"their two largest scores, got {count}"
            )
        return faults


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder.

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
    `layers_ahead`: how many layers the files have behind these, which predict further on and do not
    run. `recurrence`: what some layers have in place of attention, or beside it; None: there are no
    states. `factors`: what tensors are multiplied by when they are read.
    `layers_without_mixer`, `layers_without_mlp`: those that have one of the two alone.
    `global_heads`: those of `layers_with_global_heads`, where they differ from the others'.
    `layers_without_values`: in which values are what the product of keys gives. `kv_sources`: by
    layer, whose keys and values it attends to, its own or an earlier layer's; empty: all their own.
    `late_mlp_size`: width of the one MLP of layers that attend to an earlier layer's; None: as the
    others'. `layer_input_size`: how much of a second embedding each layer reads of a token; 0:
    there is none. `logits_cap`: c of logits that are c · tanh(x / c); None: they are x.
    `scores_cap`: that of scores, scaled; likewise.
    `latents`: what tokens leave in place of keys and values. Then there is one kv head, whose keys
    are the latents and what turns beside them, `head_dim` elements, and whose values are latents.
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
    lacks_head_norms: bool = False
    layers_ahead: int = 0
    recurrence: Recurrence | None = None
    factors: TensorFactors | None = None
    latents: Latents | None = None
    layers_without_mixer: frozenset[int] = frozenset()
    layers_without_mlp: frozenset[int] = frozenset()
    global_heads: Heads | None = None
    layers_with_global_heads: frozenset[int] = frozenset()
    layers_without_values: frozenset[int] = frozenset()
    kv_sources: tuple[int, ...] = ()
    late_mlp_size: int | None = None
    layer_input_size: int = 0
    logits_cap: float | None = None
    scores_cap: float | None = None

    @property
    def heads(self) -> Heads:
        """The heads of layers that are not said to have others."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    def heads_of(self, layer: int) -> Heads:
        """Return the heads of a layer."""
        own = self.global_heads
        return self.heads if own is None or layer not in self.layers_with_global_heads else own

    @property
    def kinds_of_heads(self) -> tuple[Heads, ...]:
        """The heads of all layers, each kind once."""
        return (self.heads,) if self.global_heads is None else (self.heads, self.global_heads)

    def kv_source_of(self, layer: int) -> int:
        """Return the layer to whose keys and values a layer attends."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def has_mixer(self, layer: int) -> bool:
        """Whether a layer has attention, a state in its place, or both."""
        return layer not in self.layers_without_mixer

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or a mixture of such."""
        return layer not in self.layers_without_mlp

    def recurrence_of(self, layer: int) -> Recurrence | None:
        """Return what a layer has in place of attention, or beside it; None: it attends alone."""
        of = self.recurrence
        return of if of is not None and layer in of.layers else None

    @property
    def attends_beside_states(self) -> bool:
        """Whether layers with a state have attention, too."""
        return ARCHITECTURES[self.architecture].attends_beside_states

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        if not self.has_mixer(layer):
            return False
        return self.attends_beside_states or self.recurrence_of(layer) is None

    @property
    def turns(self) -> bool:
        """Whether a head turns in any layer."""
        return not self.layers_without_rope.issuperset(self.attending_layers())

    def attending_layers(self, first_layer: int = 0) -> tuple[int, ...]:
        """Return the layers with attention from one on."""
        return tuple(filter(self.attends, range(first_layer, self.num_layers)))

    def layers_with_keys(self, first_layer: int = 0) -> tuple[int, ...]:
        """Return those of them that have keys and values of their own."""
        attending = self.attending_layers(first_layer)
        return tuple(layer for layer in attending if self.kv_source_of(layer) == layer)

    def layers_with_state(self, first_layer: int = 0) -> tuple[int, ...]:
        """Return those from one on that keep a state of each sequence."""
        layers = range(first_layer, self.num_layers)
        return tuple(layer for layer in layers if self.recurrence_of(layer) is not None)

    @property
    def gates_attention(self) -> bool:
        """Whether what attention gives is multiplied by the sigmoid of a product of its own."""
        return ARCHITECTURES[self.architecture].gates_attention

    def window_of(self, layer: int) -> int | None:
        """Return how many positions a token sees in a layer; None: all up to its own."""
        return self.window if layer in self.layers_with_window else None

    def mixture_of(self, layer: int) -> Mixture | None:
        """Return the mixture of a layer; None where it has one MLP."""
        mixture = self.mixture
        if mixture is None or layer < mixture.dense_layers or not self.has_mlp(layer):
            return None
        return mixture

    @property
    def mlp_size(self) -> int:
        """Width of the one MLP of layers that have one; 0: no layer has."""
        mixture = self.mixture
        if mixture is None:
            return self.intermediate_size
        return mixture.dense_size if mixture.dense_layers else 0

    @property
    def common_mlp_sizes(self) -> frozenset[int]:
        """Widths of the MLPs that all tokens of a step go through."""
        shared_size = 0 if self.mixture is None else self.mixture.shared_size
        return frozenset({self.mlp_size, self.late_mlp_size or 0, shared_size} - {0})

    def mlp_size_of(self, layer: int) -> int:
        """Return the width of a layer's one MLP, if it has one."""
        late = self.late_mlp_size
        return self.mlp_size if late is None or self.kv_source_of(layer) == layer else late

    @property
    def mlp_sizes(self) -> frozenset[int]:
        """Widths of all MLPs, experts among them."""
        return self.common_mlp_sizes | {self.intermediate_size}

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return ARCHITECTURES[self.architecture].has_qkv_bias and not self.lacks_qkv_bias

    @property
    def has_head_norms(self) -> bool:
        """Whether query and key heads are normalised before they are rotated."""
        return ARCHITECTURES[self.architecture].has_head_norms and not self.lacks_head_norms

    @property
    def norms_heads_together(self) -> bool:
        """Whether all query heads of a token are normalised as one row, and all its key heads."""
        together = ARCHITECTURES[self.architecture].norms_heads_together
        return together and self.has_head_norms

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
    def norms_values(self) -> bool:
        """Whether value heads are normalised, without weights."""
        return ARCHITECTURES[self.architecture].norms_values

    @property
    def scales_layers(self) -> bool:
        """Whether what a layer gives is multiplied by a number."""
        return ARCHITECTURES[self.architecture].scales_layers

    @property
    def activation(self) -> Activation:
        """The name of what gates the MLP."""
        return ARCHITECTURES[self.architecture].activation

    @property
    def gates_mlps(self) -> bool:
        """Whether MLPs have a gate."""
        return self.activation != "relu2"

    @property
    def norms_begin_at_one(self) -> bool:
        """Whether weights of norms are what is stored and 1."""
        return ARCHITECTURES[self.architecture].norms_begin_at_one

    @property
    def norms_need_float32(self) -> bool:
        """Whether 16 bits would round weights of norms, as they are computed with, once more.

        Always the same way in a channel, so it would not average out.
        """
        return self.norms_begin_at_one or self.factors is not None

    @property
    def way_of_turning(self) -> str:
        """What a numerics id says where the files of a model do not decide how positions turn."""
        scaling = self.rope_scaling
        is_long = isinstance(scaling, LongRopeScaling) and scaling.is_long
        return "/long-context" if is_long else ""

    @property
    def num_turning(self) -> int:
        """How many elements of a head turn."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads.query_size

    @property
    def attended_size(self) -> int:
        """Width of what all heads together give to the product behind attention."""
        latents = self.latents
        return self.query_size if latents is None else self.num_heads * latents.value_size

    @property
    def value_dim(self) -> int:
        """Elements of a value, as attention sees them."""
        return self.head_dim if self.latents is None else self.latents.rank

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; that of all value heads is the same."""
        return self.heads.kv_size
