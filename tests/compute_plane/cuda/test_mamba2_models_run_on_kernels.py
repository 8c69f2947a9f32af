"""Models with Mamba-2 on the kernels, in the simulator: as the reference operations say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.cuda.operands import LayerMamba2, StateRows
from compute_plane.cuda.operations import DeviceOperations
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weights import DTYPES, DeviceMamba2
from compute_plane.errors import DeviceUnavailableError
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import Formats, logits_of, operations_on
from tests.compute_plane.cuda.test_recurrent_models_run_on_kernels import rows_of
from tests.compute_plane.cuda.torch_executors import tiny_plan
from tests.compute_plane.executor.tiny_llama import tiny_spec

SIZES = Mamba2(8, 32, 32, 4, 0.02, frozenset({0}))
SPEC = replace(
    tiny_spec(), vocab_size=41, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64,
    hidden_size=32, intermediate_size=64, architecture="granitehybrid", recurrence=SIZES,
)  # fmt: skip
FORMATS: dict[str, Formats] = {
    "dense": {},
    "quantised": {"": TensorFormat.Q4_1},
    "d apart": {"in_proj_d": TensorFormat.F32, "": TensorFormat.Q8_0},
}
ROWS = [(0, 1, 2, 1), (1, 1, 4, 0), (2, 2, 5, 0), (5, 0, 1, 0), (4, 5, 3, 1)]
"""New and not; one token, fewer than are kept, none, and more."""
NAMES = ["mamba2_inputs_{}_w4", "selective_scan_p32_n32", "gated_row_norm_{}_i256"]


def layer_of(dtype: str) -> LayerMamba2:
    mixer = tiny_plan(SPEC, DTYPES[dtype]).place(torch.device("cpu")).layers[0].mixer
    assert isinstance(mixer, DeviceMamba2)
    return LayerMamba2(
        mixer.convolution, mixer.bias, mixer.rates, mixer.time_bias, mixer.skips, mixer.norm, SIZES
    )


def drawn(dtype: str, num_tokens: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(4)
    return torch.randn((num_tokens, SIZES.num_inputs), generator=random).to(DTYPES[dtype])


def drawn_states(rows: Sequence[tuple[int, int, int, int]]) -> torch.Tensor:
    """States of two layers, NaN but for the second layer's of rows that go on."""
    floats = SIZES.state_floats
    states = torch.full((6, 2 * floats), torch.nan)
    for _, count, state, is_new in rows:
        if count and not is_new:
            random = torch.Generator().manual_seed(state)
            states[state, floats:] = torch.randn(floats, generator=random)
    return states


def run(
    operations: DeviceOperations, dtype: str, inputs: torch.Tensor, rows: StateRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the second layer gives tokens, and the states behind them."""
    states = drawn_states([tuple(row) for row in rows.rows.tolist()])
    out = torch.full((len(inputs), SIZES.out_size), torch.nan, dtype=inputs.dtype)
    operations.mamba2(out, states, 1, inputs, rows, layer_of(dtype))
    return out, states


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.wide)])
def test_tokens_go_through_states_as_by_the_reference_operations_in_three_launches(
    dtype: str,
) -> None:
    """The last token is padding, in the place of a row."""
    rows, inputs = rows_of([*ROWS, (0, 0, 0, 0)], 10, num_long=2), drawn(dtype, 10)
    expected = run(ReferenceOperations(), dtype, inputs, rows)
    launcher = SimulatedLauncher()
    found = run(operations_on(launcher, SPEC, {}, dtype), dtype, inputs, rows)
    of_out = 1e-4 if dtype == "float32" else 0.02
    for one, other, tolerance in zip(found, expected, (of_out, 1e-4), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, atol=tolerance, rtol=tolerance)
    assert found[0][:-1].isfinite().all()
    assert found[0][-1].isnan().all()
    grids = [(10, 1, 1), (8, 6, 1), (10, 1, 1)]
    assert launcher.launched == [
        (name.format(dtype), grid) for name, grid in zip(NAMES, grids, strict=True)
    ]


@pytest.mark.parametrize("name", ["reference", pytest.param("kernels", marks=pytest.mark.wide)])
def test_a_state_does_not_depend_on_how_its_tokens_are_cut_into_rows(name: str) -> None:
    inputs = drawn("bfloat16", 6)
    operations: DeviceOperations = ReferenceOperations()
    if name == "kernels":
        operations = operations_on(SimulatedLauncher(), SPEC, {}, "bfloat16")
    found = []
    for ends in ([6], [1, 6], [4, 6], [1, 2, 3, 4, 5, 6]):
        states, first, outs = drawn_states([(0, 6, 4, 0)]), 0, []
        for end in ends:
            count = end - first
            rows = rows_of([(0, count, 4, 0)], count, num_long=int(count > 1))
            out = torch.empty((count, SIZES.out_size), dtype=inputs.dtype)
            operations.mamba2(out, states, 1, inputs[first:end], rows, layer_of("bfloat16"))
            outs.append(out)
            first = end
        found.append((torch.cat(outs), states.nan_to_num(7)))
    for out, states in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(states, found[0][1])


def check_model(formats: Formats, dtype: str) -> None:
    launcher, prompts = SimulatedLauncher(), ([4, 5, 6, 7], [11])
    found = logits_of(SPEC, formats, dtype, launcher, prompts)
    expected = logits_of(SPEC, formats, dtype, None, prompts)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.15 if dtype == "bfloat16" else 1e-3)
        assert np.abs(other).max() > 0.5
    # The capture of a graph, a prompt, and the graph's replay.
    of_layer = [grid for name, grid in launcher.launched if name.startswith("mamba2_inputs")]
    assert of_layer[0] == (2, 1, 1)
    assert (5, 1, 1) in of_layer


@pytest.mark.wide
def test_a_model_in_float32_on_kernels_says_what_the_reference_operations_say() -> None:
    check_model({}, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("formats", FORMATS)
def test_a_model_in_sixteen_bits_on_kernels_says_what_the_reference_operations_say(
    formats: str,
) -> None:
    check_model(FORMATS[formats], "bfloat16")


def test_a_model_has_the_kernels_of_its_layers_and_none_of_other_kinds() -> None:
    operations = operations_on(SimulatedLauncher(runs=False), SPEC, {}, "bfloat16")
    names = [variant.name for variant in operations.variants]
    own = {name.format("bfloat16") for name in NAMES}
    assert own <= set(names)
    others = (
        "short_convolution", "delta_rule", "gated_norm", "gate_attended", "gated_convolution",
    )  # fmt: skip
    assert not [name for name in names if name.startswith(others)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 12}, "num_heads must be a multiple of 8"),
        ({"kernel_size": 9}, "width must be between 2 and 8"),
        ({"state_size": 288}, "state_size must be a multiple of 32 up to 256"),
        ({"num_heads": 520}, "size must be a multiple of 32 up to 16384, got 16640"),
    ],
)
def test_sizes_that_no_kernel_takes_are_refused(changes: dict[str, int], words: str) -> None:
    spec = replace(SPEC, recurrence=replace(SIZES, **changes))
    with pytest.raises(DeviceUnavailableError, match=words):
        KernelOperations(SimulatedLauncher(runs=False), spec, "bfloat16", 16)
