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
size, M table width, E hidden size, F feed-forward size, K samples, R rows of logits, V vocabulary;
those of layers with states are those of `kernels.reference`, kind by kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from compute_plane.cuda.operands import PLAIN, UNCHANGED

if TYPE_CHECKING:
    from collections.abc import Callable

    from compute_plane.cuda.expert_operations import ExpertOperations
    from compute_plane.cuda.latent_operations import LatentOperations
    from compute_plane.cuda.matrices import Matrix, QuantizedMatrix
    from compute_plane.cuda.next_product import NextProduct
    from compute_plane.cuda.operands import (
        AdjustColumns,
        Around,
        HeadChanges,
        LayerAttention,
        LayerConvolution,
        LayerDeltaNet,
        LayerMamba2,
        LogprobColumns,
        LogprobOutputs,
        PrefillRows,
        SamplingColumns,
        StateRows,
    )


class DeviceOperations(Protocol):
    """The operations of one device. Called by one thread, the device thread.

    What gates is the activation of the model that they were made for.
    """

    @property
    def name(self) -> str:
        """The word for this set of operations in a numerics id."""
        ...

    @property
    def tile_tokens(self) -> tuple[int, ...]:
        """Query tokens of a row that prefill attention takes together, by kind of heads.

        In the order of `ModelSpec.kinds_of_heads`.
        """
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

    @property
    def latents(self) -> LatentOperations:
        """Those for attention over latents; used of models that have them alone."""
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
        factor: float = 1.0,
    ) -> None:
        """Add `x` to `residual`, rounded to its dtype, and normalise the sum into `out`.

        With `added_weight` [E] what is added is `x` normalised, with the same `eps`; then it has
        one in all calls of a model, or in none. `factor`: what the sum is multiplied by before it
        is rounded; 1 in models that scale no layer.

        All [T, E], three different arrays; `weight`: [E]. `x` may be parts of the number to be
        added, float32 [P, T, E], with any P that `num_product_parts` says.
        """
        ...

    def add_normed_parts(
        self, sums: Tensor, x: Tensor, weight: Tensor, eps: float, factor: float
    ) -> None:
        """Add `x` to `sums`, each part of a row normalised by itself, and multiply by `factor`.

        Of inputs of layers (`layer_inputs`). Both [T, L·P]; `weight`: [P], of each part.
        """
        ...

    def gate_apart(self, out: Tensor, gates: Tensor, ups: Tensor, first_column: int) -> None:
        """Write activation(gates) · columns of `ups` from `first_column` on.

        Of inputs of layers. `out`, `gates`: [T, P]. `ups`: [T, L·P].
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

        `out`: [T, H, D]. `pool`: the part of blocks that this kind of heads has (`block_pools`).
        `qkv`: [T, (H + 2·G)·D]: H query heads, G key heads, G value heads of each token, G maybe 0;
        then nothing is written to the pool. `angles`: cosines and sines, [positions, D/2] each.
        `positions`: int32 [T]. `kv_slots`: int64 [T], block · B + offset; a negative one writes
        nothing to the pool. All heads with `changes`; where norms are joint, what is in `qkv` may
        be changed.
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

    def decode_scratch_bytes(self, num_rows: int, longest: int) -> int:
        """Return how much scratch memory the model's decode attention takes, at most.

        Of up to so many rows, none of which is longer than `longest`.
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

    def gate_attended(self, attended: Tensor, gates: Tensor) -> None:
        """Multiply what attention gave by the sigmoids of its gates; both [T, H·D]."""
        ...

    def delta_net(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerDeltaNet,
    ) -> None:
        """Bring the tokens of rows through their states; `kernels.reference.delta_net`.

        `out`: [T, Hv·Dv]; of a token that is in no row nothing is written. `states`: as in
        `state_pool`; those of `rows` go on in the part of a layer, by its number among those with
        states. `inputs`: [T, C + Hv·Dv + 2·Hv], q, k, v before the convolution, z, b, a.
        """
        ...

    def gated_convolution(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerConvolution,
    ) -> None:
        """Bring the tokens of rows through their states; `kernels.reference.gated_convolution`.

        `out`: [T, C]; `inputs`: [T, 3·C], b, c, x. The others: as for `delta_net`.
        """
        ...

    def mamba2(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerMamba2,
    ) -> None:
        """Bring the tokens of rows through their states; `kernels.reference.mamba2`.

        `out`: [T, H·P]; `inputs`: [T, C + H·P + H], x, b, c before the convolution, z, d. The
        others: as for `delta_net`.
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

    def relu2(self, values: Tensor, then: NextProduct | None = None) -> None:
        """Write relu(x)² where x is, `values` [T, F]; of models whose MLPs have no gate."""
        ...

    def copy_blocks(self, target: Tensor, source: Tensor, pairs: Tensor) -> None:
        """Copy block pairs[p, 0] of `source` to block pairs[p, 1] of `target`, bit for bit.

        Both [N, …], contiguous; they may be the same pool if no block is both read and written.
        `pairs`: int32 [P, 2]; the copies happen in no order. A negative source copies nothing.
        """
        ...

    def cap_logits(self, logits: Tensor, cap: float) -> None:
        """Make of each logit x cap · tanh(x / cap), where it is, and NaN of what is not finite.

        `logits`: [R, V].
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
