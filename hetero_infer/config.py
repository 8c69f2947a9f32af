"""Configuration of the front door: the only module of it that reads the environment.

Every setting is declared once, by the plane it belongs to; here the two sets are put together and
taken apart again into the command lines of the two child processes.
Flags > `HETERO_*` environment > JSON file > defaults.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from compute_plane.config import ComputePlaneConfig
from control_plane.config import ControlPlaneConfig, SchedulingLimits
from hetero_infer.generation_config import GenerationConfig
from planes.address import Address
from planes.logs import LOG_LEVELS
from planes.near_names import did_you_mean, unknown_variables
from planes.settings import (
    ENV_PREFIX,
    Layers,
    as_in,
    check,
    read_config_file,
    resolve,
    setting,
    settings_of,
    to_flags,
    unknown_keys,
)

LISTENING = frozenset(
    {
        "allow_insecure",
        "allow_numerics_change",
        "api_tokens",
        "chat_template",
        "chat_template_kwargs",
        "compute_tls_ca",
        "compute_tls_cert",
        "compute_tls_key",
        "grpc_host",
        "grpc_port",
        "http",
        "http_cors_origins",
        "http_host",
        "http_port",
        "listen",
        "max_unread_tokens",
        "metrics_compat",
        "otlp_traces_endpoint",
        "reasoning_parser",
        "tls_cert",
        "tls_client_ca",
        "tls_key",
        "tool_call_parser",
    }
)
WIRING = LISTENING | {"compute", "lifeline_fd", "ready_fd"}
"""Settings of the planes that say who reaches them and how: given by whoever starts them."""

ConfigT = TypeVar("ConfigT")


def _names_of(plane: type) -> set[str]:
    """Names of a plane's settings, without the wiring."""
    return {item.name for item in settings_of(plane)} - WIRING


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SchedulingLimits):
    """Configuration of an engine: both planes, wherever they run.

    Values are checked by `validate`, which everything that takes a configuration calls.
    """

    block_size: int = as_in(ComputePlaneConfig, "block_size")
    max_num_blocks: int | str = as_in(ComputePlaneConfig, "max_num_blocks")
    gpu_memory_utilization: float = as_in(ComputePlaneConfig, "gpu_memory_utilization")
    swap_space: float = as_in(ComputePlaneConfig, "swap_space")
    gpu_memory_limit: float | None = as_in(ComputePlaneConfig, "gpu_memory_limit")
    model: str = as_in(ComputePlaneConfig, "model")
    draft_model: str | None = as_in(ComputePlaneConfig, "draft_model")
    draft_p_min: float = as_in(ComputePlaneConfig, "draft_p_min")
    lora: str | None = as_in(ComputePlaneConfig, "lora")
    dtype: str = as_in(ComputePlaneConfig, "dtype")
    kv_cache_dtype: str = as_in(ComputePlaneConfig, "kv_cache_dtype")
    instruction_set: str = as_in(ComputePlaneConfig, "instruction_set")
    device: str = as_in(ComputePlaneConfig, "device")
    executor: str = as_in(ComputePlaneConfig, "executor")
    cuda_graph: bool = as_in(ComputePlaneConfig, "cuda_graph")
    num_threads: int | None = as_in(ComputePlaneConfig, "num_threads")
    long_context: bool = as_in(ComputePlaneConfig, "long_context")
    verify_model: bool = as_in(ComputePlaneConfig, "verify_model")
    kernel_cache: str | None = as_in(ComputePlaneConfig, "kernel_cache")
    max_slots: int = as_in(ComputePlaneConfig, "max_slots")
    max_rows: int = as_in(ComputePlaneConfig, "max_rows")
    max_tokens_per_batch: int = as_in(ComputePlaneConfig, "max_tokens_per_batch")
    pipeline_depth: int = as_in(ControlPlaneConfig, "pipeline_depth")
    compute_grace: float = as_in(ControlPlaneConfig, "compute_grace")
    pooling: str = as_in(ControlPlaneConfig, "pooling")
    record: str | None = as_in(ControlPlaneConfig, "record")
    shutdown_timeout: float = as_in(ControlPlaneConfig, "shutdown_timeout")
    log_level: str = setting(
        "warning", help="least severe log line shown (`serve`: info)", choices=LOG_LEVELS
    )
    log_format: str = as_in(ControlPlaneConfig, "log_format")

    def validate(self) -> None:
        """Raise ConfigError that names every value out of range, with its key."""
        check(self)
        self._in_plane(ComputePlaneConfig)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> EngineConfig:
        """Read a JSON object whose keys are field names; every key is optional.

        The environment has no part in it. Raises ConfigError for values out of range; a key that
        nobody knows is a UserWarning that names it.
        """
        file = read_config_file(Path(path))
        for key in unknown_keys(file, *ALL_CONFIGS):
            warnings.warn(f"config file {os.fspath(path)}: {_in_vain(key)}", stacklevel=2)
        return resolve(cls, Layers(file=file, file_name=os.fspath(path)))

    def compute_plane_flags(self, listen: Address) -> list[str]:
        """Spell the command line of a compute plane that listens there."""
        return [*to_flags(self, _names_of(ComputePlaneConfig)), f"--listen={listen}"]

    def control_plane_flags(self, compute: Address | str, *listen_flags: str) -> list[str]:
        """Spell the command line of a control plane; `listen_flags` say where it listens.

        `compute`: one address, or the text of several. It serves HTTP only if they say so.
        """
        return [
            *to_flags(self, _names_of(ControlPlaneConfig)),
            f"--compute={compute}",
            "--no-http",
            *listen_flags,
        ]

    def _in_plane(self, plane: type, **wiring: object) -> None:
        """Let a plane's own configuration check what only it knows, before a process is started."""
        plane(**{name: getattr(self, name) for name in _names_of(plane)}, **wiring)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """What `serve` adds: where clients find it, and a compute plane that runs already."""

    grpc_host: str = as_in(ControlPlaneConfig, "grpc_host")
    grpc_port: int = as_in(ControlPlaneConfig, "grpc_port")
    listen: str | None = as_in(ControlPlaneConfig, "listen")
    http: bool = as_in(ControlPlaneConfig, "http")
    http_host: str = as_in(ControlPlaneConfig, "http_host")
    http_port: int | None = as_in(ControlPlaneConfig, "http_port")
    http_cors_origins: str | None = as_in(ControlPlaneConfig, "http_cors_origins")
    allow_insecure: bool = as_in(ControlPlaneConfig, "allow_insecure")
    allow_numerics_change: bool = as_in(ControlPlaneConfig, "allow_numerics_change")
    tls_cert: str | None = as_in(ControlPlaneConfig, "tls_cert")
    tls_key: str | None = as_in(ControlPlaneConfig, "tls_key")
    tls_client_ca: str | None = as_in(ControlPlaneConfig, "tls_client_ca")
    compute_tls_ca: str | None = as_in(ControlPlaneConfig, "compute_tls_ca")
    compute_tls_cert: str | None = as_in(ControlPlaneConfig, "compute_tls_cert")
    compute_tls_key: str | None = as_in(ControlPlaneConfig, "compute_tls_key")
    api_tokens: str | None = as_in(ControlPlaneConfig, "api_tokens")
    metrics_compat: str | None = as_in(ControlPlaneConfig, "metrics_compat")
    otlp_traces_endpoint: str | None = as_in(ControlPlaneConfig, "otlp_traces_endpoint")
    chat_template: str | None = as_in(ControlPlaneConfig, "chat_template")
    chat_template_kwargs: str | None = as_in(ControlPlaneConfig, "chat_template_kwargs")
    tool_call_parser: str = as_in(ControlPlaneConfig, "tool_call_parser")
    reasoning_parser: str = as_in(ControlPlaneConfig, "reasoning_parser")
    max_unread_tokens: int = as_in(ControlPlaneConfig, "max_unread_tokens")
    compute: str | None = setting(
        None,
        help="address of a compute plane that runs already, instead of starting one; several: A,B",
    )
    log_level: str = setting(
        "info", help="least severe log line shown (without `serve`: warning)", choices=LOG_LEVELS
    )

    def validate(self) -> None:
        """Raise ConfigError that names every value out of range, with its key."""
        EngineConfig.validate(self)  # no bare super(): slots=True makes a new class
        self._in_plane(
            ControlPlaneConfig,
            compute=self.compute or "unix:compute.sock",
            **{name: getattr(self, name) for name in LISTENING},
        )

    def listen_flags(self) -> list[str]:
        """Spell where the control plane listens."""
        return to_flags(self, LISTENING)


ALL_CONFIGS = (ServeConfig, GenerationConfig, ControlPlaneConfig, ComputePlaneConfig)
"""One JSON file may serve all of them: a key that none of these declares is a mistake."""

OTHER_VARIABLES = ("HETERO_CONFIG", "HETERO_API_TOKEN")


def _in_vain(key: str) -> str:
    known = {item.name for config in ALL_CONFIGS for item in settings_of(config)}
    return f"unknown key {key!r} is ignored{did_you_mean(key, known)}"


class Settings:
    """The layers of one command line, read once, from which configurations are made.

    `flags`: what the command line gave, None where it gave nothing; `config` names the JSON file.
    Raises ConfigError if the file cannot be read.
    """

    def __init__(self, flags: Mapping[str, object]) -> None:
        environ = os.environ
        file_name = flags.get("config") or environ.get("HETERO_CONFIG")
        self._file = read_config_file(Path(str(file_name))) if file_name else {}
        self.layers = Layers(
            flags=flags,
            environ=environ,
            file=self._file,
            file_name=str(file_name or "config file"),
        )

    def in_vain(self) -> list[str]:
        """Say of each key of the file and each variable that nobody knows it, one line each."""
        name = self.layers.file_name
        keys = unknown_keys(self._file, *ALL_CONFIGS)
        variables = unknown_variables(self.layers.environ, *ALL_CONFIGS, also=OTHER_VARIABLES)
        return [*(f"{name}: {_in_vain(key)}" for key in keys), *variables]

    def resolve(self, config: type[ConfigT]) -> ConfigT:
        """Make a configuration. Raises one ConfigError that lists every problem."""
        return resolve(config, self.layers)

    def gives(self, name: str) -> bool:
        """Whether any layer above the defaults says something about a setting."""
        layers = self.layers
        return (
            layers.flags.get(name) is not None
            or bool(layers.environ.get(ENV_PREFIX + name.upper()))
            or name in layers.file
        )


def api_token() -> str | None:
    """Return the token that clients show if they are given none: `HETERO_API_TOKEN`."""
    return os.environ.get("HETERO_API_TOKEN") or None


def child_environment(*extra_import_paths: str) -> dict[str, str]:
    """Return the environment of a plane that this process starts.

    The child imports what this process imports, and `extra_import_paths` after it; everything it is
    told about the engine stands on its command line, so no `HETERO_*` variable goes along.
    """
    own = os.environ
    environ = {key: value for key, value in own.items() if not key.startswith(ENV_PREFIX)}
    paths = [path or str(Path.cwd()) for path in (*sys.path, *extra_import_paths)]
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environ
