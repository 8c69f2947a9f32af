"""The records of mixtures of experts: what they need, what is refused, what is fetched ahead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute_plane.cpu.model_table import ModelTable
from compute_plane.cpu.packed_layers import PackedExperts
from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import TensorFormat
from kernels.cpu.attention_items import rows_per_item
from kernels.cpu.attention_sizes import attention_scratch_bytes
from kernels.cpu.int8_sizes import int8_scratch_bytes
from kernels.cpu.operation import FETCH, FETCH_BYTES
from kernels.cpu.routing_sizes import EXPERT_CALL_BYTES, routing_scratch_bytes
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_spec
from tests.compute_plane.executor.tiny_sources import ArraySource
from tests.compute_plane.executor.tiny_weights import tiny_weights

SPEC = replace(tiny_spec(quantisable=True), architecture="mixtral", mixture=Mixture(7, 3))
Q4_1, Q8_0 = TensorFormat.Q4_1, TensorFormat.Q8_0


def packed(spec: ModelSpec, formats: dict[str, TensorFormat], orders: dict[str, int] | None = None):
    return pack_weights(spec, ArraySource(spec, tiny_weights(spec), formats, orders))


def table_of(spec: ModelSpec, formats: dict[str, TensorFormat]):
    weights, pool = packed(spec, formats), pool_for(spec, 4, 16)
    return weights, ModelTable(spec, weights, pool, max_tokens=64)


def test_a_worker_has_room_for_the_call_of_an_expert_behind_what_its_product_takes() -> None:
    """Otherwise a product writes over its own record. So many inputs take more than attention."""
    wide = replace(SPEC, num_layers=1, intermediate_size=4096)
    group = wide.num_heads // wide.num_kv_heads
    of_attention = attention_scratch_bytes(wide.head_dim, wide.head_dim, rows_per_item(group))
    assert int8_scratch_bytes(wide.intermediate_size) > of_attention
    _, without = table_of(replace(wide, mixture=None), {"": Q4_1})
    _, table = table_of(wide, {"": Q4_1})
    assert table.scratch_bytes >= without.scratch_bytes + EXPERT_CALL_BYTES


def test_a_worker_has_room_for_the_logits_of_many_experts() -> None:
    spec = replace(SPEC, mixture=Mixture(1024, 1), num_layers=1, intermediate_size=32)
    _, table = table_of(spec, {})
    assert table.scratch_bytes >= routing_scratch_bytes(1024, spec.hidden_size) + EXPERT_CALL_BYTES


def test_no_expert_is_fetched_ahead_for_nobody_knows_which_will_be_read() -> None:
    weights, table = table_of(SPEC, {"": Q4_1})
    table.table.fetch_ahead()
    fetched = [(record[FETCH], record[FETCH_BYTES]) for record in table.table._records]
    assert all(size for _, size in fetched)
    for layer in weights.layers:
        part = layer.feedforward
        assert isinstance(part, PackedExperts)
        end = part.first.gate_up[0].address + 7 * part.stride_bytes
        assert not [at for at, _ in fetched if part.first.gate_up[0].address <= at < end]
        assert [at for at, _ in fetched if at == part.router.address]


def test_experts_lie_one_behind_the_other_in_the_same_form_and_routers_are_exact() -> None:
    weights = packed(SPEC, {"down": Q8_0, "": Q4_1})
    part = weights.layers[1].feedforward
    assert isinstance(part, PackedExperts)
    assert part.router.format == "F32"
    assert [matrix.format for matrix in part.first.matrices] == ["Q4_1", "Q8_0"]
    assert part.stride_bytes >= sum(matrix.num_bytes for matrix in part.first.matrices)
    for number in (0, 6):
        alike = weights.memory.ctypes.data, weights.memory.nbytes
        start = part.first.gate_up[0].address + number * part.stride_bytes - alike[0]
        run = weights.memory[start : start + part.first.gate_up[0].num_bytes]
        assert 0 < start < alike[1]
        assert np.unique(run).size > 50


@pytest.mark.parametrize(
    ("formats", "orders", "words"),
    [
        ({"experts.3.up_proj": Q8_0, "": Q4_1}, None, "must be stored in one format"),
        ({"experts.3.down_proj": Q8_0, "": Q4_1}, None, "must be stored in one format"),
        ({"": Q4_1}, {"experts.2.gate_proj": 1}, "act-order"),
    ],
)
def test_experts_that_are_not_alike_or_want_their_inputs_sorted_are_refused(
    formats: dict[str, TensorFormat], orders: dict[str, int] | None, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        packed(SPEC, formats, orders)


def test_outputs_of_gate_and_up_are_put_in_the_order_that_down_wants() -> None:
    """That is a matter of each expert's own rows, and no row is sorted in a step."""
    weights = packed(SPEC, {"": Q4_1}, {"experts.2.down_proj": 1})
    part = weights.layers[0].feedforward
    assert isinstance(part, PackedExperts)
    assert all(matrix.input_order is None for matrix in part.matrices)
