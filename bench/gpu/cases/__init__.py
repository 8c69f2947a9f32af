"""What to run each kernel on: one module an operation, and `draw_cases` for a variant of any.

block_pool          a pool with scattered, shared and poisoned blocks
attention_decode    decode attention, and the merge of its splits
attention_prefill   prefill attention; of heads of 512 elements both, too
rope_write_kv       rotation and the write of K and V
latent_write        the same of latents
latent_attention    attention over them, decode and prompts
row_operations      norms, gates, embedding, block copies
sampling            choosing tokens
dense_matmul        products with dense weights, normalised before, added or gated after
quantized_matmul    products with quantised weights, and their rows unpacked
experts             mixtures: router logits, choosing, adding up
expert_products     and their products
delta_net           layers of Gated DeltaNet
gated_convolution   layers with a gated convolution
mamba2              layers of Mamba-2
state_rows          rows of a step that go on from states
logits              log-probabilities; bias and penalties; caps
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.gpu.case import Case
from bench.gpu.cases import (
    attention_decode,
    attention_prefill,
    delta_net,
    dense_matmul,
    expert_products,
    experts,
    gated_convolution,
    latent_attention,
    latent_write,
    logits,
    mamba2,
    quantized_matmul,
    rope_write_kv,
    row_operations,
    sampling,
)
from kernels.cuda.add_experts import AddExpertsVariant
from kernels.cuda.adjust_logits import AdjustLogitsVariant
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_wide import WideDecodeVariant, WidePrefillVariant
from kernels.cuda.cap_logits import CapLogitsVariant
from kernels.cuda.copy_blocks import CopyBlocksVariant
from kernels.cuda.delta_rule import DeltaRuleVariant
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.embedding import EmbeddingVariant
from kernels.cuda.gate_apart import GateApartVariant
from kernels.cuda.gate_attended import GateAttendedVariant
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.gated_convolution import GatedConvolutionVariant
from kernels.cuda.gated_norm import GatedNormVariant
from kernels.cuda.gated_row_norm import GatedRowNormVariant
from kernels.cuda.joint_norms import JointNormsVariant
from kernels.cuda.largest_logits import LargestLogitsVariant
from kernels.cuda.latent_attention import LatentDecodeVariant, LatentPrefillVariant
from kernels.cuda.latent_write import LatentWriteVariant
from kernels.cuda.logprob_sums import LogprobSumsVariant
from kernels.cuda.logprobs import LogprobsVariant
from kernels.cuda.mamba2_inputs import Mamba2InputsVariant
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.quantized_rows import QuantizedRowsVariant
from kernels.cuda.relu2 import Relu2Variant
from kernels.cuda.rms_norm import RmsNormVariant
from kernels.cuda.rope_write_kv import RopeWriteKvVariant
from kernels.cuda.route_experts import RouteExpertsVariant
from kernels.cuda.router_logits import RouterLogitsVariant
from kernels.cuda.sampling import SamplingVariant
from kernels.cuda.sampling_shortlist import SamplingShortlistVariant
from kernels.cuda.sampling_weights import SamplingWeightsVariant
from kernels.cuda.selective_scan import SelectiveScanVariant
from kernels.cuda.short_convolution import ShortConvolutionVariant
from kernels.cuda.variant import Variant


def _dense_products(variant: DenseMatmulVariant, seed: int) -> list[Case]:
    of = expert_products.draw_dense_experts if variant.of_experts else dense_matmul.draw_cases
    return of(variant, seed)


def _quantized_products(variant: QuantizedMatmulVariant, seed: int) -> list[Case]:
    if variant.of_experts:
        return expert_products.draw_quantized_experts(variant, seed)
    return quantized_matmul.draw_cases(variant, seed)


# Class of a variant → what draws the cases it is checked on.
_DRAWERS: dict[type, Callable[[Any, int], list[Case]]] = {
    DecodeVariant: attention_decode.draw_cases,
    PrefillVariant: attention_prefill.draw_cases,
    WideDecodeVariant: attention_decode.draw_cases,
    WidePrefillVariant: attention_prefill.draw_cases,
    AddExpertsVariant: experts.draw_add_experts,
    AdjustLogitsVariant: logits.draw_adjust_logits,
    CapLogitsVariant: logits.draw_cap_logits,
    CopyBlocksVariant: row_operations.draw_copy_blocks,
    DeltaRuleVariant: delta_net.draw_delta_rule,
    DenseMatmulVariant: _dense_products,
    EmbeddingVariant: row_operations.draw_embedding,
    GateApartVariant: row_operations.draw_gate_apart,
    GateAttendedVariant: row_operations.draw_gate_attended,
    GatedConvolutionVariant: gated_convolution.draw_cases,
    GatedNormVariant: row_operations.draw_gated_norm,
    JointNormsVariant: row_operations.draw_joint_norms,
    GatedRowNormVariant: mamba2.draw_row_norm,
    LargestLogitsVariant: sampling.draw_cases_of_a_launch,
    LatentDecodeVariant: latent_attention.draw_decode_cases,
    LatentPrefillVariant: latent_attention.draw_prefill_cases,
    LatentWriteVariant: latent_write.draw_cases,
    LogprobSumsVariant: logits.draw_logprob_sums,
    LogprobsVariant: logits.draw_logprobs,
    Mamba2InputsVariant: mamba2.draw_inputs,
    QuantizedMatmulVariant: _quantized_products,
    QuantizedRowsVariant: quantized_matmul.draw_rows,
    RmsNormVariant: row_operations.draw_rms_norm,
    RopeWriteKvVariant: rope_write_kv.draw_cases,
    RouteExpertsVariant: experts.draw_route_experts,
    RouterLogitsVariant: experts.draw_router_logits,
    SamplingShortlistVariant: sampling.draw_cases_of_a_launch,
    SamplingVariant: sampling.draw_cases,
    SamplingWeightsVariant: sampling.draw_cases_of_a_launch,
    SelectiveScanVariant: mamba2.draw_scan,
    ShortConvolutionVariant: delta_net.draw_short_convolution,
    GateMulVariant: row_operations.draw_gate_mul,
    Relu2Variant: row_operations.draw_relu2,
}


def draw_cases(variant: object, *, seed: int = 0) -> list[Case]:
    """Return the cases a variant of any operation is checked on."""
    return _DRAWERS[type(variant)](variant, seed)


def with_launched(variants: Iterable[Variant]) -> list[Variant]:
    """Return variants and the others that their cases launch besides, each once.

    Of operations whose every launch is a variant of the spread nothing is added.
    """
    return list(dict.fromkeys(one for variant in variants for one in _launched(variant)))


def _launched(variant: Variant) -> Iterator[Variant]:
    yield variant
    if isinstance(variant, QuantizedMatmulVariant | DenseMatmulVariant) and variant.of_experts:
        yield expert_products.pair_alone(variant)
    elif isinstance(variant, QuantizedMatmulVariant):
        yield quantized_matmul.of_few_rows(variant)
    elif isinstance(variant, DenseMatmulVariant):
        yield dense_matmul.of_few_rows(variant)
    elif isinstance(variant, RouterLogitsVariant):
        yield experts.token_alone(variant)
    elif isinstance(variant, DeltaRuleVariant):
        yield delta_net.convolution_of(variant)
        norm = delta_net.norm_of(variant)
        if norm is not None:
            yield norm
