"""The operations of tables and of thread teams: named, and none of their modules imported yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kernels.cpu.float_packing import FLOAT_TYPES
from kernels.cpu.int8_packing import INT8_FORMATS
from kernels.cpu.kv_layout import VALUE_BYTES
from kernels.cpu.operation import Operation, operation_named

lead_step: Final = operation_named("step.lead_step")
dismiss: Final = operation_named("step.dismiss")
work: Final = operation_named("step.work")

rope_angles: Final = operation_named("rope_write.rope_angles")
joint_norms: Final = operation_named("joint_norms.joint_norms")
merge_attention: Final = operation_named("attention.merge_attention")
take_rows: Final = operation_named("taken_rows.take_rows")
cap_logits: Final = operation_named("capped_logits.cap_logits")
sample: Final = operation_named("sampling.sample")

normed_rows: Final = operation_named("row_inputs.normed_rows")
sampled_rows: Final = operation_named("row_inputs.sampled_rows")
gated_rows: Final = operation_named("row_inputs.gated_rows")
gelu_rows: Final = operation_named("row_inputs.gelu_rows")
gelu_rows_apart: Final = operation_named("row_inputs.gelu_rows_apart")
relu2_rows: Final = operation_named("row_inputs.relu2_rows")
grouped_rows: Final = operation_named("row_inputs.grouped_rows")
clamped_rows: Final = operation_named("row_inputs.clamped_rows")
plain_rows: Final = operation_named("row_inputs.plain_rows")
ordered_rows: Final = operation_named("row_inputs.ordered_rows")

route_tokens: Final = operation_named("routing.route_tokens")
group_by_expert: Final = operation_named("routing.group_by_expert")
rows_of_experts: Final = operation_named("routing.rows_of_experts")
add_experts: Final = operation_named("routing.add_experts")
add_shared: Final = operation_named("routing.add_shared")
expert_product: Final = operation_named("expert_product.expert_product")
adapter_sums: Final = operation_named("adapter_sums.adapter_sums")
add_bias: Final = operation_named("added_rows.add_bias")
add_normed_rows: Final = operation_named("normed_sums.add_normed_rows")
delta_net: Final = operation_named("delta_net.delta_net")
gated_convolution: Final = operation_named("gated_convolution.gated_convolution")
mamba2_inputs: Final = operation_named("mamba2.mamba2_inputs")
mamba2_scan: Final = operation_named("mamba2.mamba2_scan")
latent_queries: Final = operation_named("latent_write.latent_queries")
rows_of_heads: Final = operation_named("head_products.rows_of_heads")
products_of_heads: Final = operation_named("head_products.products_of_heads")
gate_attended: Final = operation_named("delta_net.gate_attended")

ROPE_WRITE: Final[Mapping[str, Operation]] = {
    kind: operation_named(f"rope_write.rope_write_{kind}") for kind in VALUE_BYTES
}
"""The operation for each type of pool."""
LATENT_WRITE: Final[Mapping[str, Operation]] = {
    kind: operation_named(f"latent_write.latent_write_{kind}") for kind in VALUE_BYTES
}
"""The operation for each type of pool."""
ATTENTION: Final[Mapping[str, Operation]] = {
    kind: operation_named(f"attention.attention_{kind}") for kind in VALUE_BYTES
}
"""The operation for each type of pool."""
EMBEDDINGS: Final[Mapping[str, Operation]] = {
    label: operation_named(f"embedding.embedding_{label.lower()}")
    for label in (*FLOAT_TYPES, *INT8_FORMATS)
}
"""By the format's name in model files, like all below."""
FLOAT_PRODUCTS: Final[Mapping[str, Operation]] = {
    label: operation_named(f"float_products.product_{label.lower()}") for label in FLOAT_TYPES
}
"""Of rows of float32."""
product_bf16_rows: Final = operation_named("float_products.product_bf16_rows")
INT8_PRODUCTS: Final[Mapping[str, Operation]] = {
    label: operation_named(f"int8_products.product_{label.lower()}") for label in INT8_FORMATS
}
UNPACKED_PRODUCTS: Final[Mapping[str, Operation]] = {
    label: operation_named(f"float_products.product_{label.lower()}_unpacked")
    for label in INT8_FORMATS
}
"""For sets with AMX."""
GATED_PRODUCTS: Final[Mapping[str, Operation]] = {
    label: operation_named(f"float_products.gated_product_{label.lower()}")
    for label in ("BF16", *INT8_FORMATS)
}
"""For sets with AMX and 32·i columns."""
