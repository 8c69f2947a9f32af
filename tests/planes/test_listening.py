"""An address that cannot be had is refused in one line that says which of the reasons it is."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from planes.address import Address
from planes.errors import ConfigError
from planes.listening import check_can_listen


def refusal(address: Address) -> str:
    with pytest.raises(ConfigError) as caught:
        check_can_listen(address)
    assert caught.value.field == "listen"
    return caught.value.message


def test_a_port_in_use_a_foreign_address_and_an_unknown_host_are_told_apart():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        in_use = refusal(Address(host="127.0.0.1", port=port))
    assert in_use == f"listen: cannot listen on 127.0.0.1:{port}: it is in use"
    # 192.0.2.0/24 is for documentation only: nobody has it.
    assert refusal(Address(host="192.0.2.1", port=5)) == (
        "listen: cannot listen on 192.0.2.1:5: 192.0.2.1 is not an address of this machine"
    )
    for host in ("no such host", "x" * 70 + ".invalid"):
        assert f"the host {host} is not known: " in refusal(Address(host=host, port=5))


def test_free_addresses_are_accepted_and_stay_free(tmp_path):
    addresses = (Address(host="127.0.0.1", port=0), Address(path=str(tmp_path / "s")))
    for address in (*addresses, *addresses):
        check_can_listen(address)
    assert not (tmp_path / "s").exists()


def test_a_socket_without_its_directory_and_a_file_that_is_none_are_told_apart(tmp_path):
    missing = tmp_path / "missing"
    assert refusal(Address(path=str(missing / "s"))) == (
        f"listen: cannot listen on unix:{missing}/s: there is no directory {missing}"
    )
    (tmp_path / "file").touch()
    assert "exists and is not a socket" in refusal(Address(path=str(tmp_path / "file")))
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert "is not a socket" in refusal(Address(path=str(tmp_path / "dangling")))
    assert "Not a directory" in refusal(Address(path=str(tmp_path / "file" / "s")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    assert f"the directory {tmp_path} may not be written" in refusal(
        Address(path=str(tmp_path / "s"))
    )


def test_the_socket_of_a_dead_process_makes_way_and_that_of_a_living_one_does_not(tmp_path):
    path = tmp_path / "s"
    address = Address(path=str(path))
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(path))
        server.listen()
        assert refusal(address) == f"listen: cannot listen on unix:{path}: it is in use"
        assert path.exists()
    check_can_listen(address)
    assert not path.exists()


def test_the_refusal_names_the_setting_that_said_where():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = Address(host="127.0.0.1", port=holder.getsockname()[1])
        with pytest.raises(ConfigError, match=r"^grpc_port: cannot listen on ") as caught:
            check_can_listen(address, key="grpc_port")
    assert caught.value.field == "grpc_port"
