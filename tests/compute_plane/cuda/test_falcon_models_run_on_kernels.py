"""Models whose layers have attention and a state on the kernels, in the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compute_plane.cuda.host_layers_plan import device_bytes, working_bytes
from compute_plane.cuda.layer_products import Hidden, LayerProducts
from compute_plane.cuda.matrices import DenseMatrix, Projection
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.cuda.weights import DeviceAttention, DeviceMamba2
from compute_plane.model.loader import load_model
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import Formats, logits_of, operations_on
from tests.compute_plane.cuda.torch_executors import tiny_model, tiny_plan
from tests.compute_plane.executor.tiny_llama import tiny_spec, with_states_beside
from tests.compute_plane.model.conftest import write_directory
from tests.compute_plane.model.falcon_models import FalconModel

SMALL = replace(
    tiny_spec(), vocab_size=41, num_heads=2, num_kv_heads=1, head_dim=64, hidden_size=32,
    intermediate_size=64,
)  # fmt: skip
SPECS = {
    "plain": with_states_beside(SMALL),
    "norm": with_states_beside(SMALL, has_norm=True),
}
ROWS = {"plain": "gated_row_norm_bfloat16_i128_plain", "norm": "gated_row_norm_bfloat16_i128"}
FORMATS: dict[str, Formats] = {
    "dense": {},
    "quantised": {"": TensorFormat.Q4_1},
    "d apart": {"in_proj_d": TensorFormat.F32, "": TensorFormat.Q8_0},
    "one of both": {"mamba": TensorFormat.Q8_0, "": TensorFormat.F32},
}
PROMPTS = [4, 5, 6], [11]
CPU = torch.device("cpu")


def check(kind: str, formats: Formats, dtype: str) -> list[str]:
    """Compare logits; return the names of the kernels that were launched."""
    launcher = SimulatedLauncher()
    found = logits_of(SPECS[kind], formats, dtype, launcher, PROMPTS)
    expected = logits_of(SPECS[kind], formats, dtype, None, PROMPTS)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.15 if dtype == "bfloat16" else 1e-3)
        assert np.abs(other).max() > 0.5
    return [name for name, _ in launcher.launched]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
def test_a_model_says_what_the_reference_operations_say(kind: str) -> None:
    launched = check(kind, {}, "bfloat16")
    assert ROWS[kind] in launched
    assert launched.count(ROWS[kind]) == sum(name.startswith("rope_write") for name in launched)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "dtype"),
    [("dense", "float32"), *((formats, "bfloat16") for formats in FORMATS if formats != "dense")],
)
@pytest.mark.parametrize("kind", SPECS)
def test_a_model_of_another_format_says_what_the_reference_operations_say(
    kind: str, formats: str, dtype: str
) -> None:
    check(kind, FORMATS[formats], dtype)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("formats", FORMATS)
def test_a_model_has_the_kernels_of_both(kind: str, formats: str) -> None:
    launcher = SimulatedLauncher(runs=False)
    operations = operations_on(launcher, SPECS[kind], FORMATS[formats], "bfloat16")
    names = {variant.name for variant in operations.variants}
    assert {ROWS[kind], "mamba2_inputs_bfloat16_w4", "selective_scan_p32_n64"} <= names
    assert [name for name in names if name.startswith("rope_write_kv")]


def test_a_layer_has_attention_and_a_state_that_read_one_norm() -> None:
    plan = tiny_plan(SPECS["plain"], torch.float32)
    for layer, planned in zip(plan.place(CPU).layers, plan.layers, strict=True):
        assert isinstance(layer.mixer, DeviceAttention)
        assert isinstance(layer.beside, DeviceMamba2)
        assert layer.beside.norm is None
        assert planned.beside is not None
        of_both = {*planned.mixer.matrices, *planned.beside.matrices}
        assert of_both < {*planned.matrices}
        assert {*planned.beside.vectors} < {*planned.vectors}


def test_layers_have_the_memory_of_keys_and_of_states_and_steps_that_of_both() -> None:
    spec = SPECS["plain"]
    weights = plan_weights(spec, tiny_model(spec).source, "float32")
    counted = device_bytes(
        spec, weights, item_bytes=4, layer_bytes={spec.heads: 10**6}, max_tokens=4, num_states=3
    )
    assert spec.recurrence is not None
    both = 10**6 + 3 * 4 * spec.recurrence.state_floats
    assert list(counted.layers) == [layer.num_bytes + both for layer in weights.layers]
    alone = replace(spec, architecture="llama", recurrence=None)
    more = [working_bytes(of, 4, 2000) - working_bytes(of, 4, 1000) for of in (spec, alone)]
    inputs = spec.recurrence.num_inputs + spec.recurrence.out_size
    assert more[0] - more[1] >= 1000 * 4 * inputs


def test_norms_that_are_multiplied_keep_their_digits(tmp_path: Path) -> None:
    """Rounded to 16 bits a channel would always be rounded the same way."""
    path = write_directory(tmp_path / "hf", FalconModel(has_norm=True))
    model = load_model(str(path))
    plan = plan_weights(model.spec, model.source, "bfloat16")
    placed = plan.place(CPU)
    layer, name = placed.layers[1], "model.layers.1."
    assert layer.beside is not None
    for found, role in (
        (layer.attn_norm, "input_layernorm"),
        (layer.mlp_norm, "post_attention_layernorm"),
        (layer.beside.norm, "mamba.norm"),
    ):
        expected = torch.from_numpy(model.source.tensor(f"{name}{role}.weight").to_float32())
        assert found is not None
        assert torch.equal(found, expected)
    taps = torch.from_numpy(model.source.tensor(f"{name}mamba.conv1d.weight").to_float32())
    assert torch.equal(layer.beside.convolution, taps.t())
    assert placed.final_norm.dtype is torch.float32


class InParts(ReferenceOperations):
    """Has products of so many parts, by their inputs; computes none by itself."""

    def __init__(self, parts: dict[int, int]) -> None:
        super().__init__()
        self._parts = parts

    def takes_product(self, num_rows: int, weight: torch.Tensor) -> bool:  # noqa: ARG002 - none
        return False

    def num_product_parts(self, num_rows: int, weight: torch.Tensor) -> int:  # noqa: ARG002 - any
        return self._parts[weight.shape[1]]


@pytest.mark.parametrize("parts", [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_both_products_are_added_once_in_however_many_parts_they_come(
    parts: tuple[int, int],
) -> None:
    random = torch.Generator().manual_seed(3)
    sizes = 64, 32
    rows, one, other = (torch.randn((5, n), generator=random) for n in (48, *sizes))
    weights = [torch.randn((48, n), generator=random) for n in sizes]
    products = LayerProducts(InParts(dict(zip(sizes, parts, strict=True))), 1e-5)
    hidden = Hidden(rows.clone())
    first, second = (Projection((DenseMatrix(weight),)) for weight in weights)
    products.add_both(hidden, (one, first), (other, second))
    expected = rows + one @ weights[0].t() + other @ weights[1].t()
    torch.testing.assert_close(hidden.sums(), expected, atol=1e-4, rtol=1e-5)
    assert hidden.added is not None
    assert hidden.added.dim() == (2 if parts == (1, 1) else 3)
