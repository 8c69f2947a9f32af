"""A compute plane with this executor, spoken to over the wire; and what it is refused for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compute_plane import __main__ as entry
from compute_plane.config import ComputePlaneConfig
from compute_plane.cuda import build
from compute_plane.device import Placement, choose_placement
from compute_plane.errors import DeviceUnavailableError, ExecutorLoadError
from compute_plane.executor.interface import GPUExecutor
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext, build_executor
from compute_plane.executor.simulated import VOCAB_SIZE
from compute_plane.model import layout
from compute_plane.model.tensor import TensorFormat
from planes.errors import ConfigError
from protos.hetero.compute.v1 import compute_pb2
from tests.compute_plane.cuda.torch_executors import tiny_model
from tests.compute_plane.executor.tiny_llama import (
    pool_for,
    tiny_executor,
    tiny_spec,
    with_delta_net,
)
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.compute_plane.rpc.plane_harness import Harness, start
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SPEC = replace(tiny_spec(), vocab_size=VOCAB_SIZE)
TEXTS = [b"good", b"bad.", b"fine"]


def context(tmp_path: Path, **changes: object) -> ExecutorContext:
    plain = ExecutorContext(
        spec=SPEC, model=tiny_model(SPEC), block_size=4, num_blocks=40, dtype="auto",
        kv_cache_dtype="auto", instruction_set="auto", device="cpu", max_tokens=64, num_threads=1,
        kernel_cache=tmp_path,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


class TorchHarness(Harness):
    """A plane with the executor over a tiny random model."""

    spec = SPEC

    def _build(self, _: str, context: ExecutorContext) -> BuiltExecutor:
        # The harness's configuration asks for the simulated executor.
        model = tiny_model(self.spec)
        here = replace(context, spec=self.spec, model=model, device="cpu", dtype="auto")
        self.built = build_executor("cuda", here)
        return self.built

    def close(self) -> None:
        self.channel.close()
        self.plane.stop()


@pytest.fixture
def plane() -> Iterator[TorchHarness]:
    with tempfile.TemporaryDirectory() as directory:
        harness = TorchHarness(Path(directory), num_threads=1, swap_space=0.001)
        yield harness
        harness.close()


def prefill(*slots: int) -> dict:
    """Rows that compute the texts of some slots; slot s has the blocks 2s and 2s + 1."""
    return {
        "starts": [start(slot, TEXTS[slot], [2 * slot, 2 * slot + 1]) for slot in slots],
        "slots": slots,
        "query_lens": [4] * len(slots),
        "positions": [0] * len(slots),
        "sampled_rows": range(len(slots)),
    }


def decode(position: int) -> dict:
    slots = [0, 1, 2]
    return {
        "slots": slots, "query_lens": [1] * 3, "positions": [position] * 3, "sampled_rows": slots,
    }  # fmt: skip


def test_a_plane_runs_batches_swaps_and_poisons_like_any_other(plane: TorchHarness) -> None:
    described = plane.describe()
    assert described.executor == "cuda"
    assert described.numerics_id.startswith("cuda/reference/cpu-1/torch-")
    assert described.numerics_id.endswith("/float32/F32/kv-float32-4/graphs-none")

    controller = plane.open()
    tokens = [controller.run(**prefill(0, 1, 2))] + [controller.run(**decode(p)) for p in (4, 5)]
    with tiny_executor(SPEC, tiny_weights(SPEC), pool_for(SPEC, 40, 4), num_threads=1) as cpu:
        assert tokens == tokens_of(cpu)

    moved = controller.batch(
        **prefill(1),
        swap_out=[compute_pb2.BlockMove(source_block=0, destination_block=0)],
        swap_in=[compute_pb2.BlockMove(source_block=0, destination_block=9)],
    )
    assert not controller.execute_one(moved).row_failures
    pool = plane.built.executor._pools.device  # type: ignore[attr-defined]
    assert pool[9].equal(pool[0])
    assert pool[9].any()

    pool[0] = float("nan")
    controller.run(**prefill(1))
    parts = {"slots": [0], "query_lens": [1], "positions": [6], "sampled_rows": [0]}
    output = controller.execute_one(controller.batch(**parts))
    assert [failure.row for failure in output.row_failures] == [0]


class RecurrentHarness(TorchHarness):
    """Of a model with states."""

    spec = with_delta_net(SPEC)


def test_a_plane_of_a_model_with_states_copies_them_as_told(tmp_path: Path) -> None:
    plane = RecurrentHarness(tmp_path, num_threads=1)
    described = plane.describe()
    assert (described.limits.max_slots, described.num_states) == (8, 16)
    assert "states" in described.features
    assert "drafts" not in described.features
    controller = plane.open()
    controller.run(**prefill(0, 1, 2))
    rows = {"query_lens": [1], "positions": [4], "sampled_rows": [0], "slots": [3]}
    copies = [
        compute_pb2.StateCopy(source=source, destination=to) for source, to in ((0, 9), (9, 3))
    ]
    going_on = start(3, TEXTS[0] + b"x", [0, 20])  # the first block is that of slot 0
    found = controller.run(starts=[going_on], state_copies=copies, **rows)
    rows = {"query_lens": [5], "positions": [0], "sampled_rows": [0], "slots": [4]}
    anew = controller.run(starts=[start(4, TEXTS[0] + b"x", [21, 22])], **rows)
    assert found == anew
    states = plane.built.executor._pools.states.device  # type: ignore[attr-defined]
    assert not states[9].equal(states[3])
    torch.testing.assert_close(states[3], states[4], atol=1e-5, rtol=1e-4)
    plane.close()


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_batches_in_flight_give_the_tokens_of_batches_in_turn(
    plane: TorchHarness, depth: int
) -> None:
    assert plane.describe().max_batches_in_flight == 8
    controller = plane.open()
    batches = [prefill(0, 1, 2), *(decode(position) for position in range(4, 8))]
    expected = [controller.run(**parts) for parts in batches]
    controller = plane.open()
    with controller.stream() as stream:
        for parts in batches[: depth - 1]:
            stream.send(controller.batch(**parts))
        found = []
        for parts in batches[depth - 1 :]:
            stream.send(controller.batch(**parts))
            found.append(stream.receive())
        found += [stream.receive() for _ in range(depth - 1)]
    assert [output.step_id for output in found] == [1, 2, 3, 4, 5]
    assert [list(output.sampled_token_ids) for output in found] == expected


def tokens_of(executor: GPUExecutor) -> list[list[int]]:
    """Return what an executor makes of the texts: three tokens of each."""
    driver = BatchDriver(executor, num_blocks=40, block_size=4)
    texts = [DrivenSequence(list(text)) for text in TEXTS]
    return np.transpose(driver.generate(texts, 3)).tolist()


def test_it_is_built_as_configured(tmp_path: Path) -> None:
    built = build_executor("cuda", context(tmp_path, dtype="bfloat16", swap_bytes=1 << 16))
    per_block = 2 * SPEC.num_layers * SPEC.num_kv_heads * 4 * SPEC.head_dim * 2
    assert built.kv_pool_bytes == 40 * per_block
    assert built.num_host_blocks == (1 << 16) // per_block
    assert built.dtype == "bfloat16"
    assert not built.tells_prompts_apart


@pytest.mark.parametrize("kv_dtype", ["int8", "float8"])
def test_its_pool_may_have_eight_bits_and_the_start_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kv_dtype: str
) -> None:
    wants = context(tmp_path, kv_cache_dtype=kv_dtype, swap_bytes=1 << 16)
    built = build_executor("cuda", wants)
    per_block = 2 * SPEC.num_layers * SPEC.num_kv_heads * 4 * (SPEC.head_dim + 4)
    assert built.kv_pool_bytes == 40 * per_block
    assert built.num_host_blocks == (1 << 16) // per_block
    assert f"/kv-{kv_dtype}-4/" in built.numerics_id
    [line] = [line for line in capsys.readouterr().out.splitlines() if "kv pool" in line]
    assert f"kv_cache_dtype={kv_dtype} " in line


def test_it_warns_that_it_is_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_executor("cuda", context(tmp_path))
    assert "--executor cpu is the fast one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "bfloat16", "kv_cache_dtype": "float16"}, "kv_cache_dtype"),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "kv_cache_dtype"),
        ({"num_blocks": 1 << 40}, "max_num_blocks"),
        ({"device": "cuda"}, "device"),
    ],
)
def test_what_it_cannot_be_built_for_is_refused_by_field(
    tmp_path: Path, changes: dict, field: str
) -> None:
    with pytest.raises(ConfigError) as info:
        build_executor("cuda", context(tmp_path, **changes))
    assert info.value.field == field


def test_it_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(ExecutorLoadError, match="needs a model"):
        build_executor("cuda", context(tmp_path, model=None))


def test_without_torch_the_executor_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(entry.sys.modules, "compute_plane.cuda.build", None)
    with pytest.raises(DeviceUnavailableError, match=r"the extra .cuda. "):
        build_executor("cuda", context(tmp_path))


def test_it_is_placed_on_the_cpu_only_if_told_so() -> None:
    config = ComputePlaneConfig(executor="cuda", device="cpu", dtype="float16")
    assert choose_placement(config) == Placement("cuda", "cpu", "float16")
    for executor in ("cpu", "simulated"):
        with pytest.raises(DeviceUnavailableError, match=f"executor {executor} does not run"):
            choose_placement(ComputePlaneConfig(executor=executor, device="cuda"))
    with pytest.raises(DeviceUnavailableError, match="got float16"):
        choose_placement(ComputePlaneConfig(dtype="float16"))


def test_a_model_that_float16_cannot_hold_is_in_bfloat16_however_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    expected_of = {"qwen3": "float16", "deepseek2": "bfloat16", "gemma3": "bfloat16"}
    for architecture, expected in expected_of.items():
        spec = replace(SPEC, architecture=architecture)
        model = tiny_model(spec)
        halves = replace(model.source.tensor(layout.FINAL_NORM), format=TensorFormat.F16)
        monkeypatch.setattr(model.source, "tensor", lambda _, halves=halves: halves)
        here = context(tmp_path, spec=spec, model=model)
        assert build.chosen_dtype(here, gpu) == expected
    with pytest.raises(DeviceUnavailableError, match="Gemma 3 models have hidden states") as caught:
        build_executor("cuda", replace(here, dtype="float16"))
    assert caught.value.field == "dtype"


def test_a_gpus_dtype_is_bfloat16_unless_told_otherwise(tmp_path: Path) -> None:
    gpu = torch.device("cuda", 0)
    assert build.chosen_dtype(context(tmp_path), gpu) == "bfloat16"
    assert build.chosen_dtype(context(tmp_path, dtype="float16"), gpu) == "float16"
    assert build.chosen_dtype(context(tmp_path), torch.device("cpu")) == "float32"


def test_products_are_cut_into_as_many_threads_as_the_numerics_id_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    built = build_executor("cuda", context(tmp_path, num_threads=3))
    assert told == [3]
    assert "/cpu-3/" in built.numerics_id
