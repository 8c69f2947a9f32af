"""Configuration of the compute plane: the only module of it that reads the environment.

Flags > `HETERO_*` environment > JSON file > defaults. One JSON file may serve both planes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compute_plane.adapter_sources import AdapterSource, adapter_sources
from planes.address import Address, parse_address
from planes.default_int import DefaultInt
from planes.errors import ConfigError
from planes.known_keys import CONTROL_PLANE_KEYS, FRONT_DOOR_KEYS
from planes.listening import check_exposure
from planes.near_names import unknown_variables
from planes.plane_arguments import PlaneArguments
from planes.process_settings import ProcessSettings
from planes.service_manager import ServiceManager
from planes.settings import (
    ENV_PREFIX,
    Layers,
    as_in,
    check,
    read_config_file,
    resolve,
    setting,
)
from planes.settings import unknown_keys as keys_unknown_to
from planes.tls_files import ServerFiles, server_files, uses_tls

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES: Final = ("auto", "float32", "bfloat16", "float16", "int8", "float8")
INSTRUCTION_SETS: Final = (
    "auto", "amx", "zen4", "avx512_bf16", "avx512", "avx2_vnni", "avx2", "neon", "generic",
)  # fmt: skip
"""Those of `kernels.cpu.instruction_set`, whose import would bring the compiler."""
DEVICES: Final = ("auto", "cpu", "cuda", "cuda:N")
NUMBERED_DEVICE: Final = "cuda:(0|[1-9][0-9]{0,3})"
AUTO: Final = "auto"
NUM_BLOCKS: Final = DefaultInt(1024)
EXECUTORS: Final = ("auto", "cpu", "cuda", "simulated")

KNOWN_ELSEWHERE: Final = CONTROL_PLANE_KEYS | FRONT_DOOR_KEYS
"""Keys of a JSON file that belong to somebody else, hence no mistakes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlaneConfig:
    """Everything the compute plane can be told. Raises ConfigError listing every problem."""

    listen: str = setting("127.0.0.1:50052", help="listen address, unix:PATH or HOST:PORT")
    model: str = setting(
        "default",
        help="default (the embedded model), a GGUF file, a Hugging Face directory or a hub id",
    )
    verify_model: bool = setting(True, help="check the embedded model's SHA-256 at start")
    long_context: bool = setting(
        False,
        help="contexts of a model with LongRoPE (Phi-3.5, Phi-4-mini) may be as long as it has "
        "them (--max-model-len says how long they are); all positions turn then as in long ones, "
        "which changes what it says in short ones",
    )
    draft_model: str | None = setting(
        None,
        help="a smaller model of the same vocabulary that guesses what the model says, a few "
        "tokens ahead (--speculative-tokens says how many); named as --model is",
    )
    draft_p_min: float = setting(
        0.2,
        help="how likely all tokens must be right that the draft model guesses at once",
        minimum=0,
        maximum=1,
    )
    lora: str | None = setting(
        None,
        help="adapters that requests may name as their model: NAME=PATH of a PEFT directory or a "
        "GGUF file, several with commas between them",
    )
    executor: str = setting(
        "auto",
        help="auto (by device), cpu, cuda (with --device cpu: slow, to develop and test it), "
        "simulated (no model), or a custom one as module:attribute",
    )
    device: str = setting(
        AUTO,
        help="where the model runs; auto: on a CUDA device where one can be used, else cpu",
        choices=DEVICES,
        pattern=NUMBERED_DEVICE,
    )
    dtype: str = setting(
        "auto",
        help="what weights are computed in; auto: as the file has them, quantised ones too; "
        "float16: on cuda only",
        choices=DTYPES,
    )
    kv_cache_dtype: str = setting(
        "auto",
        help="what keys and values are kept in; auto: float32 if --dtype float32, else bfloat16; "
        "on cuda: what is computed in; float16: on cuda only",
        choices=KV_CACHE_DTYPES,
    )
    instruction_set: str = setting(
        "auto",
        help="instructions of the CPU kernels; auto: the best this processor has",
        choices=INSTRUCTION_SETS,
    )
    cuda_graph: bool = setting(
        True, help="capture decode steps as graphs at start, on a device that has them"
    )
    block_size: int = setting(16, help="tokens of one KV block", minimum=1, maximum=1024)
    max_num_blocks: int | str = setting(
        NUM_BLOCKS,
        help="KV blocks of the pool; auto, which is the default on cuda: as many as fit",
        minimum=1,
        maximum=(1 << 31) - 1,
        words=(AUTO,),
    )
    gpu_memory_utilization: float = setting(
        0.9,
        help="share of the device's memory that weights, steps and the KV pool take together at "
        "most; on the CPU it counts for --max-num-blocks auto",
        above=0,
        maximum=1,
    )
    swap_space: float = setting(
        0.0,
        help="GiB of host memory that KV blocks may be swapped to; 0: preempted requests are "
        "computed anew",
        minimum=0,
        maximum=1 << 20,
    )
    gpu_memory_limit: float | None = setting(
        None,
        help="GiB of a CUDA device that weights, KV pool and working memory may take; the first "
        "layers of the model that fit run there, the others on the CPU; default: no limit",
        above=0,
        maximum=1 << 20,
    )
    max_slots: int = setting(
        1024, help="sequences the plane remembers at once", minimum=1, maximum=1 << 16
    )
    max_rows: int = setting(
        1024, help="rows of one batch at most", minimum=1, maximum=(1 << 16) - 1
    )
    max_tokens_per_batch: int = setting(
        16384, help="tokens of one batch at most", minimum=1, maximum=1 << 20
    )
    num_threads: int | None = setting(
        None, help="threads of the CPU executor; default: the CPUs this process may use",
        minimum=1, maximum=4096,
    )  # fmt: skip
    kernel_cache: str | None = setting(
        None, help="directory for compiled kernels; default: below the user's cache directory"
    )
    allow_insecure: bool = setting(
        False, help="allow plaintext on addresses that other machines can reach"
    )
    tls_cert: str | None = setting(
        None, help="PEM file of this plane's certificate and its chain: TLS on its port"
    )
    tls_key: str | None = setting(None, help="PEM file of the certificate's private key")
    tls_client_ca: str | None = setting(
        None, help="PEM file of authorities: a control plane needs a certificate one has signed"
    )
    shutdown_timeout: float = setting(
        30.0, help="seconds that batches under way get to finish", minimum=0, maximum=86400
    )
    log_level: str = as_in(ProcessSettings, "log_level")
    log_format: str = as_in(ProcessSettings, "log_format")
    ready_fd: int | None = as_in(ProcessSettings, "ready_fd")
    lifeline_fd: int | None = as_in(ProcessSettings, "lifeline_fd")

    def __post_init__(self) -> None:
        """Check every field, and what they must be together."""
        check(self)
        address = self.listen_address
        is_tls = self.tls_files is not None
        if is_tls and not uses_tls(address):
            raise ConfigError(
                f"tls_cert: there is no TLS on a unix socket, and listen is {address}",
                field="tls_cert",
            )
        check_exposure(address, key="listen", is_tls=is_tls, allow_insecure=self.allow_insecure)
        if self.executor not in EXECUTORS and ":" not in self.executor:
            raise ConfigError(
                "executor must be auto, cpu, cuda, simulated or module:attribute, "
                f"got {self.executor!r}",
                field="executor",
            )

        if self.max_num_blocks == AUTO and self.gpu_memory_limit is not None:
            raise ConfigError(
                "max_num_blocks: auto and gpu_memory_limit exclude each other: which layers find "
                "room depends on the pool; give a number of blocks",
                field="max_num_blocks",
            )
        if self.draft_model is not None:
            self._check_draft_model()
        if self.adapter_sources and self.gpu_memory_limit is not None:
            raise ConfigError(
                "lora and gpu_memory_limit exclude each other: layers on the host take no adapters",
                field="lora",
            )

    def _check_draft_model(self) -> None:
        """Refuse what shares out memory without knowing of a second model."""
        if self.executor == "simulated":
            raise ConfigError(
                "draft_model: the executor simulated has no model to guess for", field="draft_model"
            )
        if self.max_num_blocks == AUTO:
            raise ConfigError(
                "max_num_blocks: auto and draft_model exclude each other: the draft model's pool "
                "has as many blocks; give a number",
                field="max_num_blocks",
            )
        if self.gpu_memory_limit is not None:
            raise ConfigError(
                "gpu_memory_limit and draft_model exclude each other: the limit is of one model",
                field="gpu_memory_limit",
            )

    @property
    def listen_address(self) -> Address:
        """Where this plane listens."""
        return parse_address(self.listen, key="listen")

    @property
    def adapter_sources(self) -> tuple[AdapterSource, ...]:
        """Adapters by name and path."""
        return adapter_sources(self.lora)

    @property
    def tls_files(self) -> ServerFiles | None:
        """The files of this plane's port; None: plaintext."""
        return server_files(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, as told or by default."""
        return NUM_BLOCKS if isinstance(self.max_num_blocks, str) else self.max_num_blocks

    def fills_memory_of(self, device: str) -> bool:
        """Whether the pool has as many blocks as fit instead.

        `device`: where it lies: "cpu", "cuda" or "cuda:N". Which layers find room beside a pool,
        below a limit, takes a number, and so does a pool beside a draft model's.
        """
        is_left_open = isinstance(self.max_num_blocks, DefaultInt) and device != "cpu"
        shares = self.gpu_memory_limit is not None or self.draft_model is not None
        return self.max_num_blocks == AUTO or (is_left_open and not shares)

    @property
    def swap_bytes(self) -> int:
        """Bytes of the host pool."""
        return int(self.swap_space * (1 << 30))

    @property
    def gpu_memory_limit_bytes(self) -> int | None:
        """Bytes that may be taken on a CUDA device; None: no limit."""
        return None if self.gpu_memory_limit is None else int(self.gpu_memory_limit * (1 << 30))

    @property
    def effective_num_threads(self) -> int:
        """Threads to compute with: as told, or one for each CPU this process may use."""
        return self.num_threads or len(os.sched_getaffinity(0))

    @property
    def kernel_cache_root(self) -> Path:
        """Where compiled kernels are kept."""
        if self.kernel_cache is not None:
            return Path(self.kernel_cache).expanduser()
        return default_kernel_cache(os.environ)


def service_manager() -> ServiceManager:
    """Return the service manager of this process, if there is one."""
    return ServiceManager.of(os.environ)


def default_kernel_cache(environ: Mapping[str, str]) -> Path:
    """Return the user's cache directory for kernels, or one for temporary files without a home."""
    base = environ.get("XDG_CACHE_HOME", "")
    # What is relative is to be ignored, says its specification; the same kernels would be compiled
    # anew in each directory that a plane is started in.
    if not os.path.isabs(base) and environ.get("HOME"):
        base = str(Path(environ["HOME"]) / ".cache")
    if os.path.isabs(base) and _can_be_written(Path(base)):
        return Path(base) / "hetero-paged-infer" / "kernels"
    return Path(tempfile.gettempdir()) / f"hetero-paged-infer-kernels-{os.geteuid()}"


def _can_be_written(path: Path) -> bool:
    """Whether a directory can be written, or made in the nearest one that exists."""
    for candidate in (path, *path.parents):
        if candidate.exists():
            return candidate.is_dir() and os.access(candidate, os.W_OK | os.X_OK)
    return False


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and the names in its file that nobody knows."""

    config: ComputePlaneConfig
    unknown_keys: tuple[str, ...] = ()
    unknown_variables: tuple[str, ...] = ()
    """A line for each `HETERO_*` variable that nobody knows."""


def load_config(argv: Sequence[str], *, prog: str = "compute_plane") -> LoadedConfig:
    """Read flags, environment and the JSON file named by `--config` or `HETERO_CONFIG`.

    Raises ConfigError; SystemExit for `--help` and unknown flags.
    """
    parser = PlaneArguments(
        ComputePlaneConfig,
        prog=prog,
        description="The compute plane: weights, KV block pool, executor; one process per device.",
    )
    flags = parser.read(argv)
    file_name = flags.pop("config") or os.environ.get("HETERO_CONFIG")
    file = read_config_file(Path(file_name)) if file_name else {}
    config = resolve(
        ComputePlaneConfig,
        Layers(flags=flags, environ=os.environ, file=file, file_name=file_name or "config file"),
    )
    unknown = keys_unknown_to(file, ComputePlaneConfig)
    elsewhere = {ENV_PREFIX + name.upper() for name in (*KNOWN_ELSEWHERE, "config", "api_token")}
    return LoadedConfig(
        config,
        tuple(key for key in unknown if key not in KNOWN_ELSEWHERE),
        tuple(unknown_variables(os.environ, ComputePlaneConfig, also=elsewhere)),
    )
