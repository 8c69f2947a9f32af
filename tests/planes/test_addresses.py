from __future__ import annotations

import pytest

from planes.address import MAX_UNIX_PATH_BYTES, Address, host_address, parse_address
from planes.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address", "target"),
    [
        ("unix:/run/a.sock", Address(path="/run/a.sock"), "unix:/run/a.sock"),
        ("unix:///run/a.sock", Address(path="/run/a.sock"), "unix:/run/a.sock"),
        ("unix:relative.sock", Address(path="relative.sock"), "unix:relative.sock"),
        ("127.0.0.1:50051", Address(host="127.0.0.1", port=50051), "127.0.0.1:50051"),
        ("[::1]:0", Address(host="::1", port=0), "[::1]:0"),
        ("::1:50051", Address(host="::1", port=50051), "[::1]:50051"),
        ("[fe80::1%eth0]:1", Address(host="fe80::1%eth0", port=1), "[fe80::1%eth0]:1"),
        ("host.example:65535", Address(host="host.example", port=65535), "host.example:65535"),
    ],
)
def test_an_address_is_parsed_and_spelled_the_same(text, address, target):
    assert parse_address(text) == address
    assert str(parse_address(text)) == target


@pytest.mark.parametrize(
    "text", ["", "unix:", "50051", ":50051", "host:", "host:65536", "host:-1", "host:x", "host:٣"]
)
def test_what_is_no_address_is_refused_by_key_and_value(text):
    with pytest.raises(ConfigError) as caught:
        parse_address(text, key="listen")
    assert caught.value.field == "listen"
    assert "listen" in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:50051",
        "http://127.0.0.1:50051/v1",
        "https://host",
        "dns:host:50051",
        "ipv4:127.0.0.1:50051",
        "host/path:1",
        "[host]:1",
        "a host:1",
        "[::1:1",
        "[]:1",
    ],
)
def test_a_url_is_no_host(text):
    with pytest.raises(
        ConfigError, match="target: expected unix:PATH or HOST:PORT, got "
    ) as caught:
        parse_address(text, key="target")
    assert repr(text) in caught.value.message


@pytest.mark.parametrize(
    ("host", "target"),
    [
        ("localhost", "localhost:7"),
        ("::1", "[::1]:7"),
        ("[::1]", "[::1]:7"),
        ("0.0.0.0", "0.0.0.0:7"),
    ],
)
def test_a_host_alone_has_a_port_of_its_own(host, target):
    assert host_address(host, 7, key="http_host").target == target


@pytest.mark.parametrize("host", ["", "http://a", "127.0.0.1:80", "a b", "[a]", "[::1", "a/b"])
def test_what_is_no_host_is_refused_by_key_and_value(host):
    with pytest.raises(ConfigError) as caught:
        host_address(host, 7, key="http_host")
    assert caught.value.field == "http_host"
    assert caught.value.message == f"http_host must be a name or an IP address, got {host!r}"


def test_a_unix_path_of_the_longest_length_passes_and_one_byte_more_does_not():
    longest = "/" + "a" * (MAX_UNIX_PATH_BYTES - 1)
    assert parse_address("unix:" + longest).path == longest
    with pytest.raises(ConfigError, match=f"at most {MAX_UNIX_PATH_BYTES} bytes, got 108"):
        parse_address("unix:" + longest + "a")


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        ("unix:/a", True),
        ("localhost:1", True),
        ("127.8.9.1:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("host.example:1", False),
    ],
)
def test_only_sockets_and_loopback_are_local(text, is_local):
    assert parse_address(text).is_local is is_local
