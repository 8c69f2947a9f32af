"""Group-wise quantised checkpoints on both executors, beside models of the weights they mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from compute_plane.cpu.executor import CpuExecutor
from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.cuda.build import chosen_dtype
from compute_plane.cuda.matrices import Projection, QuantizedMatrix
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.executor.registry import build_executor
from compute_plane.executor.weight_formats import log_conversions
from compute_plane.model import layout
from compute_plane.model.assets import ModelAssets
from compute_plane.model.group_config import read_quantization
from compute_plane.model.json_file import JsonObject
from compute_plane.model.loader import LoadedModel
from compute_plane.model.safetensors import open_safetensors
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import RawTensor, TensorFormat, TensorSource
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_formats import FORMATS
from kernels.cuda.quantized_layout import unpack_matrix
from kernels.reference.quantized_matmul import dequantized
from tests.compute_plane.cuda.test_cuda_plane_on_the_cpu import context
from tests.compute_plane.cuda.test_quantised_weights_stay_so import executor
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_spec
from tests.compute_plane.executor.tiny_sources import ArraySource, raw_tensor
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.compute_plane.model.group_checkpoints import Checkpoint, Scheme, checkpoint
from tests.golden.batch_driver import BatchDriver, DrivenSequence

CPU = torch.device("cpu")
SPEC = tiny_spec(quantisable=True)
WEIGHTS = tiny_weights(SPEC)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [9, 2]]
NUM_BLOCKS, BLOCK_SIZE, COUNT = 60, 4, 5

PACKED = "compressed-tensors"
SCHEMES = {
    "gptq symmetric": Scheme(),
    "gptq in activation order": Scheme(symmetric=False, version="gptq_v2", order="act"),
    "gptq of 8 bits": Scheme(bits=8, group_size=-1),
    "awq": Scheme("awq", symmetric=False),
    "compressed-tensors of bfloat16": Scheme(PACKED, symmetric=False, scale_type="BF16"),
    "compressed-tensors of 8 bits with zero points": Scheme(PACKED, bits=8, symmetric=False),
}


WIDE = dataclasses.replace(
    SPEC, num_layers=1, num_heads=8, head_dim=16, hidden_size=128, intermediate_size=384
)
"""A model whose groups may have 128 inputs."""


def made(scheme: Scheme, spec: ModelSpec = SPEC) -> Checkpoint:
    arrays = ArraySource(spec, WEIGHTS if spec is SPEC else tiny_weights(spec), None)
    return checkpoint({name: arrays.tensor(name).to_float32() for name in arrays.names}, scheme)


def opened(tmp_path: Path, written: Checkpoint, spec: ModelSpec = SPEC) -> TensorSource:
    directory = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"  # others may still be mapped
    directory.mkdir()
    written.save(directory / "model.safetensors")
    config = JsonObject(directory, {"quantization_config": written.scheme.config()})
    return open_safetensors(directory, spec, read_quantization(config))[1]


class Decoded(ArraySource):
    """A model of the weights that a checkpoint means, in float32."""

    def __init__(self, written: Checkpoint) -> None:
        super().__init__(SPEC, WEIGHTS, None)
        self._tensors = {
            name: raw_tensor(name, values, TensorFormat.F32)
            for name, values in written.weights.items()
        }


def driven(run, forced: list[list[int]] | None = None) -> tuple[list[np.ndarray], list[list[int]]]:
    """Return the logits of some steps, and the likeliest tokens, of which `forced` are gone on."""
    driver = BatchDriver(run, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    rows = [DrivenSequence(list(prompt)) for prompt in PROMPTS]
    logits, likeliest = [], []
    for step in range(COUNT):
        found = run.execute(driver.batch(rows)).logits
        logits.append(found.copy())
        likeliest.append(found.argmax(axis=1).tolist())
        for row, token in zip(rows, (forced or likeliest)[step], strict=True):
            row.num_computed = len(row.tokens)
            row.tokens.append(token)
    return logits, likeliest


def on_cpu(source: TensorSource, dtype: str = "auto") -> CpuExecutor:
    pool = pool_for(SPEC, NUM_BLOCKS, BLOCK_SIZE)
    return CpuExecutor(
        SPEC, pack_weights(SPEC, source, dtype), pool, num_threads=1, keep_logits=True
    )


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", SCHEMES)
def test_both_executors_give_the_logits_of_the_weights_that_a_checkpoint_means(
    tmp_path: Path, name: str
) -> None:
    written = made(SCHEMES[name])
    source = opened(tmp_path, written)
    with on_cpu(Decoded(written), "float32") as run:
        expected, tokens = driven(run)
    # The engine rounds the rows that meet quantised weights to 8 bits.
    for dtype, tolerance in (("auto", 0.06), ("float32", 1e-5)):
        with on_cpu(source, dtype) as run:
            assert distance(driven(run, tokens)[0], expected) < tolerance
    for configured in ("auto", "float32"):  # on the device nothing is lost
        plan = plan_weights(SPEC, source, "float32", configured)
        assert plan.is_quantised == (configured == "auto")
        found, likeliest = driven(executor(SPEC, plan.place(CPU)), tokens)
        assert distance(found, expected) < 1e-5
        assert likeliest == tokens


def distance(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Return the root of the mean squared difference."""
    return float(np.sqrt(np.mean(np.square(np.stack(found) - np.stack(expected)))))


def model_of(source: TensorSource) -> LoadedModel:
    return LoadedModel(SPEC, ModelAssets.__new__(ModelAssets), source, Path("memory"), None)


def test_what_is_stored_and_what_it_runs_as_is_said(tmp_path: Path) -> None:
    model = model_of(opened(tmp_path, made(SCHEMES["awq"])))
    assert pack_weights(SPEC, model.source).weight_format == "UINT4 as Q4_1, F16"
    built = build_executor("cuda", context(tmp_path, spec=SPEC, model=model))
    assert built.dtype == "UINT4 as Q4_Z, F16 as F32"
    assert f"/float32/{built.dtype}/" in built.numerics_id


def test_what_is_lost_and_what_it_takes_is_told(tmp_path: Path) -> None:
    ordered = opened(tmp_path, made(SCHEMES["awq"]))
    (loss,) = pack_weights(SPEC, ordered).conversions
    assert (loss.stored, loss.runs_as, loss.num_matrices) == ("UINT4", "Q4_1", 7 * SPEC.num_layers)
    assert 1e-5 < loss.relative_error < 1e-3
    (exact,) = pack_weights(SPEC, opened(tmp_path, made(Scheme()))).conversions
    assert (exact.stored, exact.runs_as, exact.relative_error) == ("INT4", "Q4_0", 0)

    strewn = opened(tmp_path, made(SCHEMES["gptq in activation order"]))
    with capture_logs() as lines:
        log_conversions(pack_weights(SPEC, strewn).conversions)
    (line,) = lines
    shapes = layout.tensor_shapes(SPEC)
    num_weights = sum(np.prod(shape) for name, shape in shapes.items() if "_proj" in name)
    assert (line["stored"], line["runs_as"]) == ("UINT4", "Q4_1")
    assert line["num_bytes"] == num_weights * 20 // 32


@pytest.mark.parametrize(
    ("scheme", "label"),
    [
        (Scheme(group_size=128), "Q4_0_G128"),
        (Scheme(PACKED, group_size=-1, scale_type="BF16"), "Q4_0_G128"),
        (Scheme("awq", symmetric=False, group_size=64), "Q4_Z_G64"),
        (Scheme(symmetric=False, version="gptq_v2", order="act", group_size=128), "Q4_Z_G128"),
        (Scheme(bits=8, group_size=96), "Q8_0"),
        (Scheme(PACKED, bits=8, symmetric=False, group_size=192), "Q8_Z_G64"),
    ],
    ids=str,
)
def test_scales_are_kept_once_for_the_largest_span_that_the_groups_fill(
    tmp_path: Path, scheme: Scheme, label: str
) -> None:
    spec = WIDE
    if WIDE.hidden_size % scheme.group_size and scheme.group_size > 0:  # whole groups everywhere
        spec = dataclasses.replace(WIDE, hidden_size=384, num_heads=24)
    written = made(scheme, spec)
    source = opened(tmp_path, written, spec)
    plan = plan_weights(spec, source, "float32")
    placed = plan.place(CPU)
    layer = placed.layers[0]
    for stored, projection in (
        ("self_attn.o_proj", layer.mixer.o),
        ("mlp.down_proj", layer.feedforward.down),
    ):
        (matrix,) = projection.parts
        assert isinstance(matrix, QuantizedMatrix)
        assert matrix.format == label
        (values,) = (w for name, w in written.weights.items() if stored in name)
        found = np.empty(values.shape, np.float32)
        parts = unpack_matrix(matrix.format, matrix.packed.numpy(), *values.shape)
        dequantized(*parts.operands, found)
        order = source.tensor(f"model.layers.0.{stored}.weight").input_order
        assert (matrix.input_order is not None) == (order is not None and "o_proj" in stored)
        np.testing.assert_array_equal(found, values if order is None else values[:, order])
    held = [placed.embedding, *placed.lm_head.parts]
    for projection in (
        layer.mixer.qkv,
        layer.mixer.o,
        layer.feedforward.gate_up,
        layer.feedforward.down,
    ):
        held += projection.parts
    vectors = (layer.attn_norm, layer.mlp_norm, placed.final_norm)
    num_bytes = sum(matrix.num_bytes for matrix in held) + sum(v.nbytes for v in vectors)
    assert plan.num_bytes == placed.num_bytes == num_bytes
    assert plan.quantized.layers == {label}
    quantised = [matrix for matrix in held if isinstance(matrix, QuantizedMatrix)]
    (told,) = (c for c in placed.conversions if c.runs_as == FORMATS[label].kind)
    assert told.num_bytes == sum(matrix.num_bytes for matrix in quantised)


def test_matrices_of_one_input_share_the_smallest_of_their_spans(tmp_path: Path) -> None:
    source = opened(tmp_path, made(Scheme(group_size=128), WIDE), WIDE)
    mixed = Changed(source, layout.layer_tensor(0, layout.KEY), {"scale_group": 64})
    layer = plan_weights(WIDE, mixed, "bfloat16").layers[0]
    assert [part.label for part in layer.mixer.qkv] == ["Q4_0_G64"]
    assert [part.label for part in layer.feedforward.gate_up] == ["Q4_0_G128"]


def test_scales_that_differ_where_they_are_said_to_be_one_are_refused(tmp_path: Path) -> None:
    source = opened(tmp_path, made(Scheme(group_size=32), WIDE), WIDE)
    wrong = Changed(source, layout.layer_tensor(0, layout.DOWN), {"scale_group": 128})
    with pytest.raises(UnsupportedVariantError, match="d must be one for a span of 128, got"):
        plan_weights(WIDE, wrong, "bfloat16").layers[0].feedforward.down[0].place(CPU)


def test_a_group_that_is_strewn_block_by_block_is_no_larger_than_a_block(tmp_path: Path) -> None:
    written = made(Scheme(group_size=64, order="plain"), WIDE)
    for name, tensor in written.tensors.items():
        if name.endswith("down_proj.g_idx"):
            tensor[:] = torch.arange(384) // 32 % 6
    source = opened(tmp_path, written, WIDE)
    down, gate = (layout.layer_tensor(0, role) for role in (layout.DOWN, layout.GATE))
    assert [source.tensor(name).scale_group for name in (down, gate)] == [32, 64]


def test_what_reads_inputs_in_one_order_is_one_matrix_on_the_device(tmp_path: Path) -> None:
    scheme = SCHEMES["gptq in activation order"]
    source = opened(tmp_path, made(scheme))
    plan = plan_weights(SPEC, source, "bfloat16")
    assert [len(plan.layers[0].mixer.qkv), len(plan.layers[0].feedforward.gate_up)] == [1, 1]
    (placed,) = plan.place(CPU).layers[0].mixer.qkv.parts
    in_order = opened(tmp_path, made(dataclasses.replace(scheme, order="plain")))
    (other,) = plan_weights(SPEC, in_order, "bfloat16").layers[0].mixer.qkv
    added = plan.layers[0].mixer.qkv[0].num_bytes - other.num_bytes
    assert added == placed.input_order.nbytes == 4 * SPEC.hidden_size
    assert placed.num_bytes == plan.layers[0].mixer.qkv[0].num_bytes

    name = layout.layer_tensor(0, layout.KEY)
    order = source.tensor(name).input_order
    assert order is not None
    reordered = Changed(source, name, {"input_order": order[::-1]})
    plan = plan_weights(SPEC, reordered, "bfloat16")
    assert [part.num_outputs for part in plan.layers[0].mixer.qkv] == [
        SPEC.query_size, SPEC.kv_size, SPEC.kv_size
    ]  # fmt: skip
    decoded = plan_weights(SPEC, reordered, "bfloat16", "bfloat16")
    assert len(decoded.layers[0].mixer.qkv) == 1


@pytest.mark.parametrize(
    "formats", [{"": TensorFormat.Q8_0}, {"gate": TensorFormat.F16, "": TensorFormat.Q4_1}]
)
def test_gate_and_up_give_their_outputs_in_the_order_in_which_down_wants_them(formats) -> None:
    order = np.random.default_rng(1).permutation(SPEC.intermediate_size)
    turned = dataclasses.replace(
        WEIGHTS,
        layers=tuple(
            dataclasses.replace(
                layer, gate=layer.gate[order], up=layer.up[order], down=layer.down[:, order]
            )
            for layer in WEIGHTS.layers
        ),
    )
    sources = ArraySource(SPEC, WEIGHTS, formats, {"down": 1}), ArraySource(SPEC, turned, formats)
    found, expected = (plan_weights(SPEC, one, "float32").place(CPU) for one in sources)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert held_in(one.feedforward.down) == held_in(other.feedforward.down)
        assert held_in(one.feedforward.gate_up) == held_in(other.feedforward.gate_up)
    assert found.num_bytes == expected.num_bytes

    # A matrix that does not stay quantised has its columns in the model's order.
    dense, plain = (
        plan_weights(SPEC, ArraySource(SPEC, WEIGHTS, formats, orders), "float32", "float32")
        .place(CPU)
        .layers[0]
        for orders in ({"down": 1}, None)
    )
    assert held_in(dense.feedforward.gate_up) == held_in(plain.feedforward.gate_up)


def held_in(projection: Projection) -> list[tuple[bytes, bool]]:
    """The bytes of each part, and whether rows that meet it are sorted."""
    return [
        (bytes(part.packed.numpy()), part.input_order is not None)
        if isinstance(part, QuantizedMatrix)
        else (bytes(part.values.numpy().view(np.uint8)), False)
        for part in projection.parts
    ]


class Changed:
    """A source in which one tensor says something else about itself."""

    def __init__(self, source: TensorSource, name: str, changes: dict[str, object]) -> None:
        self._source, self._name, self._changes = source, name, changes

    def tensor(self, name: str) -> RawTensor:
        tensor = self._source.tensor(name)
        return dataclasses.replace(tensor, **self._changes) if name == self._name else tensor


def test_a_gpu_computes_in_float16_what_is_stored_in_float16(tmp_path: Path) -> None:
    gpu = torch.device("cuda", 0)
    for kind, dtype in (("F16", "float16"), ("BF16", "bfloat16"), ("F32", "bfloat16")):
        model = model_of(opened(tmp_path, made(Scheme(scale_type=kind))))
        wants = context(tmp_path, spec=SPEC, model=model)
        assert chosen_dtype(wants, gpu) == dtype
        assert chosen_dtype(wants, CPU) == "float32"
        assert chosen_dtype(dataclasses.replace(wants, dtype="bfloat16"), gpu) == "bfloat16"
