"""What a replay can be told on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planes.address import Address, parse_address
from planes.errors import ConfigError
from planes.settings import check, setting
from planes.tls_files import ClientFiles, check_plaintext, client_files, uses_tls

if TYPE_CHECKING:
    from planes.tls import ClientTls

TLS_PREFIX = "compute_tls_"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """One replay. Raises ConfigError listing every problem."""

    compute: str | None = setting(
        None, help="address of the compute plane: unix:PATH or HOST:PORT (required)"
    )
    all: bool = setting(False, help="go on behind the first difference and report every one")
    tolerance: float | None = setting(
        None,
        help="how far log-probabilities may differ, 0: every bit counts; default: by the numerics",
        minimum=0,
        maximum=1000,
    )
    take_over: bool = setting(
        False, help="take the plane away from a control plane that is using it"
    )
    compute_tls_ca: str | None = setting(
        None, help="PEM file of the compute plane's authority: TLS to it"
    )
    compute_tls_cert: str | None = setting(
        None, help="PEM file of the certificate that the compute plane is shown"
    )
    compute_tls_key: str | None = setting(None, help="PEM file of that certificate's private key")
    allow_insecure: bool = setting(False, help="allow plaintext to addresses on other machines")

    def __post_init__(self) -> None:
        check(self)
        if self.compute is None:
            raise ConfigError(
                "compute (from --compute) is required: the compute plane's address, unix:PATH or "
                "HOST:PORT",
                field="compute",
            )
        is_tls = self._tls_files is not None
        if is_tls and not uses_tls(self.address):
            raise ConfigError(
                "compute_tls_ca: there is no TLS on a unix socket", field="compute_tls_ca"
            )
        check_plaintext(
            self.address, key="compute", is_tls=is_tls, allow_insecure=self.allow_insecure
        )

    @property
    def address(self) -> Address:
        """Where the compute plane listens."""
        return parse_address(self.compute or "", key="compute")

    @property
    def tls(self) -> ClientTls | None:
        """TLS of the connection; None: plaintext. Raises ConfigError for unusable files."""
        from planes.tls import ClientTls  # gRPC comes with it, which --help need not wait for

        files = self._tls_files
        return None if files is None else ClientTls(files, prefix=TLS_PREFIX)

    @property
    def _tls_files(self) -> ClientFiles | None:
        return client_files(
            self.compute_tls_ca, self.compute_tls_cert, self.compute_tls_key, prefix=TLS_PREFIX
        )
