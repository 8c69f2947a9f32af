"""What the operations of a device are given beside tensors of their own (`operations`).

Array letters are those of `compute_plane.cuda.operations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from compute_plane.model.delta_net import DeltaNet
    from compute_plane.model.mamba2 import Mamba2

MAX_LOGPROBS: Final = 20
"""Most likely tokens listed beside one: the width of the arrays they are written to."""
PADDING_SLOT: Final = -1
"""Stands for the slot of a token whose keys and values are not kept."""


class QueryTiles(NamedTuple):
    """Tiles of query tokens, int32 [tiles] each; `kernels.cuda.attention_tiles`."""

    rows: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of several query tokens, which are the last of each row's tokens.

    `block_tables`: int32 [S, M], read up to the block of the row's last token. `seq_lens`: int32
    [S]. `cu_query_lens`: int32 [S + 1], row s has the tokens cu_query_lens[s] to …[s + 1] − 1.
    `tiles`: the plan of the launch for each kind of heads, in tiles of its number of
    `DeviceOperations.tile_tokens`.
    """

    block_tables: Tensor
    seq_lens: Tensor
    cu_query_lens: Tensor
    tiles: tuple[QueryTiles, ...]


@dataclass(frozen=True, slots=True)
class HeadChanges:
    """What becomes of heads but for their rotation; `kernels.reference.rope`. None: nothing.

    `bias`: [(H + 2·G)·D]. `norms`: of query heads and of key heads, [D] each, the second None where
    a layer has no keys of its own; `eps`: of both. `are_joint`: heads are normalised together, and
    these are [H·D] and [G·D]. `norms_values`: value heads are normalised, too, without weights.
    `growth`: factors, float32 [n], of queries at positions from i · length on, and that length.
    Whether there are any is the same in all layers of a model.
    """

    bias: Tensor | None = None
    norms: tuple[Tensor, Tensor | None] | None = None
    eps: float = 0.0
    growth: tuple[Tensor, int] | None = None
    are_joint: bool = False
    norms_values: bool = False


UNCHANGED: Final = HeadChanges()


def num_kv_heads_of(qkv: Tensor, num_heads: int, head_dim: int) -> int:
    """Return G of [T, (H + 2·G)·D]; 0 of a layer that has no keys of its own."""
    return (int(qkv.shape[1]) // head_dim - num_heads) // 2


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What attention of a layer has of its own; `kernels.reference.paged_attention`. None: nothing.

    `window`: tokens that a query sees, the last ones up to its own, at least 1. `sinks`: float32
    [H], a score of each head that no token has; `cap`: of scaled scores; all layers of a model have
    them, or none.
    """

    window: int | None = None
    sinks: Tensor | None = None
    cap: float | None = None


PLAIN: Final = LayerAttention()


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which rows of a step go on from which states; `kernels.cuda.recurrent_states`.

    `rows`: int32 [R, 4], of each row its first token, how many there are, its state, and 1 if it
    begins with an empty one; a row without tokens is none. `token_rows`: int32 [T], the row of each
    token. `num_long`: how many rows may have more than one token; it decides about time only. If
    there are any, no token is in no row. Neither tensor is written by a kernel: both are read
    before the launch ahead has ended.
    """

    rows: Tensor
    token_rows: Tensor
    num_long: int


@dataclass(frozen=True, slots=True)
class LayerDeltaNet:
    """What a layer with Gated DeltaNet has of its own; `kernels.reference.delta_net`.

    `convolution`: float32 [K, C], the last row is of the token itself. `rates`, `time_bias`:
    float32 [Hv]. `norm`: float32 [Dv]; `eps`: of its RMSNorm. `sizes`: the same in all layers.
    """

    convolution: Tensor
    rates: Tensor
    time_bias: Tensor
    norm: Tensor
    eps: float
    sizes: DeltaNet


@dataclass(frozen=True, slots=True)
class LayerConvolution:
    """What a layer with a gated convolution has of its own.

    `weight`: float32 [K, C], the last row is of the token itself (`kernels.reference`).
    """

    weight: Tensor


@dataclass(frozen=True, slots=True)
class LayerMamba2:
    """What a layer with Mamba-2 has of its own; `kernels.reference.mamba2`. All float32.

    `convolution`: [K, C], the last row is of the token itself; `bias`: [C]. `rates`, `time_bias`,
    `skips`: [H]. `norm`: [H·P], None if there is none. `sizes`: the same in all layers.
    """

    convolution: Tensor
    bias: Tensor
    rates: Tensor
    time_bias: Tensor
    skips: Tensor
    norm: Tensor | None
    sizes: Mamba2


Writes: TypeAlias = Literal["rounded", "float32", "added", "gated"]
"""What becomes of a product; `kernels.cuda.dense_matmul`."""


@dataclass(frozen=True, slots=True)
class Around:
    """What a layer does before and after a product.

    `norm`: weights [K] of x's normalisation, with `eps`; None: x is multiplied as it is. `bias`:
    [N], of a product that is "added", in models that have one there.
    """

    norm: Tensor | None = None
    eps: float = 0.0
    writes: Writes = "rounded"
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdjustColumns:
    """Logit bias and penalties of K samples; `kernels.reference.logit_adjustments`.

    `logits_rows`: int32 [K]. `bias_starts`: int32 [K + 1], where each sample's biases begin in
    `bias_tokens` (int32) and `bias_values` (float32). `repetition_penalties`, `presence_penalties`,
    `frequency_penalties`: float32 [K]. A sample's history is history[history_starts[k] … +
    history_lengths[k] − 1], its first `num_prompts[k]` tokens of the prompt; `history_starts` is
    int64 [K], the others int32 [K]; the length is 0 where no penalty is on.
    """

    logits_rows: Tensor
    bias_starts: Tensor
    bias_tokens: Tensor
    bias_values: Tensor
    repetition_penalties: Tensor
    presence_penalties: Tensor
    frequency_penalties: Tensor
    history_starts: Tensor
    history_lengths: Tensor
    num_prompts: Tensor
    history: Tensor


@dataclass(frozen=True, slots=True)
class DrawNeeds:
    """What some of K samples need, as the host knows it: what nobody needs is not launched.

    `draws`: a temperature that is not 0. `cuts`: top-k or top-p besides.
    """

    draws: bool = True
    cuts: bool = True


EVERYTHING: Final = DrawNeeds()


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """How K tokens are drawn; `kernels.reference.sampling`.

    `logits_rows`: int32 [K], several samples may share a row. `inverse_temperatures`: float64 [K],
    `kernels.reference.sampling.inverse(temperature)`, 0 for greedy. `top_ks`: int32, 0 keeps all.
    `top_ps`, `min_ps`: float64. `seeds`: int64, the bits of an unsigned number. `sample_indexes`:
    int32. `positions`: int64. `needs`: what these need, or more.
    """

    logits_rows: Tensor
    inverse_temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    seeds: Tensor
    sample_indexes: Tensor
    positions: Tensor
    needs: DrawNeeds = EVERYTHING


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Whose log-probabilities are wanted, K of them; `kernels.reference.logprobs`.

    `logits_rows`, `tokens`: int32 [K]. `num_logprobs`: int32 [K], how many most likely tokens are
    listed, at most `MAX_LOGPROBS`; a negative number: nothing is written at all.
    """

    logits_rows: Tensor
    tokens: Tensor
    num_logprobs: Tensor


@dataclass(frozen=True, slots=True)
class LogprobOutputs:
    """`token_logprobs`: float32 [K]; `top_tokens` int32, `top_logprobs` float32 [K, MAX_LOGPROBS].

    Of the last two the first min(num_logprobs, V) of a sample are written. A row with a logit that
    is not finite gives NaN, and tokens 0.
    """

    token_logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
