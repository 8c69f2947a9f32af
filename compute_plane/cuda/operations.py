"""What a device computes for a step, apart from dense products: the border to its kernels.

The arrays are those of `kernels.cuda`, by the same names and layouts; what a kernel needs beside
them (scratch memory, strides, a plan of its grid) is the implementation's own affair. Whatever is
called `out` is written, nothing else is, and nothing is kept after the call. An implementation may
return before the device is done: work is queued on the current stream. `then`: what comes next.

    x, weights, outputs   the model's dtype: float32, bfloat16 or float16
    pool                  that dtype, or eight bits with scales (`block_pools`)
    logits, angles        float32
    ids, positions, rows  int32; slots of the pool and positions of samples int64

Array letters: T tokens, S rows, H query heads, G kv heads, D head size, N blocks, L layers, B block
size, M table width, E hidden size, F feed-forward size, K samples, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from compute_plane.cuda.expert_operations import ExpertOperations
    from compute_plane.cuda.matrices import Matrix, QuantizedMatrix
    from compute_plane.cuda.next_product import NextProduct

MAX_LOGPROBS: Final = 20
"""Most likely tokens listed beside one: the width of the arrays they are written to."""
PADDING_SLOT: Final = -1
"""Stands for the slot of a token whose keys and values are not kept."""


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of several query tokens, which are the last of each row's tokens.

    `block_tables`: int32 [S, M], read up to the block of the row's last token. `seq_lens`: int32
    [S]. `cu_query_lens`: int32 [S + 1], row s has the tokens cu_query_lens[s] to …[s + 1] − 1.
    `tile_rows`, `tile_tokens`: int32 [tiles], the plan of the launch in tiles of
    `DeviceOperations.tile_tokens` (`kernels.cuda.attention_tiles`).
    """

    block_tables: Tensor
    seq_lens: Tensor
    cu_query_lens: Tensor
    tile_rows: Tensor
    tile_tokens: Tensor


@dataclass(frozen=True, slots=True)
class HeadChanges:
    """What becomes of heads but for their rotation; `kernels.reference.rope`. None: nothing.

    `bias`: [(H + 2·G)·D]. `norms`: of query heads and of key heads, [D] each; `eps`: of both.
    `growth`: factors, float32 [n], of queries at positions from i · length on, and that length.
    Whether there are any is the same in all layers of a model.
    """

    bias: Tensor | None = None
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0
    growth: tuple[Tensor, int] | None = None


UNCHANGED: Final = HeadChanges()


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What attention of a layer has of its own; `kernels.reference.paged_attention`. None: nothing.

    `window`: tokens that a query sees, the last ones up to its own, at least 1. `sinks`: float32
    [H], a score of each head that no token has; all layers of a model have them, or none.
    """

    window: int | None = None
    sinks: Tensor | None = None


PLAIN: Final = LayerAttention()


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


class DeviceOperations(Protocol):
    """The operations of one device. Called by one thread, the device thread.

    What gates is the activation of the model that they were made for.
    """

    @property
    def name(self) -> str:
        """The word for this set of operations in a numerics id."""
        ...

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a row that prefill attention takes together."""
        ...

    def embedding(self, out: Tensor, table: Matrix, token_ids: Tensor) -> None:
        """Write row token_ids[t] of `table` [V, E] to out[t]; `out`: [T, E]."""
        ...

    def quantized_matmul(
        self,
        out: Tensor,
        x: Tensor,
        matrix: QuantizedMatrix,
        first_column: int,
        bias: Tensor | None = None,
    ) -> None:
        """Write x · Wᵀ to the columns of `out` from `first_column` on.

        `out`: [T, F], at least N columns from there, in x's dtype or float32. `x`: [T, K]. `bias`:
        [N], added; of matrices that the model has one for, and not to float32.
        """
        ...

    def takes_gate(self, num_rows: int, matrix: QuantizedMatrix) -> bool:
        """Whether `quantized_gate` takes so many rows with a matrix that has a gate in turns."""
        ...

    def quantized_gate(self, out: Tensor, x: Tensor, matrix: QuantizedMatrix) -> None:
        """Write activation(gate) · up of the products of rows x [T, K]; `out`: [T, N / 2].

        `matrix`: gate and up in turns.
        """
        ...

    def normalises_product(self, weight: Tensor) -> bool:
        """Whether `dense_matmul` normalises what it multiplies with a matrix [N, K]."""
        ...

    def takes_product(self, num_rows: int, weight: Tensor) -> bool:
        """Whether `dense_matmul` takes so many rows with a matrix [N, K] of the model."""
        ...

    def num_product_parts(self, num_rows: int, weight: Tensor) -> int:
        """Into how many parts the inputs of the library's product with a matrix [N, K] are split.

        Of a product that `add_rms_norm` adds; 1: it is left whole.
        """
        ...

    def dense_matmul(self, out: Tensor, x: Tensor, weight: Tensor, around: Around) -> None:
        """Write x · Wᵀ with what is `around` it; `x`: [T, K], `weight`: W [N, K] as it is stored.

        `out`: [T, N], float32 for "float32"; "added": the sum with what it has. "gated": [T, N/2],
        the activation of the first half of the columns times the second.
        """
        ...

    @property
    def experts(self) -> ExpertOperations:
        """Those for mixtures of experts."""
        ...

    def rms_norm(
        self, out: Tensor, x: Tensor, weight: Tensor, eps: float, then: NextProduct | None = None
    ) -> None:
        """Normalise the rows of `x` into `out`; both [T, E], `weight` [E]."""
        ...

    def add_rms_norm(
        self,
        out: Tensor,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
        eps: float,
        then: NextProduct | None = None,
        added_weight: Tensor | None = None,
    ) -> None:
        """Add `x` to `residual`, rounded to its dtype, and normalise the sum into `out`.

        With `added_weight` [E] what is added is `x` normalised, with the same `eps`; then it has
        one in all calls of a model, or in none.

        All [T, E], three different arrays; `weight`: [E]. `x` may be parts of the number to be
        added, float32 [P, T, E], with any P that `num_product_parts` says.
        """
        ...

    def rope_write_kv(
        self,
        out: Tensor,
        pool: Tensor,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        positions: Tensor,
        kv_slots: Tensor,
        changes: HeadChanges = UNCHANGED,
    ) -> None:
        """Rotate the queries into `out`; put rotated keys and plain values into a layer of `pool`.

        `out`: [T, H, D]. `pool`: blocks as in `block_pools`. `qkv`: [T, (H + 2·G)·D]: H query
        heads, G key heads, G value heads of each token. `angles`: cosines and sines,
        [positions, D/2] each. `positions`: int32 [T]. `kv_slots`: int64 [T], block · B + offset; a
        negative one writes nothing to the pool. All heads with `changes`.
        """
        ...

    def attention_decode(
        self,
        out: Tensor,
        query: Tensor,
        pool: Tensor,
        layer: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        longest: int,
        own: LayerAttention = PLAIN,
    ) -> None:
        """Attend with one query token a row to the row's seq_lens[s] tokens, itself the last.

        With a window to the last of them; no block before it is read.

        `out`, `query`: [S, H, D]. `block_tables`: int32 [S, M], read up to the block of the row's
        last token. `seq_lens`: int32 [S]; 0 gives zeros. `longest`: no row is longer; it decides
        about time only. The scale is 1 / √D.
        """
        ...

    def attention_prefill(
        self,
        out: Tensor,
        query: Tensor,
        pool: Tensor,
        layer: int,
        rows: PrefillRows,
        own: LayerAttention = PLAIN,
    ) -> None:
        """Attend with each query token to all tokens of its row up to itself, or of its window.

        `out`, `query`: [T, H, D], the tokens of `rows` one row after the other.
        """
        ...

    def gate_mul(
        self,
        out: Tensor,
        gate_up: Tensor,
        *,
        in_turns: bool = False,
        then: NextProduct | None = None,
    ) -> None:
        """Write activation(gate) · up; `out`: [T, F].

        `gate_up`: [T, 2·F], gate first, or in turns.
        """
        ...

    def copy_blocks(self, target: Tensor, source: Tensor, pairs: Tensor) -> None:
        """Copy block pairs[p, 0] of `source` to block pairs[p, 1] of `target`, bit for bit.

        Both [N, …], contiguous; they may be the same pool if no block is both read and written.
        `pairs`: int32 [P, 2]; the copies happen in no order. A negative source copies nothing.
        """
        ...

    def adjust_logits(self, out: Tensor, logits: Tensor, columns: AdjustColumns) -> None:
        """Write the adjusted logits of each sample; `out`: [K, V], `logits`: [R, V].

        What is not finite stays so, for `sample` to report.
        """
        ...

    def sample(
        self, out: Tensor, is_finite: Tensor, logits: Tensor, columns: SamplingColumns
    ) -> None:
        """Draw the token of each sample from its row of `logits` [R, V].

        `out`, `is_finite`: int32 [K]; both 0 where the row has a logit that is not finite.
        """
        ...

    def logprobs(self, out: LogprobOutputs, logits: Tensor, columns: LogprobColumns) -> None:
        """Write the log-probabilities of tokens under their rows of `logits` [R, V]."""
        ...

    def repeated(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work`, which calls `sample` and `logprobs` alone; return what does it again.

        On the same tensors, and at less cost to the host where there is something to save.
        """
        ...
