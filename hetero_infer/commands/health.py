"""`hetero-infer health`: whether a plane serves, for who probes with a command.

A container's health check does, and a script that waits. The question is gRPC's own
(`grpc.health.v1`), so that other tools can ask it too.
Exit statuses: 0 it serves; 1 it does not, or was not reached; 2 the question makes no sense.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import typer

from hetero_infer.commands.options import options_of, refuse_root_flags, with_options
from planes.address import Address, parse_address
from planes.settings import Layers, check, resolve, setting
from planes.tls_files import ClientFiles, client_files

EXIT_SERVES = 0
EXIT_SERVES_NOT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """One question. Raises ConfigError listing every problem."""

    target: str = setting("127.0.0.1:50051", help="either plane: unix:PATH or HOST:PORT")
    service: str | None = setting(
        None, help="full name of a gRPC service that is asked about; default: the plane as a whole"
    )
    timeout: float = setting(
        3.0, help="seconds until no answer is an answer", minimum=0.001, maximum=86400
    )
    tls_ca: str | None = setting(None, help="PEM file of the plane's authority: TLS to --target")
    tls_cert: str | None = setting(None, help="PEM file of the certificate the plane is shown")
    tls_key: str | None = setting(None, help="PEM file of that certificate's private key")

    def __post_init__(self) -> None:
        check(self)

    @property
    def address(self) -> Address:
        """Where the plane listens. Raises ConfigError."""
        return parse_address(self.target, key="target")

    @property
    def tls(self) -> ClientFiles | None:
        """TLS to the plane; None: plaintext. Raises ConfigError for a part without the rest."""
        return client_files(self.tls_ca, self.tls_cert, self.tls_key)


@with_options(options_of(HealthSettings, lambda _: "Plane"))
def health_command(context: typer.Context, **flags: object) -> Callable[[], int]:
    """Ask either plane whether it serves; status 0 if so, 1 if not or if nothing answers."""

    def run() -> int:
        refuse_root_flags(context.obj, "health")
        return health(resolve(HealthSettings, Layers(flags=flags)))

    return run


def health(settings: HealthSettings) -> int:
    """Ask a plane and print its word, SERVING or another; the exit status.

    Raises EngineError where there was no answer, in words that say why.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from hetero_infer.channel import Route
    from hetero_infer.client.unreached import error_of

    route = Route(settings.address, tls=settings.tls)
    request = health_pb2.HealthCheckRequest(service=settings.service or "")
    with route.open() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(request, timeout=settings.timeout)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise error_of(error, route) from None
            sys.stdout.write(f"{route.address} has no service {settings.service}\n")
            return EXIT_SERVES_NOT
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    sys.stdout.write(f"{status}\n")
    return EXIT_SERVES if status == "SERVING" else EXIT_SERVES_NOT
