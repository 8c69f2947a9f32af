"""Certificates for tests, made by the `openssl` command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


def openssl(*arguments: str | Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes the certificates, is not installed")
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, as files."""

    cert: str
    key: str


class Authority:
    """Signs certificates. `ca`: the file by which it is believed."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._key = directory / f"{name}.key"
        self.ca = str(directory / f"{name}.pem")
        openssl("req", "-x509", *self._new(self._key), "-out", self.ca, "-days", "2")

    def _new(self, key: Path) -> list[str | Path]:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        return [*curve, "-subj", f"/CN={key.stem}", "-keyout", key]

    def issue(self, name: str) -> Identity:
        """A certificate for this machine, good for servers and clients."""
        base = self._directory / f"{self._name}-{name}"
        key, cert = base.with_suffix(".key"), base.with_suffix(".pem")
        request, extensions = base.with_suffix(".csr"), base.with_suffix(".ext")
        extensions.write_text(NAMES + "\n")
        openssl("req", "-new", *self._new(key), "-out", request)
        signed = ("-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", request, *signed, "-out", cert, "-extfile", extensions)
        return Identity(str(cert), str(key))
