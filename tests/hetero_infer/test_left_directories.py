"""Directories for sockets that a killed process left are removed; nobody else's ever are."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from hetero_infer.config import child_environment
from hetero_infer.left_directories import LOCK, own, remove_left_behind
from hetero_infer.local_planes import compute_socket, private_directory

OWNER = """
import os, pathlib, socket, sys
from hetero_infer.local_planes import compute_socket, private_directory
with private_directory() as directory:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(compute_socket(directory).path)
        print(directory, flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary files belong."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner(temporary):
    """Another process that has a directory with a socket in it."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env={**child_environment(), "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, temporary / os.path.basename(process.stdout.readline().strip())
        finally:
            process.kill()


def left(parent, name="hetero-abcd_123"):
    """A directory whose owner has ended: its lock is free."""
    directory = parent / name
    directory.mkdir(mode=0o700)
    os.close(own(directory))
    os.mknod(directory / "compute.sock", stat.S_IFSOCK | 0o600)  # of a path as long as may be
    return directory


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_of_one_that_lives(
    temporary, owner
):
    process, directory = owner
    with private_directory() as own_directory:
        assert compute_socket(directory).may_be_served
        process.kill()
        process.wait()
        assert directory.exists()
        with private_directory():
            assert not directory.exists()
            assert own_directory.exists()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["hetero-paged-infer-kernels-1", "hetero-ABCD1234", "hetero-abcd123", "other-abcd1234"]
)
def test_directories_of_other_names_stay(tmp_path, name):
    directory = left(tmp_path, name)
    remove_left_behind(tmp_path)
    assert (directory / "compute.sock").exists()


def test_a_directory_without_our_lock_stays(tmp_path):
    directory = left(tmp_path)
    (directory / LOCK).unlink()
    remove_left_behind(tmp_path)
    assert (directory / "compute.sock").exists()


def test_a_directory_whose_owner_has_not_locked_it_yet_stays(tmp_path):
    directory = tmp_path / "hetero-abcd_123"
    directory.mkdir(mode=0o700)
    (directory / LOCK).touch(mode=0o200)
    remove_left_behind(tmp_path)
    assert (directory / LOCK).exists()


def test_what_is_no_socket_is_not_removed_and_its_directory_stays(tmp_path):
    directory = left(tmp_path)
    (directory / "notes.txt").write_text("mine")
    remove_left_behind(tmp_path)
    assert sorted(path.name for path in directory.iterdir()) == ["notes.txt", LOCK]


def test_directories_of_other_users_and_links_stay(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    directory = left(elsewhere, "directory")
    (tmp_path / "hetero-abcd_123").symlink_to(directory)
    remove_left_behind(tmp_path)
    assert (directory / LOCK).exists()
    other = left(tmp_path, "hetero-bcde_123")
    monkeypatch.setattr("os.geteuid", lambda: 123456)
    remove_left_behind(tmp_path)
    assert (other / LOCK).exists()


def test_one_that_cannot_be_removed_does_not_keep_the_others(tmp_path):
    (tmp_path / "hetero-abcd_123").write_text("a file")
    gone = left(tmp_path, "hetero-bcde_123")
    remove_left_behind(tmp_path)
    assert not gone.exists()
    remove_left_behind(tmp_path / "missing")
