from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from compute_plane.config import ComputePlaneConfig, default_kernel_cache, load_config
from compute_plane.device import Placement, choose_placement, describe_device
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
    for words in ("block_size (from --block-size)", "got -1", "auto, cpu, cuda, cuda:N"):
        assert words in caught.value.message


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:17"])
def test_a_device_may_have_a_number_in_every_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
):
    assert ComputePlaneConfig(device=device).device == device
    assert load_config(["--device", device]).config.device == device
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"device": device}))
    assert load_config(["--config", str(file)]).config.device == device
    monkeypatch.setenv("HETERO_DEVICE", device)
    assert load_config([]).config.device == device


@pytest.mark.parametrize(
    "device", ["cuda:", "cuda:N", "cuda:-1", "cuda:01", "cuda:1.0", "cuda:99999", "cuda0", "cpu:0"]
)
def test_a_device_that_is_none_is_refused_with_those_there_are(device: str):
    with pytest.raises(ConfigError, match="must be one of auto, cpu, cuda, cuda:N, got") as info:
        load_config(["--device", device])
    assert info.value.field == "device"


def test_the_pool_fills_a_cuda_device_unless_a_number_is_said():
    for config in (ComputePlaneConfig(), load_config([]).config):
        assert config.num_blocks == 1024
        assert [config.fills_memory_of(device) for device in ("cpu", "cuda", "cuda:1")] == [
            False, True, True,
        ]  # fmt: skip
    for config in (
        ComputePlaneConfig(max_num_blocks=1024),
        load_config(["--max-num-blocks=1024"]).config,
    ):
        assert config.num_blocks == 1024
        assert not config.fills_memory_of("cuda")
    told = load_config(["--max-num-blocks=auto", "--gpu-memory-utilization=0.5"]).config
    assert told.fills_memory_of("cpu")
    assert told.gpu_memory_utilization == 0.5


def test_beside_a_limit_on_the_device_the_pool_has_a_number_of_blocks():
    assert not ComputePlaneConfig(gpu_memory_limit=1.0).fills_memory_of("cuda")
    with pytest.raises(ConfigError, match="give a number of blocks") as info:
        ComputePlaneConfig(max_num_blocks="auto", gpu_memory_limit=1.0)
    assert info.value.field == "max_num_blocks"


def test_a_host_that_nobody_knows_is_not_called_reachable(monkeypatch):
    def unknown(*_args, **_named):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"listen: the host nohost\.invalid is not known") as info:
        ComputePlaneConfig(listen="nohost.invalid:50052")
    assert info.value.field == "listen"


@pytest.mark.parametrize("share", ["0", "-0.1", "1.01", "nan", "much"])
def test_a_share_of_the_memory_is_more_than_nothing_and_at_most_all(share: str):
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization .* must be") as info:
        load_config(["--gpu-memory-utilization", share])
    assert info.value.field == "gpu_memory_utilization"


@pytest.mark.parametrize("listen", ["0.0.0.0:50052", "203.0.113.7:50052", "[::]:50052"])
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


def test_this_machine_describes_itself():
    device = describe_device("cpu", 2)
    assert device.name
    assert device.total_memory_bytes > 1 << 28


def test_kernels_are_cached_below_the_users_cache_or_else_the_temporary_directory(tmp_path: Path):
    home = {"HOME": str(tmp_path)}
    assert default_kernel_cache(home) == tmp_path / ".cache/hetero-paged-infer/kernels"
    other = {**home, "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    assert default_kernel_cache(other) == tmp_path / "xdg/hetero-paged-infer/kernels"
    assert default_kernel_cache({**home, "XDG_CACHE_HOME": "xdg"}) == default_kernel_cache(home)
    assert default_kernel_cache({"XDG_CACHE_HOME": "xdg"}) == default_kernel_cache({})
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
