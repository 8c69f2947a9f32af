from __future__ import annotations

import json

import pytest

from control_plane.access.keyring import Keyring
from control_plane.errors import TokenUnknownError
from hetero_infer.channel import Route
from hetero_infer.cli import main
from planes.address import parse_address
from planes.errors import ValidationError
from planes.tls_files import ClientFiles
from tests.certificates import Authority


@pytest.fixture
def token_command(tmp_path, capsys):
    """Run `token COMMAND …` on a file: exit status, what it printed, what it said."""

    def run(*arguments, before=()):
        status = main([*before, "token", *arguments, "--file", str(tmp_path / "t.json")])
        return status, *capsys.readouterr()

    return run


def test_a_created_token_is_printed_once_and_lets_in_until_it_is_revoked(token_command, tmp_path):
    status, token, said = token_command("create", "alice", "--max-concurrent-requests", "2")
    assert status == 0
    assert "shown only once" in said
    keyring = Keyring(tmp_path / "t.json")
    assert keyring.authenticate(f"Bearer {token.strip()}").name == "alice"
    said = "hetero-infer: alice is revoked: a running server refuses it from now on\n"
    assert token_command("revoke", "alice") == (0, "", said)
    with pytest.raises(TokenUnknownError):
        keyring.authenticate(f"Bearer {token.strip()}")


def test_the_list_says_what_each_may_use_and_no_hash(token_command):
    token_command("create", "a", "--max-tokens-per-minute=500", "--shares-cache")
    token_command("create", "ops", "--admin")
    _, table, _ = token_command("list")
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["a", "any", "500", "no", "yes"],
        ["ops", "any", "any", "yes", "no"],
    ]
    _, text, _ = token_command("list", "--json")
    assert json.loads(text)[0] == {
        "name": "a", "max_concurrent_requests": None, "max_tokens_per_minute": 500,
        "admin": False, "shares_cache": True,
    }  # fmt: skip


def test_a_file_that_everybody_may_read_is_warned_of_in_one_line(token_command, tmp_path):
    token_command("create", "a")
    file = tmp_path / "t.json"
    file.chmod(0o604)
    status, table, said = token_command("list")
    assert (status, len(table.splitlines())) == (0, 2)
    assert said == (
        "hetero-infer: warning: everybody on this machine may read the file of tokens "
        f"(file: {file})\n"
    )


@pytest.mark.parametrize(
    ("arguments", "before", "what"),
    [
        (["create", "a b"], [], "name: 1 to 64 letters"),
        (["revoke", "nobody"], [], "has no token 'nobody'"),
        (["create", "a", "--max-tokens-per-minute=0"], [], "--max-tokens-per-minute"),
        (["create"], [], "NAME"),
        (["create", "a"], ["--model=x"], "--model means nothing to `token`"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(token_command, arguments, before, what):
    status, printed, said = token_command(*arguments, before=before)
    assert (status, printed) == (2, "")
    assert what in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("group", ["token", "bench"])
def test_a_group_of_commands_alone_says_which_there_are(capsys, group):
    assert main([group]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"hetero-infer: error: `{group}` wants a command behind it: ")


def test_a_token_travels_in_plaintext_only_on_this_machine(tmp_path):
    there, here = parse_address("10.0.0.1:1"), parse_address("127.0.0.1:1")
    with pytest.raises(ValidationError, match="another machine and the connection is plaintext"):
        Route(there, token="hpi_x")
    tls = ClientFiles(Authority(tmp_path, "ca").ca)
    for address, files in ((here, None), (there, tls), (parse_address("unix:/x"), tls)):
        Route(address, token="hpi_x", tls=files).open().close()


@pytest.mark.parametrize("token", ["", "a b", "ä", "a\n"])
def test_what_is_no_token_is_refused_before_it_is_sent(token):
    with pytest.raises(ValidationError, match="token must be printable ASCII"):
        Route(parse_address("unix:/x"), token=token)
