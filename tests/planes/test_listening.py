"""An address that cannot be had is refused in one line that says which of the reasons it is."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from planes.address import Address
from planes.errors import ConfigError
from planes.listening import bind_port, check_can_listen


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


def test_a_stopped_listener_that_can_take_no_more_connections_is_in_use(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as holder, contextlib.ExitStack() as waiting:
        holder.bind(path)
        holder.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                client = waiting.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(path)
        assert refusal(Address(path=path)) == (
            f"listen: cannot listen on unix:{path}: it is in use"
        )


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


V4, V6 = socket.AF_INET, socket.AF_INET6

needs_ipv6 = pytest.mark.skipif(
    not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6"
)


@pytest.fixture
def name_means(monkeypatch):
    """Lets a name resolve to addresses, each a family and a host, in their order."""

    def let(*places) -> Address:
        monkeypatch.setattr(
            "planes.listening.socket.getaddrinfo",
            lambda _host, port, **_: [
                (family, socket.SOCK_STREAM, 6, "", (host, port, 0, 0)[: 4 if family == V6 else 2])
                for family, host in places
            ],
        )
        return Address(host="a-name", port=0)

    return let


def bound_at(address: Address) -> list[tuple]:
    sockets = bind_port(address)
    with contextlib.ExitStack() as held:
        for one in sockets:
            held.enter_context(one).listen()
        return [one.getsockname() for one in sockets]


def test_a_name_of_several_addresses_is_bound_at_all_of_them_with_one_port(name_means):
    address = name_means((V4, "127.0.0.1"), (V4, "127.0.0.2"), (V4, "127.0.0.1"))
    (first, port), (second, same) = bound_at(address)
    assert (first, second, port) == ("127.0.0.1", "127.0.0.2", same)


def test_addresses_that_the_machine_lacks_are_left_out_until_none_is_left(name_means):
    # 192.0.2.0/24 and 2001:db8::/32 are for documentation only: nobody has them.
    address = name_means((V6, "2001:db8::1"), (V4, "127.0.0.1"), (V4, "192.0.2.1"))
    assert [host for host, _ in bound_at(address)] == ["127.0.0.1"]
    address = name_means((V6, "2001:db8::1"), (V4, "192.0.2.1"))
    assert refusal(address) == (
        "listen: cannot listen on a-name:0: a-name is not an address of this machine"
    )


def test_a_port_in_use_at_one_of_the_addresses_is_refused(name_means):
    address = name_means((V4, "127.0.0.1"), (V4, "127.0.0.2"))
    with socket.create_server(("127.0.0.2", 0)) as holder:
        taken = replace(address, port=holder.getsockname()[1])
        assert refusal(taken).endswith(": it is in use")


def test_a_free_port_is_looked_for_again_where_it_is_taken_at_the_next_address(
    name_means, monkeypatch
):
    drawn = iter(range(3))

    class Socket(socket.socket):
        def bind(self, where):
            if where[0] == "127.0.0.2" and next(drawn) < 2:
                raise OSError(errno.EADDRINUSE, "Address already in use")
            super().bind(where)

    monkeypatch.setattr("planes.listening.socket.socket", Socket)
    (_, port), (_, same) = bound_at(name_means((V4, "127.0.0.1"), (V4, "127.0.0.2")))
    assert port == same
    assert next(drawn, None) is None


@needs_ipv6
def test_both_families_are_bound_and_all_addresses_of_one_do_not_take_those_of_the_other(
    name_means,
):
    (_, port, *_), (_, same) = bound_at(name_means((V6, "::1"), (V4, "127.0.0.1")))
    assert port == same
    assert len(bound_at(name_means((V6, "::"), (V4, "0.0.0.0")))) == 2


def test_the_refusal_names_the_setting_that_said_where():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = Address(host="127.0.0.1", port=holder.getsockname()[1])
        with pytest.raises(ConfigError, match=r"^grpc_port: cannot listen on ") as caught:
            check_can_listen(address, key="grpc_port")
    assert caught.value.field == "grpc_port"
