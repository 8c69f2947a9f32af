"""Whose certificates are believed, through real gRPC, and how wrong files are refused."""

from __future__ import annotations

import os
import shutil
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import structlog

from compute_plane.config import ComputePlaneConfig
from control_plane.config import ControlPlaneConfig
from planes.address import Address
from planes.errors import ConfigError
from planes.tls import ClientTls, ServerTls, add_port, open_channel
from planes.tls_files import ClientFiles, ServerFiles
from tests.certificates import Authority, openssl

METHOD = "/test.Service/Do"
ALONE = [("grpc.use_local_subchannel_pool", 1)]  # every channel shakes hands anew


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


@pytest.fixture(scope="module")
def server_identity(ours):
    return ours.issue("server")


@contextmanager
def serving(tls):
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", {"Do": handler}),)
    )
    port = add_port(server, Address(host="127.0.0.1"), tls)
    server.start()
    try:
        yield Address(host="127.0.0.1", port=port)
    finally:
        server.stop(None).wait()


def ask(address, files: ClientFiles | None) -> bytes:
    tls = None if files is None else ClientTls(files)
    with open_channel(address, ALONE, tls) as channel:
        return channel.unary_unary(METHOD)(b"hello", timeout=60)


def is_refused(address, files) -> bool:
    with pytest.raises(grpc.RpcError) as caught:
        ask(address, files)
    return caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_server_is_believed_only_by_those_who_believe_its_authority(
    ours, theirs, server_identity
):
    with serving(ServerTls(ServerFiles(server_identity.cert, server_identity.key))) as address:
        assert ask(address, ClientFiles(ours.ca)) == b"hello"
        assert is_refused(address, ClientFiles(theirs.ca))
        assert is_refused(address, None)


def test_with_a_client_authority_only_its_clients_come_in(ours, theirs, server_identity):
    friend, stranger = ours.issue("friend"), theirs.issue("stranger")
    files = ServerFiles(server_identity.cert, server_identity.key, ours.ca)
    with serving(ServerTls(files)) as address:
        assert ask(address, ClientFiles(ours.ca, friend.cert, friend.key)) == b"hello"
        assert is_refused(address, ClientFiles(ours.ca))
        assert is_refused(address, ClientFiles(ours.ca, stranger.cert, stranger.key))


def replace(source: str, target: Path) -> None:
    """Put a file in the place of another in one step."""
    fresh = target.with_suffix(".new")
    shutil.copy(source, fresh)
    os.replace(fresh, target)


def test_changed_files_count_from_the_next_connection_on(ours, theirs, server_identity, tmp_path):
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    replace(server_identity.cert, cert)
    replace(server_identity.key, key)
    with serving(ServerTls(ServerFiles(str(cert), str(key)))) as address:
        assert ask(address, ClientFiles(ours.ca)) == b"hello"
        other = theirs.issue("server")
        replace(other.cert, cert)
        with structlog.testing.capture_logs() as logs:
            # The key still belongs to the old certificate: nothing changes yet.
            assert ask(address, ClientFiles(ours.ca)) == b"hello"
            assert ask(address, ClientFiles(ours.ca)) == b"hello"
        (complaint,) = (line for line in logs if line["log_level"] == "error")
        assert f"tls_key: {key} does not belong" in complaint["error"]
        replace(other.key, key)
        assert ask(address, ClientFiles(theirs.ca)) == b"hello"
        assert is_refused(address, ClientFiles(ours.ca))


def shake_hands(server: ssl.SSLContext, ca: str) -> None:
    """One handshake in memory, as HTTPS has it. Raises ssl.SSLError."""
    client = ssl.create_default_context(cafile=ca)
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(a, b, server_hostname="localhost"),
        server.wrap_bio(b, a, server_side=True),
    ]
    waiting = list(ends)
    for _ in range(10):
        for end in list(waiting):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)
    assert not waiting


def test_https_takes_changed_files_too(ours, theirs, server_identity, tmp_path):
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    replace(server_identity.cert, cert)
    replace(server_identity.key, key)
    tls = ServerTls(ServerFiles(str(cert), str(key)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    arguments = tls.uvicorn_arguments()
    context.load_cert_chain(arguments["ssl_certfile"], arguments["ssl_keyfile"])
    tls.keep_fresh(context)
    shake_hands(context, ours.ca)
    other = theirs.issue("server")
    replace(other.cert, cert)
    replace(other.key, key)
    tls.grpc_credentials()  # another port of the same server looks as well
    shake_hands(context, theirs.ca)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(context, ours.ca)


def test_uvicorn_asks_for_client_certificates_where_grpc_does(ours, server_identity):
    files = ServerFiles(server_identity.cert, server_identity.key, ours.ca)
    arguments = ServerTls(files).uvicorn_arguments()
    assert arguments["ssl_cert_reqs"] is ssl.CERT_REQUIRED
    assert arguments["ssl_ca_certs"] == ours.ca


@pytest.fixture
def wrong_files(tmp_path, server_identity, ours):
    """Files that cannot be used, by what is wrong with them."""
    certificate = Path(server_identity.cert).read_text()
    encrypted = tmp_path / "encrypted"
    openssl("ec", "-in", server_identity.key, "-aes128", "-passout", "pass:x", "-out", encrypted)
    texts = {
        "garbled": certificate[:200] + "!!!" + certificate[204:],
        "garbled_key": "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        "text": "hello",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = {name: str(tmp_path / name) for name in (*texts, "encrypted", "missing")}
    return {
        **found,
        "directory": str(tmp_path),
        "cert": server_identity.cert,
        "key": server_identity.key,
        "other_key": ours.issue("other").key,
    }


@pytest.mark.parametrize(
    ("cert", "key", "field", "what"),
    [
        ("missing", "key", "tls_cert", "cannot be read: No such file"),
        ("directory", "key", "tls_cert", "cannot be read: Is a directory"),
        ("text", "key", "tls_cert", "has no certificate"),
        ("garbled", "key", "tls_cert", "cannot be read"),
        ("cert", "missing", "tls_key", "cannot be read: No such file"),
        ("cert", "text", "tls_key", "has no private key (PEM)"),
        ("cert", "garbled_key", "tls_key", "has no private key that can be read"),
        ("cert", "encrypted", "tls_key", "is encrypted"),
        ("cert", "other_key", "tls_key", "does not belong to the certificate"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_with_its_setting(
    wrong_files, cert, key, field, what
):
    files = ServerFiles(wrong_files[cert], wrong_files[key])
    with pytest.raises(ConfigError) as caught:
        ServerTls(files)
    culprit = wrong_files[cert if field == "tls_cert" else key]
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: {culprit} ")
    assert what in caught.value.message
    assert "\n" not in caught.value.message


def test_an_authority_that_cannot_be_read_is_named_by_its_own_setting(wrong_files):
    files = ServerFiles(wrong_files["cert"], wrong_files["key"], wrong_files["text"])
    with pytest.raises(ConfigError, match=r"^tls_client_ca: .* has no certificate"):
        ServerTls(files)
    with pytest.raises(ConfigError, match=r"^compute_tls_ca: .* No such file"):
        ClientTls(ClientFiles(wrong_files["missing"]), prefix="compute_tls_")


@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_key_that_everybody_may_read_is_warned_of(server_identity, tmp_path, mode, is_warned):
    key = tmp_path / "key"
    shutil.copy(server_identity.key, key)
    key.chmod(mode)
    assert stat.S_IMODE(key.stat().st_mode) == mode
    with structlog.testing.capture_logs() as logs:
        ServerTls(ServerFiles(server_identity.cert, str(key)))
    assert [line["file"] for line in logs] == [str(key)] * is_warned


# --- what the planes' configurations allow; no file is read for it ---

TLS = {"tls_cert": "c", "tls_key": "k"}
OUTSIDE = "10.0.0.1:50052"


def control(**settings):
    return ControlPlaneConfig(**{"compute": "unix:/c", "http": False, **settings})


@pytest.mark.parametrize(
    ("make", "settings", "field"),
    [
        (control, {"grpc_host": "0.0.0.0"}, "listen"),
        (control, {"http": True, "http_host": "0.0.0.0"}, "http_host"),
        (control, {"compute": OUTSIDE}, "compute"),
        (control, {"compute": OUTSIDE, **TLS}, "compute"),
        (control, {"grpc_host": "0.0.0.0", "compute_tls_ca": "a", "compute": OUTSIDE}, "listen"),
        (control, {"tls_cert": "c"}, "tls_key"),
        (control, {"tls_key": "k"}, "tls_cert"),
        (control, {"tls_client_ca": "a"}, "tls_client_ca"),
        (control, {"listen": "unix:/l", **TLS}, "tls_cert"),
        (control, {"compute_tls_ca": "a"}, "compute_tls_ca"),
        (
            control,
            {"compute": OUTSIDE, "compute_tls_cert": "c", "compute_tls_key": "k"},
            "compute_tls_cert",
        ),
        (ComputePlaneConfig, {"listen": OUTSIDE}, "listen"),
        (ComputePlaneConfig, {"listen": "unix:/l", **TLS}, "tls_cert"),
        (ComputePlaneConfig, {"tls_client_ca": "a"}, "tls_client_ca"),
    ],
)
def test_plaintext_to_other_machines_and_half_of_tls_are_refused(make, settings, field):
    with pytest.raises(ConfigError) as caught:
        make(**settings)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (control, {"grpc_host": "0.0.0.0", **TLS}),
        (control, {"http": True, "http_host": "0.0.0.0", **TLS}),
        (control, {"http": True, "listen": "unix:/l", **TLS}),
        (control, {"compute": OUTSIDE, "compute_tls_ca": "a"}),
        (control, {"compute": f"unix:/c,{OUTSIDE}", "compute_tls_ca": "a"}),
        (control, {"grpc_host": "0.0.0.0", "allow_insecure": True}),
        (ComputePlaneConfig, {"listen": OUTSIDE, **TLS, "tls_client_ca": "a"}),
    ],
)
def test_with_tls_no_port_needs_a_word_that_it_is_meant(make, settings):
    make(**settings)
