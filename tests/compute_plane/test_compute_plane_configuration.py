from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from compute_plane.config import ComputePlaneConfig, default_kernel_cache, load_config
from compute_plane.device import Placement, choose_placement, describe_device
from compute_plane.errors import DeviceUnavailableError
from compute_plane.executor.registry import ExecutorContext, build_executor
from compute_plane.executor.simulated import SPEC
from planes.errors import ConfigError


def test_defaults_are_those_of_the_seed_documents():
    config = ComputePlaneConfig()
    assert (config.block_size, config.max_num_blocks) == (16, 1024)
    assert (config.model, config.device, config.dtype) == ("default", "auto", "auto")
    assert config.listen_address.is_local
    assert config.effective_num_threads == len(os.sched_getaffinity(0))


def test_flags_go_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"block_size": 8, "max_num_blocks": 64, "num_threads": 3}))
    monkeypatch.setenv("HETERO_MAX_NUM_BLOCKS", "128")
    monkeypatch.setenv("HETERO_NUM_THREADS", "4")
    config = load_config(["--config", str(file), "--num-threads", "5"]).config
    assert (config.block_size, config.max_num_blocks, config.num_threads) == (8, 128, 5)


def test_only_keys_nobody_knows_are_reported(tmp_path: Path):
    file = tmp_path / "config.json"
    seed = {"block_size": 16, "max_num_blocks": 1024, "max_batch_size": 32, "memory_threshold": 0.9}
    file.write_text(json.dumps({**seed, "blocksize": 4, "max_tokens": 100}))
    assert load_config(["--config", str(file)]).unknown_keys == ("blocksize",)


def test_all_problems_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        load_config(["--block-size=nan", "--max-num-blocks=-1", "--device=tpu"])
    for words in ("block_size (from --block-size)", "got -1", "auto, cpu, cuda"):
        assert words in caught.value.message


@pytest.mark.parametrize("listen", ["0.0.0.0:50052", "example.org:50052", "[::]:50052"])
def test_plaintext_for_other_machines_must_be_asked_for(listen: str):
    with pytest.raises(ConfigError, match="--allow-insecure"):
        ComputePlaneConfig(listen=listen)
    assert ComputePlaneConfig(listen=listen, allow_insecure=True).listen == listen


@pytest.mark.parametrize(
    ("settings", "placement"),
    [
        ({}, Placement("cpu", "cpu", "auto")),
        ({"device": "cpu", "dtype": "float32"}, Placement("cpu", "cpu", "float32")),
        ({"executor": "simulated"}, Placement("simulated", "simulated", "none")),
        ({"executor": "mine:make"}, Placement("mine:make", "cpu", "auto")),
        (
            {"executor": "mine:make", "device": "cuda", "dtype": "bfloat16"},
            Placement("mine:make", "cuda", "bfloat16"),
        ),
    ],
)
def test_auto_is_resolved_to_what_there_is(settings: dict, placement: Placement):
    assert choose_placement(ComputePlaneConfig(**settings)) == placement


@pytest.mark.parametrize(
    "settings",
    [{"device": "cuda"}, {"executor": "simulated", "device": "cuda"}],
)
def test_what_is_not_there_yet_is_refused(settings: dict):
    with pytest.raises(DeviceUnavailableError):
        choose_placement(ComputePlaneConfig(**settings))


def test_this_machine_describes_itself():
    device = describe_device("cpu", 2)
    assert device.name
    assert device.total_memory_bytes > 1 << 28


def test_kernels_are_cached_below_the_users_cache_or_else_the_temporary_directory(tmp_path: Path):
    home = {"HOME": str(tmp_path)}
    assert default_kernel_cache(home) == tmp_path / ".cache/hetero-paged-infer/kernels"
    other = {**home, "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    assert default_kernel_cache(other) == tmp_path / "xdg/hetero-paged-infer/kernels"
    (tmp_path / "file").touch()
    no_home = default_kernel_cache({"HOME": str(tmp_path / "file" / "home")})
    assert no_home.name.startswith("hetero-paged-infer")
    assert default_kernel_cache({}).is_absolute()


def test_a_custom_executor_is_made_by_its_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_executor.py").write_text(
        "from compute_plane.executor.simulated import SimulatedExecutor\n"
        "class Factories:\n"
        "    @staticmethod\n"
        "    def make(context):\n"
        "        return SimulatedExecutor(\n"
        "            num_blocks=context.num_blocks, block_size=context.block_size\n"
        "        )\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    context = ExecutorContext(
        spec=SPEC,
        model=None,
        block_size=4,
        num_blocks=6,
        dtype="float32",
        kv_cache_dtype="auto",
        instruction_set="auto",
        device="cpu",
        max_tokens=64,
        num_threads=1,
        kernel_cache=tmp_path,
    )
    built = build_executor("my_executor:Factories.make", context)
    assert built.executor.pool.shape == (6, 4)  # type: ignore[attr-defined]
    assert built.name == "my_executor:Factories.make"
    assert built.numerics_id == "simulated/blake2b"
