"""What `hetero-infer serve` prints once it serves."""

from __future__ import annotations

import pytest

from hetero_infer.commands import serve
from hetero_infer.config import ServeConfig, child_environment
from hetero_infer.plane_process import PlaneProcess
from planes.extras import the_extra

PLANE = """
import os, sys
flags = dict(flag.lstrip("-").split("=") for flag in sys.argv[1:])
os.write(int(flags["ready-fd"]), b"READY 127.0.0.1:5{http}\\n")
os.close(int(flags["ready-fd"]))
os.read(int(flags["lifeline-fd"]), 1)
"""


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Start a `serve` whose control plane listens as it is told here; what is printed."""

    def start(http_address=None, **settings):
        http = "" if http_address is None else f"\\t{http_address}"
        (tmp_path / "said_plane.py").write_text(PLANE.replace("{http}", http))
        monkeypatch.setattr(
            serve,
            "start_control_plane",
            lambda *_: PlaneProcess("said_plane", [], environ=child_environment(str(tmp_path))),
        )
        planes = serve.ServedPlanes(ServeConfig(compute="unix:/there", **settings), tmp_path)
        try:
            planes.start()
        finally:
            planes.stop()
        return capsys.readouterr().out.splitlines()

    return start


def test_both_ports_are_told(printed):
    grpc, http = printed("127.0.0.1:6")
    assert grpc.startswith("Serving gRPC on 127.0.0.1:5 (control plane: pid ")
    assert http == "Serving HTTP on http://127.0.0.1:6"


def test_without_the_extra_it_is_told_that_there_is_no_http(printed):
    assert printed()[1:] == [f"No HTTP without {the_extra('http')}"]


def test_nobody_who_wants_no_http_is_told_of_it(printed):
    assert len(printed(http=False)) == 1
