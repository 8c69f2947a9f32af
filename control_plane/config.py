"""Configuration of the control plane: the only module of it that reads the environment.

Flags > `HETERO_*` environment > JSON file > defaults. One JSON file may serve both planes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from control_plane.config_checks import check_together
from control_plane.core.embedding import POOLINGS
from control_plane.core.interface import MOST_DRAFTS
from control_plane.text.answers.formats import AUTO, REASONING_PARSERS, TOOL_CALL_PARSERS
from control_plane.text.template_kwargs import read_template_kwargs
from planes.address import Address, host_address, parse_address
from planes.errors import ConfigError
from planes.known_keys import COMPUTE_PLANE_KEYS, FRONT_DOOR_KEYS
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
from planes.tls_files import ClientFiles, ServerFiles, client_files, server_files

MAX_COUNT = 1 << 20

DEFAULT_HTTP_PORT = 3000

COMPUTE_TLS_PREFIX = "compute_tls_"

OTHER_KEYS = COMPUTE_PLANE_KEYS | FRONT_DOOR_KEYS
"""Keys of a JSON file that belong to somebody else, hence no mistakes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingLimits:
    """How much is computed at once. The compute plane's own limits lower these where smaller."""

    max_batch_size: int = setting(
        32, help="rows (sequences) of one step", minimum=1, maximum=MAX_COUNT
    )
    max_num_seqs: int = setting(
        256, help="sequences that run at once, one a sample or beam", minimum=1, maximum=MAX_COUNT
    )
    max_model_len: int = setting(
        2048, help="prompt and completion tokens of one request", minimum=2, maximum=1 << 30
    )
    max_total_tokens: int = setting(
        4096, help="tokens computed by one step", minimum=1, maximum=MAX_COUNT
    )
    prefill_chunk: int | None = setting(
        None,
        help="tokens of prompts that one step computes; default: what the compute plane prefers",
        minimum=1,
        maximum=MAX_COUNT,
    )
    memory_threshold: float = setting(
        0.9, help="share of the block pool above which no request is admitted", above=0, maximum=1
    )
    max_queued_requests: int = setting(
        4096, help="requests that wait; more are refused", minimum=1, maximum=MAX_COUNT
    )
    prefix_cache: bool = setting(
        True, help="reuse the KV blocks of prompt prefixes computed before"
    )
    speculative_tokens: int = setting(
        0,
        help="tokens of an answer that one step may guess from the text so far, or by the compute "
        "plane's draft model (--draft-model), and keeps where right; 0: none",
        minimum=0,
        maximum=MOST_DRAFTS,
    )
    prompt_lookup_min: int = setting(
        3, help="tokens that must have stood in the text before for a guess", minimum=1, maximum=64
    )
    grammar_drafts: bool = setting(
        True,
        help="guess what the form of an answer makes likely, several tokens a step, and keep what "
        "is right",
    )
    scheduler: str | None = setting(None, help="module:attribute of your own, instead of ours")
    kv_cache_manager: str | None = setting(
        None, help="module:attribute of your own, instead of ours"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlaneConfig(SchedulingLimits):
    """Everything the control plane can be told. Raises ConfigError listing every problem."""

    compute: str | None = setting(
        None, help="address of the compute plane: unix:PATH or HOST:PORT; several: A,B (required)"
    )
    allow_numerics_change: bool = setting(
        False,
        help="let started requests of a lost compute plane go on where results have other bits",
    )
    listen: str | None = setting(
        None, help="full listen address, unix:PATH or HOST:PORT; overrides host and port"
    )
    grpc_host: str = setting("127.0.0.1", help="host of the gRPC port")
    grpc_port: int = setting(50051, help="gRPC port; 0: any free one", minimum=0, maximum=65535)
    http: bool = setting(True, help="OpenAI-compatible HTTP too (needs the extra `http`)")
    http_host: str = setting("127.0.0.1", help="host of the HTTP port")
    http_port: int | None = setting(
        None,
        help=f"HTTP port, {DEFAULT_HTTP_PORT} if not given; 0: any free one",
        minimum=0,
        maximum=65535,
    )
    http_cors_origins: str | None = setting(
        None,
        help="web pages that may use the HTTP port from a browser: ORIGIN,ORIGIN (such as "
        "https://chat.example.org) or *",
    )
    allow_insecure: bool = setting(
        False, help="allow plaintext on addresses that other machines can reach"
    )
    tls_cert: str | None = setting(
        None, help="PEM file of this server's certificate and its chain: TLS on every port"
    )
    tls_key: str | None = setting(None, help="PEM file of the certificate's private key")
    tls_client_ca: str | None = setting(
        None, help="PEM file of authorities: clients must show a certificate that one has signed"
    )
    compute_tls_ca: str | None = setting(
        None, help="PEM file of the compute plane's authority: TLS to it"
    )
    compute_tls_cert: str | None = setting(
        None, help="PEM file of the certificate that the compute plane is shown"
    )
    compute_tls_key: str | None = setting(None, help="PEM file of that certificate's private key")
    api_tokens: str | None = setting(
        None, help="file of `hetero-infer token`: clients must have one of its tokens"
    )
    metrics_compat: str | None = setting(
        None, help="repeat the metrics that vLLM has under its names (vllm:…)", choices=("vllm",)
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        help="http(s)://HOST:PORT of an OpenTelemetry collector that gets a span of every request",
    )
    pipeline_depth: int = setting(
        8,
        help="batches under way at once, at most; 1: wait for each; from 3 on: more than 2 only "
        "while the device waits for them",
        minimum=1,
        maximum=8,
    )
    compute_grace: float = setting(
        30.0,
        help="seconds that requests outlive the compute plane before they fail",
        minimum=0,
        maximum=86400,
    )
    record: str | None = setting(
        None, help="new file that gets every batch and output, for `hetero-infer replay`"
    )
    chat_template: str | None = setting(
        None, help="file with the chat template to use instead of the model's (Jinja2)"
    )
    chat_template_kwargs: str | None = setting(
        None,
        help='variables of the chat template, unless requests set them: {"enable_thinking": false}',
        read=read_template_kwargs,
        metavar="JSON",
    )
    tool_call_parser: str = setting(
        AUTO,
        help="format of tool calls in answers of chats; auto: as the chat template shows",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = setting(
        AUTO,
        help="split reasoning off answers of chats; auto: if the chat template knows its marks",
        choices=REASONING_PARSERS,
    )
    pooling: str = setting(
        AUTO,
        help="what embeddings are made of; auto: as the model's files say, or else its last token",
        choices=POOLINGS,
    )
    max_unread_tokens: int = setting(
        2048,
        help="tokens of an answer that wait for a slow reader before it is cut off",
        minimum=1,
        maximum=MAX_COUNT,
    )
    shutdown_timeout: float = setting(
        30.0, help="seconds that running requests get to finish", minimum=0, maximum=86400
    )
    log_level: str = as_in(ProcessSettings, "log_level")
    log_format: str = as_in(ProcessSettings, "log_format")
    ready_fd: int | None = as_in(ProcessSettings, "ready_fd")
    lifeline_fd: int | None = as_in(ProcessSettings, "lifeline_fd")

    def __post_init__(self) -> None:
        """Check every field, and what they must be together."""
        check(self)
        check_together(self)

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """Origins of the web pages that may use the HTTP port; `*`: all."""
        if self.http_cors_origins is None:
            return ()
        return tuple(origin.strip() for origin in self.http_cors_origins.split(","))

    @property
    def tls_files(self) -> ServerFiles | None:
        """The files of this plane's own ports; None: plaintext."""
        return server_files(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def compute_tls_files(self) -> ClientFiles | None:
        """The files for the connections to compute planes; None: plaintext."""
        return client_files(
            self.compute_tls_ca,
            self.compute_tls_cert,
            self.compute_tls_key,
            prefix=COMPUTE_TLS_PREFIX,
        )

    @property
    def compute_addresses(self) -> tuple[Address, ...]:
        """Where the compute planes listen, each once."""
        names = [name.strip() for name in (self.compute or "").split(",")]
        addresses = tuple(parse_address(name, key="compute") for name in names)
        if len(set(addresses)) < len(addresses):
            raise ConfigError(f"compute: every address once, got {self.compute!r}", field="compute")
        return addresses

    @property
    def listen_address(self) -> Address:
        """Where this plane listens."""
        if self.listen is not None:
            return parse_address(self.listen, key="listen")
        return host_address(self.grpc_host, self.grpc_port, key="grpc_host")

    @property
    def listen_flag(self) -> str:
        """What says so on the command line."""
        return "--listen" if self.listen is not None else "--grpc-port"

    @property
    def http_address(self) -> Address | None:
        """Where this plane listens for HTTP; None: nowhere."""
        if not self.http:
            return None
        port = DEFAULT_HTTP_PORT if self.http_port is None else self.http_port
        return host_address(self.http_host, port, key="http_host")


def service_manager() -> ServiceManager:
    """Return the service manager of this process, if there is one."""
    return ServiceManager.of(os.environ)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and the names in its file that nobody knows."""

    config: ControlPlaneConfig
    unknown_keys: tuple[str, ...] = ()
    unknown_variables: tuple[str, ...] = ()
    """A line for each `HETERO_*` variable that nobody knows."""


def load_config(argv: Sequence[str], *, prog: str = "control_plane") -> LoadedConfig:
    """Read flags, environment and the JSON file named by `--config` or `HETERO_CONFIG`."""
    parser = PlaneArguments(
        ControlPlaneConfig,
        prog=prog,
        description="The control plane: tokenizer, scheduler, KV page tables, gRPC API.",
    )
    environ = os.environ
    flags = parser.read(argv)
    file_name = flags.pop("config") or environ.get("HETERO_CONFIG")
    file = read_config_file(Path(file_name)) if file_name else {}
    config = resolve(
        ControlPlaneConfig,
        Layers(flags=flags, environ=environ, file=file, file_name=file_name or "config file"),
    )
    unknown = keys_unknown_to(file, ControlPlaneConfig)
    elsewhere = {ENV_PREFIX + name.upper() for name in (*OTHER_KEYS, "config", "api_token")}
    return LoadedConfig(
        config,
        tuple(key for key in unknown if key not in OTHER_KEYS),
        tuple(unknown_variables(environ, ControlPlaneConfig, also=elsewhere)),
    )
