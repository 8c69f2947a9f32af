"""What settings of the control plane must be together; each by itself is checked where declared."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from planes.errors import ConfigError
from planes.listening import check_exposure
from planes.tls_files import uses_tls

if TYPE_CHECKING:
    from control_plane.config import ControlPlaneConfig

ORIGIN: Final = re.compile(r"https?://[^/?#@\s]+")


def check_together(config: ControlPlaneConfig) -> None:
    """Raise ConfigError for the first that does not go with the others."""
    _check_compute(config)
    _check_http(config)
    endpoint = config.otlp_traces_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint must be http://HOST:PORT or https://HOST:PORT, got {endpoint!r}",
            field="otlp_traces_endpoint",
        )
    _check_own_ports(config)


def _check_compute(config: ControlPlaneConfig) -> None:
    """Check where the compute planes are and how they are spoken to."""
    if config.compute is None:
        raise ConfigError(
            "compute (from --compute or HETERO_COMPUTE) is required: the compute plane's "
            "address, unix:PATH or HOST:PORT",
            field="compute",
        )
    addresses = config.compute_addresses
    if config.record is not None and len(addresses) > 1:
        raise ConfigError(
            f"record: a recording is of one compute plane, compute names {len(addresses)}",
            field="record",
        )
    is_tls = config.compute_tls_files is not None
    if is_tls and not any(uses_tls(address) for address in addresses):
        raise ConfigError(
            "compute_tls_ca: there is no TLS on a unix socket, and compute names nothing else",
            field="compute_tls_ca",
        )
    for address in addresses:
        check_exposure(address, key="compute", is_tls=is_tls, allow_insecure=config.allow_insecure)


def _check_http(config: ControlPlaneConfig) -> None:
    """Check what takes an HTTP port, and origins: what no browser calls one would never match."""
    if not config.http:
        for key, what in (
            ("metrics_compat", "the metrics page is on the HTTP port, which is off (http)"),
            ("http_cors_origins", "the HTTP port is off (http)"),
        ):
            if getattr(config, key) is not None:
                raise ConfigError(f"{key}: {what}", field=key)
    for origin in config.cors_origins:
        if origin != "*" and ORIGIN.fullmatch(origin) is None:
            raise ConfigError(
                "http_cors_origins must be * or origins, http(s)://HOST or "
                f"http(s)://HOST:PORT without a path, with commas between, got {origin!r}",
                field="http_cors_origins",
            )


def _check_own_ports(config: ControlPlaneConfig) -> None:
    """Check where this plane listens."""
    own = [("listen", config.listen_address)]
    http = config.http_address
    if http is not None:
        own.append(("http_host", http))
    is_tls = config.tls_files is not None
    if is_tls and not any(uses_tls(address) for _, address in own):
        raise ConfigError(
            "tls_cert: there is no TLS on a unix socket, and nothing else is listened on",
            field="tls_cert",
        )
    # Port 0 gives each one of its own.
    if http is not None and http.port != 0 and http == config.listen_address:
        raise ConfigError(
            f"http_port: {http} is where gRPC listens too ({config.listen_flag}); each needs a "
            "port of its own",
            field="http_port",
        )
    for key, address in own:
        check_exposure(address, key=key, is_tls=is_tls, allow_insecure=config.allow_insecure)
