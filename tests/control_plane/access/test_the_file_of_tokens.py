from __future__ import annotations

import json
import os
import stat
import threading

import pytest
import structlog

from control_plane.access.limits import Limits
from control_plane.access.token_file import add_token, hash_of, read_tokens, remove_token
from planes.errors import ConfigError

HASH = "0" * 64


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens.json"


def add(path, name, *, admin=False, shares_cache=False, **limits):
    return add_token(path, name, Limits(**limits), admin=admin, shares_cache=shares_cache)


def test_a_new_token_is_long_random_and_in_the_file_only_as_its_hash(path):
    tokens = [add(path, f"t{number}") for number in range(3)]
    assert len(set(tokens)) == 3
    assert all(len(token) == len("hpi_") + 43 for token in tokens)
    text = path.read_text()
    assert not any(token in text or token.removeprefix("hpi_") in text for token in tokens)
    assert [entry.sha256 for entry in read_tokens(path)] == [hash_of(token) for token in tokens]


def test_everything_that_is_said_of_a_token_is_read_again(path):
    add(path, "a", max_concurrent_requests=3, max_tokens_per_minute=500, admin=True)
    add(path, "b", shares_cache=True)
    a, b = read_tokens(path)
    assert (a.name, a.limits, a.admin, a.shares_cache) == ("a", Limits(3, 500), True, False)
    assert (b.name, b.limits, b.admin, b.shares_cache) == ("b", Limits(), False, True)


def test_a_revoked_token_is_gone_and_the_others_stay(path):
    add(path, "a")
    add(path, "b")
    remove_token(path, "a")
    assert [entry.name for entry in read_tokens(path)] == ["b"]


def test_a_name_is_given_once_and_revoked_once(path):
    add(path, "a")
    with pytest.raises(ConfigError, match="has a token 'a' already"):
        add(path, "a")
    with pytest.raises(ConfigError, match="has no token 'b'"):
        remove_token(path, "b")
    with pytest.raises(ConfigError, match="cannot be opened"):
        add(path / "x" / "y", "a")


@pytest.mark.parametrize("name", ["", "a b", "ä", "a" * 65, "../x", "-x", "a\n"])
def test_a_name_is_one_plain_word(path, name):
    with pytest.raises(ConfigError, match="1 to 64 letters"):
        add(path, name)
    assert not path.exists()


def test_a_new_file_is_its_owners_alone_and_a_group_may_stay_allowed(path):
    add(path, "a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    add(path, "b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(path.parent) == [path.name]


def test_a_link_to_the_file_stays_a_link(path, tmp_path):
    add(path, "a")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    add(link, "b")
    assert link.is_symlink()
    assert len(read_tokens(path)) == 2


def test_commands_at_the_same_time_lose_no_token(path):
    threads = [threading.Thread(target=add, args=(path, f"t{number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {entry.name for entry in read_tokens(path)} == {f"t{number}" for number in range(8)}


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_refused(path, mode):
    add(path, "a")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"written by others than its owner \(mode {mode:04o}"):
        read_tokens(path)


def test_a_file_that_everybody_may_read_is_warned_of(path):
    add(path, "a")
    path.chmod(0o644)
    with structlog.testing.capture_logs() as logs:
        read_tokens(path)
    assert [line["log_level"] for line in logs] == ["warning"]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({}, "must be a JSON list, got dict"),
        (["x"], "entry 0 must be an object, got str"),
        ([{"name": "a", "sha256": HASH, "max_token_per_minute": 5}], "unknown key 'max_token_"),
        ([{"sha256": HASH}], "name must be a name, got None"),
        ([{"name": "a", "sha256": HASH[1:]}], "sha256 must be 64 hex digits"),
        ([{"name": "a", "sha256": HASH.replace("0", "A")}], "sha256 must be 64 hex digits"),
        ([{"name": "a", "sha256": HASH, "max_concurrent_requests": 0}], "must be 1 to"),
        ([{"name": "a", "sha256": HASH, "max_tokens_per_minute": True}], "must be 1 to"),
        ([{"name": "a", "sha256": HASH, "admin": "no"}], "admin must be true or false, got 'no'"),
        ([{"name": "a", "sha256": HASH}, {"name": "b", "sha256": HASH}], "entry 1: sha256 '0000"),
        ([{"name": "a", "sha256": HASH}, {"name": "a", "sha256": "1" * 64}], "entry 1: name 'a'"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_place(path, value, what):
    path.write_text(json.dumps(value))
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        read_tokens(path)
    assert caught.value.field == "api_tokens"
    assert caught.value.message.startswith(f"api_tokens: {path} ")
    assert what in caught.value.message


def test_a_key_that_an_entry_has_twice_is_refused(path):
    path.write_text(f'[{{"name": "a", "sha256": "{HASH}", "admin": false, "admin": true}}]')
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be used: the key 'admin' is there twice"):
        read_tokens(path)


@pytest.mark.parametrize("data", [b"", b"[", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_is_refused(path, data):
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_tokens(path)
