"""The operations of a CUDA device: each a launch of a kernel of `kernels.cuda`, or several.

What is quantised has its own file, `quantized_kernels`, and so have what reads and writes the pool,
`attention_kernels`, what goes through states, `recurrence_kernels`, and the logits,
`logits_kernels`.

What a kernel needs beside its tensors is made here: strides, grids, scratch memory. Scratch comes
from torch's allocator at every call; in a captured graph it is the graph's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from compute_plane.cuda.attention_kernels import AttentionKernels
from compute_plane.cuda.dense_kernels import DenseKernels, num_product_parts
from compute_plane.cuda.expert_kernels import NO_EXPERTS, ExpertKernels
from compute_plane.cuda.latent_kernels import LatentKernels
from compute_plane.cuda.layer_input_kernels import LayerInputKernels
from compute_plane.cuda.logits_kernels import LogitsKernels
from compute_plane.cuda.matrices import QuantizedMatrix
from compute_plane.cuda.operands import (
    AdjustColumns,
    Around,
    LogprobColumns,
    LogprobOutputs,
    SamplingColumns,
)
from compute_plane.cuda.quantized_kernels import UNQUANTISED, QuantizedKernels
from compute_plane.cuda.recurrence_kernels import RecurrenceKernels
from compute_plane.errors import DeviceUnavailableError
from kernels.cuda.copy_blocks import CopyBlocksVariant
from kernels.cuda.embedding import EmbeddingVariant
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.fetched_weights import NOTHING, FetchPlan
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.quantized_kv import POOL_DTYPES
from kernels.cuda.relu2 import Relu2Variant
from kernels.cuda.rms_norm import PARTS, RmsNormVariant
from kernels.cuda.weight_search import MAX_VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable

    from compute_plane.cuda.experts import ExpertUses
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.cuda.matrices import Matrix
    from compute_plane.cuda.next_product import NextProduct
    from compute_plane.cuda.weight_plan import QuantizedUses
    from compute_plane.model.spec import ModelSpec
    from kernels.cuda.variant import Variant

WORD_BYTES: Final = 4


class KernelOperations:
    """`DeviceOperations` by kernels, for one model and one block size.

    `dtype`: of a step, by name. `quantized`: what weights stay quantised; `has_dense`: whether any
    do not that rows are multiplied with; `experts`: how experts lie. `pool_dtype`: of keys and
    values, by name; None: that of a step. All kernels are built and loaded here. Raises
    DeviceUnavailableError for a shape or format that they are not written for.
    """

    name = "kernels"

    def __init__(
        self,
        launcher: Launcher,
        spec: ModelSpec,
        dtype: str,
        block_size: int,
        quantized: QuantizedUses = UNQUANTISED,
        pool_dtype: str | None = None,
        *,
        has_dense: bool = True,
        experts: ExpertUses = NO_EXPERTS,
    ) -> None:
        self._launcher = launcher
        kv_dtype = None if pool_dtype == dtype else pool_dtype
        if (dtype, kv_dtype) not in POOL_DTYPES:
            beside = ", ".join(own for own, other in POOL_DTYPES if other == kv_dtype)
            raise DeviceUnavailableError(
                f"kv_cache_dtype: the kernels read {kv_dtype} in steps of --dtype "
                f"{beside or 'none'} only, got {dtype}",
                field="kv_cache_dtype",
            )
        try:
            self._embedding = EmbeddingVariant(dtype)
            self._embedding.grid(1, spec.hidden_size)  # refuses the sizes that kernels do not take
            self._gate = {}
            if spec.gates_mlps:
                ways = (False, True) if quantized.gates else (False,)
                self._gate = {way: GateMulVariant(dtype, way, spec.activation) for way in ways}
            self._relu2 = None if spec.gates_mlps else Relu2Variant(dtype)
            between = self._gate[False] if self._relu2 is None else self._relu2
            for size in spec.mlp_sizes:
                between.grid(1, size)
            has_float32_norms = spec.norms_need_float32 and dtype != "float32"
            of_norms = {"has_float32_weights": has_float32_norms}
            self._norm = RmsNormVariant(dtype, spec.hidden_size, adds_residual=False, **of_norms)
            of_norms |= {"norms_added": spec.has_output_norms, "scales_sums": spec.scales_layers}
            # By the parts that rows to be added come in.
            self._add_norms = {
                num_parts: RmsNormVariant(dtype, spec.hidden_size, num_parts=num_parts, **of_norms)
                for num_parts in ((0,) if dtype == "float32" else (0, *PARTS))
            }
            shape = launcher, spec, dtype, block_size, kv_dtype
            self._attention: AttentionKernels | LatentKernels
            if spec.latents is None:
                self._attention = of_heads = AttentionKernels(*shape)
                self.rope_write_kv = of_heads.rope_write_kv
                self.attention_decode = of_heads.attention_decode
                self.attention_prefill = of_heads.attention_prefill
            else:
                self._attention = self.latents = LatentKernels(*shape)
            self._recurrence = RecurrenceKernels(launcher, spec, dtype)
            self._inputs = LayerInputKernels(launcher, spec, dtype)
            gate = spec.activation if spec.gates_mlps and spec.common_mlp_sizes else None
            self._quantized = QuantizedKernels(launcher, dtype, quantized, gate)
            self._dense = DenseKernels(launcher, spec, dtype, is_dense=has_dense)
            self.experts = ExpertKernels(launcher, spec, dtype, experts)
            if spec.vocab_size > MAX_VOCAB:
                raise UnsupportedVariantError("vocab_size", f"at most {MAX_VOCAB}", spec.vocab_size)
        except UnsupportedVariantError as error:
            raise DeviceUnavailableError(
                f"device: the kernels do not take this model: {error}", field=error.field
            ) from error
        self._copy = CopyBlocksVariant()
        self._logits = LogitsKernels(launcher, has_cap=spec.logits_cap is not None)
        self.cap_logits = self._logits.cap_logits
        self.add_normed_parts = self._inputs.add_normed_parts
        self.gate_apart = self._inputs.gate_apart
        self.gate_attended = self._recurrence.gate_attended
        self.delta_net = self._recurrence.delta_net
        self.gated_convolution = self._recurrence.gated_convolution
        self.mamba2 = self._recurrence.mamba2
        launcher.prepare(self.variants)

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        squares = [] if self._relu2 is None else [self._relu2]
        return [
            self._embedding, *self._gate.values(), *squares, self._norm, *self._add_norms.values(),
            *self._attention.variants, *self._recurrence.variants, self._copy,
            *self._logits.variants, *self._quantized.variants, *self._dense.variants,
            *self.experts.variants, *self._inputs.variants,
        ]  # fmt: skip

    @property
    def tile_tokens(self) -> tuple[int, ...]:
        """Query tokens of a prefill tile, by kind of heads."""
        return self._attention.tile_tokens

    def decode_scratch_bytes(self, num_rows: int, longest: int) -> int:
        """Count the partial results of rows that are split."""
        return WORD_BYTES * self._attention.most_partials(num_rows, longest)

    # --- the layers ---

    def embedding(self, out: Tensor, table: Matrix, token_ids: Tensor) -> None:
        """Copy rows of a table, or unpack them."""
        if isinstance(table, QuantizedMatrix):
            self._quantized.unpack_rows(out, table, token_ids)
            return
        num_tokens, hidden_size = out.shape
        grid = self._embedding.grid(num_tokens, hidden_size)
        self._launcher.launch(self._embedding, grid, out, table.values, token_ids, hidden_size)

    def quantized_matmul(
        self,
        out: Tensor,
        x: Tensor,
        matrix: QuantizedMatrix,
        first_column: int,
        bias: Tensor | None = None,
    ) -> None:
        """Multiply with weights as they are, or with unpacked ones, by the number of rows."""
        self._quantized.matmul(out, x, matrix, first_column, bias)

    def takes_gate(self, num_rows: int, matrix: QuantizedMatrix) -> bool:
        """Whether rows are few enough."""
        return self._quantized.takes_gate(num_rows, matrix)

    def quantized_gate(self, out: Tensor, x: Tensor, matrix: QuantizedMatrix) -> None:
        """Multiply few rows and gate what that gives."""
        self._quantized.gate(out, x, matrix)

    def normalises_product(self, weight: Tensor) -> bool:
        """Whether the step's dtype has room for x · weight, and it pays."""
        return self._dense.normalises(weight)

    def takes_product(self, num_rows: int, weight: Tensor) -> bool:
        """Whether rows are few enough."""
        return self._dense.takes(num_rows, weight)

    def dense_matmul(self, out: Tensor, x: Tensor, weight: Tensor, around: Around) -> None:
        """Multiply few rows with weights as they are."""
        self._dense.matmul(out, x, weight, around)

    def num_product_parts(self, num_rows: int, weight: Tensor) -> int:
        """By how few outputs there are for so many multiprocessors (`dense_kernels`)."""
        if weight.dtype == torch.float32:
            return 1
        num_outputs, num_inputs = weight.shape
        place = self._launcher.num_multiprocessors
        return num_product_parts(num_rows, num_outputs, num_inputs, place)

    def rms_norm(
        self, out: Tensor, x: Tensor, weight: Tensor, eps: float, then: NextProduct | None = None
    ) -> None:
        """Normalise rows; this variant does not touch its residual."""
        fetched, following = self._fetched(then, out)
        grid = self._norm.grid(len(out), fetched)
        self._launcher.launch(self._norm, grid, out, x, x, weight, weight, eps, 1.0, *following)

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
        """Add and normalise rows; a variant does not touch what it has not."""
        variant = self._add_norms[0 if x.dim() == residual.dim() else len(x)]
        weights = weight, weight if added_weight is None else added_weight
        fetched, following = self._fetched(then, out)
        grid = variant.grid(len(out), fetched)
        self._launcher.launch(variant, grid, out, residual, x, *weights, eps, factor, *following)

    def gate_mul(
        self,
        out: Tensor,
        gate_up: Tensor,
        *,
        in_turns: bool = False,
        then: NextProduct | None = None,
    ) -> None:
        """Gate."""
        num_tokens, num_features = out.shape
        variant = self._gate[in_turns]
        fetched, following = self._fetched(then, out)
        grid = variant.grid(num_tokens, num_features, fetched)
        self._launcher.launch(variant, grid, out, gate_up, num_features, *following)

    def relu2(self, values: Tensor, then: NextProduct | None = None) -> None:
        """Square what is above zero."""
        assert self._relu2 is not None
        fetched, following = self._fetched(then, values)
        num_tokens, num_features = values.shape
        grid = self._relu2.grid(num_tokens, num_features, fetched)
        self._launcher.launch(self._relu2, grid, values, num_features, *following)

    def _fetched(
        self, then: NextProduct | None, out: Tensor
    ) -> tuple[FetchPlan, tuple[Tensor | int, ...]]:
        """Return what is fetched beside the rows of `out`, and the arguments that say so."""
        if then is not None and self._launcher.fetches_ahead:
            plan = then.fetch_plan(len(out))
            if plan.num_chunks:
                return plan, (then.weight, *plan.arguments)
        return NOTHING, (out, *NOTHING.arguments)

    def copy_blocks(self, target: Tensor, source: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks, as words."""
        words = target.stride(0) * target.element_size() // WORD_BYTES
        grid = self._copy.grid(len(pairs), words)
        self._launcher.launch(self._copy, grid, target, source, pairs, words)

    # --- logits ---

    def adjust_logits(self, out: Tensor, logits: Tensor, columns: AdjustColumns) -> None:
        """Apply bias and penalties."""
        self._logits.adjust_logits(out, logits, columns)

    def sample(
        self, out: Tensor, is_finite: Tensor, logits: Tensor, columns: SamplingColumns
    ) -> None:
        """Draw."""
        self._logits.sample(out, is_finite, logits, columns)

    def logprobs(self, out: LogprobOutputs, logits: Tensor, columns: LogprobColumns) -> None:
        """Write log-probabilities."""
        self._logits.logprobs(out, logits, columns)

    def repeated(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the launches."""
        return self._launcher.record(work)
