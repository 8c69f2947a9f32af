"""Matrices whose columns are stored in another order than the model's, on the CPU engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from compute_plane.cpu.packed_layers import PackedWeights
from compute_plane.cpu.packed_recurrences import PackedDeltaNet, PackedMamba2
from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.model.errors import ModelFileError
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.executor.tiny_llama import (
    pool_for,
    tiny_executor,
    tiny_spec,
    with_delta_net,
    with_mamba2,
)
from tests.compute_plane.executor.tiny_sources import ArraySource
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SPEC = tiny_spec(quantisable=True)
WEIGHTS = tiny_weights(SPEC)
NUM_BLOCKS, BLOCK_SIZE = 40, 16
Q8_0, Q4_1, F16 = TensorFormat.Q8_0, TensorFormat.Q4_1, TensorFormat.F16

MIXES: dict[str, dict[str, int]] = {
    "all that read one input in one order": {"q_": 1, "k_": 1, "v_": 1, "gate": 2, "up_": 2},
    "each in its own": {"q_": 1, "k_": 2, "v_": 3, "o_": 4, "gate": 5, "up_": 6, "down": 7},
    "some in none": {"k_": 1, "up_": 2},
    "two that are not neighbours in one": {"q_": 1, "v_": 1},
    "attention's output": {"o_": 1},
    "down alone": {"down": 1},
    "the head": {"lm_head": 1},
}


def logits_of(
    orders: Mapping[str, int] | None, formats: Mapping[str, TensorFormat], dtype: str = "auto"
) -> np.ndarray:
    """Return the logits behind a prompt, and behind tokens generated after it."""
    with tiny_executor(
        SPEC, WEIGHTS, pool_for(SPEC, NUM_BLOCKS, BLOCK_SIZE), dtype=dtype, formats=formats,
        orders=orders, num_threads=1, keep_logits=True,
    ) as executor:  # fmt: skip
        driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        row = DrivenSequence(list(range(30, 60)))
        found = []
        for token in (5, 6, 7):
            output = executor.execute(driver.batch([row]))
            assert output.logits is not None
            found.append(output.logits[0].copy())
            row.num_computed = len(row.tokens)
            row.tokens.append(token)
    return np.array(found)


def packed(
    orders: Mapping[str, int] | None,
    formats: Mapping[str, TensorFormat],
    weights: object = WEIGHTS,
    dtype: str = "auto",
) -> PackedWeights:
    return pack_weights(SPEC, ArraySource(SPEC, weights, formats, orders), dtype)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    return logits_of(None, {}, "float32")


@pytest.mark.parametrize("mix", MIXES)
def test_logits_are_those_of_the_model(exact: np.ndarray, mix: str) -> None:
    """As near as with columns in the model's order: 0.057 of their spread, squared and averaged."""
    found = logits_of(MIXES[mix], {"": Q8_0})
    assert np.sqrt(np.square(found - exact).mean()) < 0.09 * exact.std()


def test_formats_without_blocks_have_the_models_order(exact: np.ndarray) -> None:
    orders = MIXES["each in its own"]
    np.testing.assert_array_equal(logits_of(orders, {}), exact)
    for formats, dtype in (({"": F16}, "auto"), ({"": Q8_0}, "bfloat16")):
        layer = packed(orders, formats, dtype=dtype).layers[0]
        assert all(matrix.input_order is None for matrix in layer.matrices)


@pytest.mark.parametrize("spec", [with_mamba2(SPEC), with_delta_net(SPEC)])
def test_what_is_float32_beside_matrices_with_orders_has_the_models(spec: ModelSpec) -> None:
    """Time steps and gates of states, which are kept as exact as the file has them."""
    source = ArraySource(spec, tiny_weights(spec), {"in_proj": Q8_0}, {"in_proj": 3})
    mixer = pack_weights(spec, source).layers[0].mixer
    assert isinstance(mixer, PackedMamba2 | PackedDeltaNet)
    *rows, alone = mixer.inputs
    assert alone.format == "F32"
    assert alone.input_order is None
    assert all(matrix.input_order is not None for matrix in rows)


def test_what_reads_inputs_in_one_order_is_one_matrix() -> None:
    def parts(mix: str) -> tuple[list[int], list[int]]:
        layer = packed(MIXES[mix], {"": Q4_1}).layers[0]
        return [m.n for m in layer.mixer.qkv], [m.n for m in layer.feedforward.gate_up]

    qkv = [SPEC.query_size, SPEC.kv_size, SPEC.kv_size]
    gate_up = [SPEC.intermediate_size] * 2
    assert parts("all that read one input in one order") == ([sum(qkv)], [sum(gate_up)])
    assert parts("each in its own") == (qkv, gate_up)
    assert parts("some in none") == (qkv, gate_up)
    assert parts("down alone") == ([sum(qkv)], [sum(gate_up)])


def test_rows_of_gate_and_up_are_packed_in_the_order_in_which_down_wants_them() -> None:
    order = np.random.default_rng(1).permutation(SPEC.intermediate_size)
    turned = dataclasses.replace(
        WEIGHTS,
        layers=tuple(
            dataclasses.replace(
                layer,
                gate=layer.gate[order],
                up=layer.up[order],
                down=np.ascontiguousarray(layer.down[:, order]),
            )
            for layer in WEIGHTS.layers
        ),
    )
    for formats in ({"": Q8_0}, {"gate": F16, "": Q4_1}):
        found, expected = packed(MIXES["down alone"], formats), packed(None, formats, turned)
        assert found.layers[1].feedforward.down.input_order is None
        np.testing.assert_array_equal(found.memory, expected.memory)


def test_a_weight_at_fault_is_told_with_the_row_that_its_file_has_it_in() -> None:
    gate = WEIGHTS.layers[1].gate.copy()
    gate[37, 5] = np.nan
    layers = (WEIGHTS.layers[0], dataclasses.replace(WEIGHTS.layers[1], gate=gate))
    spoilt = dataclasses.replace(WEIGHTS, layers=layers)
    with pytest.raises(ModelFileError, match="holds nan at row 37, column 5"):
        packed(MIXES["down alone"], {"down": Q8_0}, spoilt)
