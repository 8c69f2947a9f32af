from __future__ import annotations

import pytest

from control_plane.config import ControlPlaneConfig
from hetero_infer.config import ServeConfig
from planes.address import Address
from planes.errors import ConfigError


def test_one_address_or_several_name_as_many_planes():
    one = ControlPlaneConfig(compute="unix:/run/a.sock")
    several = ControlPlaneConfig(compute="unix:/run/a.sock, localhost:5,[::1]:6")
    assert one.compute_addresses == (Address(path="/run/a.sock"),)
    assert several.compute_addresses == (
        Address(path="/run/a.sock"),
        Address(host="localhost", port=5),
        Address(host="::1", port=6),
    )


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("unix:/run/a.sock,unix:/run/a.sock", "every address once"),
        ("unix:/run/a.sock,", "expected unix:PATH or HOST:PORT, got ''"),
        ("localhost:5,nowhere", "expected unix:PATH or HOST:PORT, got 'nowhere'"),
        ("localhost:5,10.0.0.9:5", "10.0.0.9:5 can be reached from other machines"),
    ],
)
def test_every_address_is_checked(given, complaint):
    for config in (ControlPlaneConfig, lambda compute: ServeConfig(compute=compute).validate()):
        with pytest.raises(ConfigError, match=complaint) as caught:
            config(compute=given)
        assert caught.value.field == "compute"


def test_a_recording_of_several_planes_is_refused():
    with pytest.raises(ConfigError, match="a recording is of one compute plane, compute names 2"):
        ControlPlaneConfig(compute="unix:/run/a,unix:/run/b", record="/tmp/recording")
