from __future__ import annotations

import pytest
import structlog

from control_plane.access import keyring as keyring_module
from control_plane.access.keyring import Keyring
from control_plane.access.limits import Limits
from control_plane.access.principal import acting_as, current_principal
from control_plane.access.token_file import MAX_FILE_BYTES, add_token, read_tokens, remove_token
from control_plane.core.request_options import RequestOptions
from control_plane.errors import (
    AdminTokenRequiredError,
    TokenMissingError,
    TokenUnknownError,
    TooManyConcurrentRequestsError,
)
from planes.errors import ConfigError, ValidationError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens.json"


@pytest.fixture
def make(path):
    def add(name, *, admin=False, shares_cache=False, **limits):
        limits = Limits(**limits)
        return f"Bearer {add_token(path, name, limits, admin=admin, shares_cache=shares_cache)}"

    return add


def test_a_token_says_whose_it_is(make, path):
    headers = {name: make(name) for name in ("a", "b")}
    keyring = Keyring(path)
    for name, header in headers.items():
        assert keyring.authenticate(header).name == name
        assert keyring.authenticate(header.replace("Bearer ", "bearer  ")).name == name


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic YTpi", "Bearer " + "x" * 600]
)
def test_no_token_is_another_error_than_a_wrong_one(make, path, header):
    make("a")
    with pytest.raises(TokenMissingError):
        Keyring(path).authenticate(header)


@pytest.mark.parametrize("token", ["x", "hpi_", "\udcff", "é", "0" * 64])
def test_a_wrong_token_is_unknown(make, path, token):
    make("a")
    with pytest.raises(TokenUnknownError):
        Keyring(path).authenticate(f"Bearer {token}")


def test_a_token_may_be_shown_without_a_scheme(make, path):
    token = make("a").removeprefix("Bearer ")
    keyring = Keyring(path)
    assert keyring.holder_of(token).name == keyring.holder_of(f" {token} ").name == "a"
    with pytest.raises(TokenUnknownError):
        keyring.holder_of(f"Bearer {token}")
    for none in ("", "  ", "x" * 513):
        with pytest.raises(TokenMissingError, match="1 to 512 characters"):
            keyring.holder_of(none)
    remove_token(path, "a")
    with pytest.raises(TokenUnknownError):
        keyring.holder_of(token)


def test_the_hash_of_a_token_is_no_token(make, path):
    make("a")
    keyring = Keyring(path)
    (digest,) = keyring._principals
    with pytest.raises(TokenUnknownError):
        keyring.authenticate(f"Bearer {digest}")


def test_a_revoked_token_is_refused_at_once_and_a_new_one_taken(make, path):
    old = make("a")
    keyring = Keyring(path)
    lease = keyring.authenticate(old).lease()
    new = make("b")
    assert keyring.authenticate(new).name == "b"
    remove_token(path, "a")
    with pytest.raises(TokenUnknownError):
        keyring.authenticate(old)
    lease.release()


def test_what_a_token_uses_outlives_changes_of_the_file(make, path):
    header = make("a", max_concurrent_requests=1)
    keyring = Keyring(path)
    lease = keyring.authenticate(header).lease()
    make("b")
    with pytest.raises(TooManyConcurrentRequestsError):
        keyring.authenticate(header).lease()
    remove_token(path, "a")
    keyring.refresh()
    again = make("a", max_concurrent_requests=1)
    with pytest.raises(TooManyConcurrentRequestsError):
        keyring.authenticate(again).lease()
    lease.release()
    keyring.authenticate(again).lease()


def test_a_file_that_became_wrong_or_is_gone_changes_nothing_and_is_told_once(make, path):
    header = make("a")
    keyring = Keyring(path)
    with structlog.testing.capture_logs() as logs:
        path.write_text("[")
        for _ in range(3):
            assert keyring.authenticate(header).name == "a"
        path.unlink()
        for _ in range(3):
            assert keyring.authenticate(header).name == "a"
    assert [line["log_level"] for line in logs] == ["error", "error"]
    assert "is not valid JSON" in logs[0]["error"]
    assert "No such file" in logs[1]["error"]


@pytest.fixture
def reads(monkeypatch):
    """Every reading of the file."""
    found = []

    def read(path):
        found.append(path)
        return read_tokens(path)

    monkeypatch.setattr(keyring_module, "read_tokens", read)
    return found


def test_a_wrong_file_is_parsed_once_until_it_changes(make, path, reads):
    header = make("a")
    keyring = Keyring(path)
    good = path.read_bytes()
    path.write_text("[")
    for _ in range(5):
        keyring.authenticate(header)
    assert len(reads) == 2
    path.write_bytes(good)
    for _ in range(5):
        keyring.authenticate(header)
    assert len(reads) == 3


def test_a_file_that_nobody_else_may_write_any_more_is_read_again(make, path, reads):
    header = make("a")
    keyring = Keyring(path)
    new = make("b")
    path.chmod(0o622)
    with pytest.raises(TokenUnknownError):
        keyring.authenticate(new)
    path.chmod(0o600)  # its time of writing and its size stay as they are
    assert keyring.authenticate(new).name == "b"
    assert keyring.authenticate(header).name == "a"
    assert len(reads) == 3


def test_a_file_that_could_not_be_read_is_tried_again(make, path, reads, monkeypatch):
    make("a")
    keyring = Keyring(path)
    new = make("b")

    def too_many_open_files(*_arguments):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(type(path), "open", too_many_open_files)
        with pytest.raises(TokenUnknownError):
            keyring.authenticate(new)
    assert keyring.authenticate(new).name == "b"
    assert len(reads) == 3


def test_a_file_that_is_too_large_is_refused_unread(path):
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"has more than {MAX_FILE_BYTES} bytes"):
        Keyring(path)


def test_a_file_that_is_wrong_at_the_start_is_refused(path):
    with pytest.raises(ConfigError, match=r"api_tokens: .* cannot be read: No such file"):
        Keyring(path)


def test_a_lease_is_released_once_however_often_it_is_said(make, path):
    header = make("a", max_concurrent_requests=1)
    principal = Keyring(path).authenticate(header)
    with principal.lease() as lease:
        lease.release()
    lease.release()
    assert principal.meter.num_requests == 0


def test_only_an_operators_token_is_an_operators(make, path):
    plain, admin = make("a"), make("ops", admin=True)
    keyring = Keyring(path)
    keyring.authenticate(admin).require_admin()
    with pytest.raises(AdminTokenRequiredError, match="token 'a'"):
        keyring.authenticate(plain).require_admin()


def test_no_client_can_spell_the_cache_salt_of_another(make, path):
    headers = [make("a"), make("b"), make("c", shares_cache=True), make("d", shares_cache=True)]
    keyring = Keyring(path)
    a, b, c, d = (keyring.authenticate(header) for header in headers)

    def salt(principal, given=""):
        return principal.scope(RequestOptions(cache_salt=given)).cache_salt

    assert salt(a) == salt(a) != salt(a, "x")
    assert len({salt(p, given) for p in (a, b, c) for given in ("", "x", salt(a), "a", "b")}) == 15
    assert salt(c) == salt(d) == ""
    assert salt(c, "x") == salt(d, "x")


def test_a_salt_is_as_long_as_without_tokens_and_the_rest_stays(make, path):
    header = make("a")
    principal = Keyring(path).authenticate(header)
    scoped = principal.scope(RequestOptions(priority=3, cache_salt="x" * 256, name="n"))
    scoped.validate()
    assert (scoped.priority, scoped.name) == (3, "n")
    with pytest.raises(ValidationError, match="cache_salt must have at most 256 bytes"):
        principal.scope(RequestOptions(cache_salt="x" * 257))


def test_a_task_acts_for_nobody_until_it_is_said_for_whom(make, path):
    header = make("a")
    principal = Keyring(path).authenticate(header)
    with pytest.raises(TokenMissingError):
        current_principal()
    with acting_as(principal):
        assert current_principal() is principal
    with pytest.raises(TokenMissingError):
        current_principal()
