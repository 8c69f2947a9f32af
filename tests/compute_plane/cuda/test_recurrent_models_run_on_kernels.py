"""Models with states on the kernels, in the simulator: what the reference operations say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.cuda.operands import LayerDeltaNet, StateRows
from compute_plane.cuda.operations import DeviceOperations
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weights import DTYPES, DeviceDeltaNet
from compute_plane.errors import DeviceUnavailableError
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import Formats, logits_of, operations_on
from tests.compute_plane.cuda.torch_executors import tiny_plan
from tests.compute_plane.executor.tiny_llama import tiny_spec

Q4_1, Q8_0 = TensorFormat.Q4_1, TensorFormat.Q8_0
SIZES = DeltaNet(2, 4, 32, 64, 4, frozenset({0}))
SPEC = replace(
    tiny_spec(), vocab_size=41, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64,
    hidden_size=32, intermediate_size=64, architecture="qwen35", recurrence=SIZES,
)  # fmt: skip
MIXTURE = Mixture(5, 2, shared_size=32, gates_shared=True)
NEXT = replace(SPEC, architecture="qwen3next", mixture=MIXTURE)
FORMATS: dict[str, Formats] = {
    "dense": {},
    "quantised": {"": Q4_1},
    "b and a apart": {"in_proj_b": TensorFormat.F32, "in_proj_a": TensorFormat.F32, "": Q8_0},
}


def layer_of(spec: ModelSpec, dtype: str) -> LayerDeltaNet:
    mixer = tiny_plan(spec, DTYPES[dtype]).place(torch.device("cpu")).layers[0].mixer
    assert isinstance(mixer, DeviceDeltaNet)
    assert spec.recurrence is not None
    vectors = mixer.convolution, mixer.rates, mixer.time_bias, mixer.norm
    return LayerDeltaNet(*vectors, spec.rms_norm_eps, spec.recurrence)


def rows_of(rows: Sequence[tuple[int, int, int, int]], num_tokens: int, num_long: int) -> StateRows:
    token_rows = np.full(num_tokens, len(rows) - 1, dtype=np.int32)
    for number, (first, count, *_) in enumerate(rows):
        token_rows[first : first + count] = number
    return StateRows(torch.tensor(rows, dtype=torch.int32), torch.from_numpy(token_rows), num_long)


def drawn(sizes: DeltaNet, dtype: str, num_tokens: int) -> torch.Tensor:
    width = sizes.channels + sizes.value_size + 2 * sizes.num_value_heads
    random = torch.Generator().manual_seed(4)
    return torch.randn((num_tokens, width), generator=random).to(DTYPES[dtype])


def drawn_states(own: LayerDeltaNet) -> torch.Tensor:
    """States of two layers, all of them NaN but that of number 4 in the second layer."""
    floats = own.sizes.state_floats
    states = torch.full((6, 2 * floats), torch.nan)
    states[4, floats:] = torch.randn(floats, generator=torch.Generator().manual_seed(5))
    return states


def run(
    operations: DeviceOperations,
    own: LayerDeltaNet,
    inputs: torch.Tensor,
    rows: StateRows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the second layer gives tokens, and the states behind them."""
    states = drawn_states(own)
    out = torch.full((len(inputs), own.sizes.value_size), torch.nan, dtype=inputs.dtype)
    operations.delta_net(out, states, 1, inputs, rows, own)
    return out, states


def check_like_the_reference(
    dtype: str, rows: StateRows, num_tokens: int, *, is_tiled: bool = False
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[str]]:
    """Check a layer on kernels; return what they leave, and their names."""
    spec = replace(SPEC, recurrence=replace(SIZES, value_heads_tiled=is_tiled))
    own, inputs = layer_of(spec, dtype), drawn(SIZES, dtype, num_tokens)
    expected = run(ReferenceOperations(), own, inputs, rows)
    launcher = SimulatedLauncher()
    found = run(operations_on(launcher, spec, {}, dtype), own, inputs, rows)
    of_out = 1e-4 if dtype == "float32" else 0.02
    for one, other, tolerance in zip(found, expected, (of_out, 1e-4), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, atol=tolerance, rtol=tolerance)
    return found, [name for name, _ in launcher.launched]


def test_tokens_go_through_states_as_by_the_reference_operations() -> None:
    """A row that begins, one that goes on, and padding in the place of a third one."""
    rows = rows_of([(0, 1, 2, 1), (1, 1, 4, 0), (0, 0, 0, 0)], 3, num_long=0)
    _, names = check_like_the_reference("bfloat16", rows, 3)
    sizes = "bfloat16_k32_v64_w4"
    assert names == [f"short_convolution_{sizes}", f"delta_rule_{sizes}_normed"]


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("is_tiled", [False, True])
def test_heads_of_few_long_rows_are_divided_with_the_same_bits(dtype: str, is_tiled: bool) -> None:
    table, found = [(0, 1, 2, 1), (1, 3, 4, 0)], []
    for num_long, num_launches in ((0, 2), (1, 3)):
        rows = rows_of(table, 4, num_long)
        left, names = check_like_the_reference(dtype, rows, 4, is_tiled=is_tiled)
        found.append(left)
        assert len(names) == num_launches
    assert names[-1] == f"gated_norm_{dtype}_v64"
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("name", ["reference", pytest.param("kernels", marks=pytest.mark.wide)])
def test_a_state_does_not_depend_on_how_its_tokens_are_cut_into_rows(name: str) -> None:
    own, inputs = layer_of(SPEC, "bfloat16"), drawn(SIZES, "bfloat16", 6)
    operations: DeviceOperations = ReferenceOperations()
    if name == "kernels":
        operations = operations_on(SimulatedLauncher(), SPEC, {}, "bfloat16")
    found = []
    for ends in ([6], [1, 6], [4, 6]):
        states, first, outs = drawn_states(own), 0, []
        for end in ends:
            count = end - first
            rows = rows_of([(0, count, 4, 0)], count, num_long=int(count > 1))
            out = torch.empty((count, own.sizes.value_size), dtype=inputs.dtype)
            operations.delta_net(out, states, 1, inputs[first:end], rows, own)
            outs.append(out)
            first = end
        found.append((torch.cat(outs), states.nan_to_num(7)))
    for out, states in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(states, found[0][1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_attention_gave_is_gated(dtype: str) -> None:
    random = torch.Generator().manual_seed(6)
    attended, gates = (
        torch.randn((3, SPEC.query_size), generator=random).to(DTYPES[dtype]) for _ in range(2)
    )
    found, expected = attended.clone(), attended.clone()
    operations_on(SimulatedLauncher(), SPEC, {}, dtype).gate_attended(found, gates)
    ReferenceOperations().gate_attended(expected, gates)
    torch.testing.assert_close(found, expected, atol=1e-2 if dtype == "bfloat16" else 1e-6, rtol=0)
    assert not torch.equal(found, attended)


def check_model(spec: ModelSpec, formats: Formats, dtype: str) -> None:
    launcher, prompts = SimulatedLauncher(), ([4, 5, 6, 7], [11])
    found = logits_of(spec, formats, dtype, launcher, prompts)
    expected = logits_of(spec, formats, dtype, None, prompts)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.15 if dtype == "bfloat16" else 1e-3)
        assert np.abs(other).max() > 0.5
    names = {name for name, _ in launcher.launched}
    assert {f"gate_attended_{dtype}", f"gated_norm_{dtype}_v64"} <= names


@pytest.mark.wide
@pytest.mark.parametrize("spec", [SPEC, NEXT], ids=["Qwen3.5", "Qwen3-Next"])
def test_models_in_float32_on_kernels_say_what_the_reference_operations_say(
    spec: ModelSpec,
) -> None:
    check_model(spec, {}, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("spec", [SPEC, NEXT], ids=["Qwen3.5", "Qwen3-Next"])
def test_models_in_sixteen_bits_on_kernels_say_what_the_reference_operations_say(
    spec: ModelSpec, formats: str
) -> None:
    check_model(spec, FORMATS[formats], "bfloat16")


def test_models_without_states_have_no_kernels_for_any() -> None:
    plain = replace(SPEC, architecture="qwen3", recurrence=None)
    launcher = SimulatedLauncher(runs=False)
    names = [variant.name for variant in operations_on(launcher, plain, {}, "bfloat16").variants]
    recurrent = (
        "short_convolution", "delta_rule", "gated_norm", "gate_attended", "gated_convolution",
        "mamba2_inputs", "selective_scan", "gated_row_norm",
    )  # fmt: skip
    assert not [name for name in names if name.startswith(recurrent)]
    names = [variant.name for variant in operations_on(launcher, SPEC, {}, "bfloat16").variants]
    assert [name for name in names if name.startswith(recurrent)] == [
        "gate_attended_bfloat16", "short_convolution_bfloat16_k32_v64_w4",
        "delta_rule_bfloat16_k32_v64_w4", "delta_rule_bfloat16_k32_v64_w4_normed",
        "gated_norm_bfloat16_v64",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_value_heads": 2}, "num_value_heads must be a multiple of 4"),
        ({"key_dim": 288}, "key_size"),
        ({"kernel_size": 9}, "width"),
    ],
)
def test_sizes_that_no_kernel_takes_are_refused(changes: dict[str, int], words: str) -> None:
    spec = replace(SPEC, recurrence=replace(SIZES, **changes))
    with pytest.raises(DeviceUnavailableError, match=words):
        KernelOperations(SimulatedLauncher(runs=False), spec, "bfloat16", 16)
