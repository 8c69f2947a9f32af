"""Kernels of versions that nobody starts any more are removed; of nothing else anything is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compute_plane.cpu import kernel_clean_up
from compute_plane.cpu.kernel_cache import make_private_directory, prepare_kernel_cache
from compute_plane.cpu.kernel_clean_up import HALF_WRITTEN_S, UNUSED_S, remove_unused, use
from kernels.cpu import machine_code

OLD = "0123456789abcdef"
USED = "fedcba9876543210"

USER = """
import pathlib, sys
from compute_plane.cpu.kernel_cache import make_private_directory
from compute_plane.cpu.kernel_clean_up import use
use(pathlib.Path(sys.argv[1]), make_private_directory)
print("uses it", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _kept_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "_directory", machine_code._directory)
    monkeypatch.setattr(machine_code, "_watch", machine_code._watch)


def age(path: Path, seconds: float = UNUSED_S + 60) -> None:
    """Let a file or directory have been changed that long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def kept(root: Path, name: str = OLD) -> Path:
    """A directory with a kernel and a torn file in it, which nobody has used for long."""
    directory = root / name
    directory.mkdir(mode=0o700)
    (directory / "step.work.o").write_bytes(b"machine code")
    (directory / f".step.work.{OLD}").write_bytes(b"mach")
    age(directory)
    return directory


def test_a_directory_that_no_start_has_used_for_long_is_removed_at_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    kept(root)
    used = prepare_kernel_cache(root)
    assert list(root.iterdir()) == [used]
    assert "removed kernels" in "".join(capsys.readouterr())
    prepare_kernel_cache(root)
    assert "removed kernels" not in "".join(capsys.readouterr())


def test_one_that_was_used_lately_and_the_one_in_use_stay(tmp_path: Path) -> None:
    lately, used = kept(tmp_path), kept(tmp_path, USED)
    age(lately, UNUSED_S - 60)
    assert remove_unused(tmp_path, used) == 0
    assert (lately / "step.work.o").exists()
    assert (used / "step.work.o").exists()


def test_a_plane_that_runs_for_longer_than_that_keeps_its_own(tmp_path: Path) -> None:
    directory = kept(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", USER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "uses it\n"
        assert directory.stat().st_mtime > time.time() - UNUSED_S  # it dates what it uses
        age(directory)
        assert remove_unused(tmp_path, tmp_path / USED) == 0
        assert (directory / "step.work.o").exists()
        user.kill()
    assert remove_unused(tmp_path, tmp_path / USED) == 1
    assert not directory.exists()


def test_a_plane_that_starts_while_its_directory_is_removed_makes_it_again(tmp_path: Path) -> None:
    directory = kept(tmp_path)
    num_made = 0

    def make(path: Path) -> None:
        nonlocal num_made
        num_made += 1
        make_private_directory(path)
        if num_made == 1:  # between making and locking it
            age(directory)
            assert remove_unused(tmp_path, tmp_path / USED) == 1
            make_private_directory(path)

    use(directory, make)
    assert list(directory.iterdir()) == []
    age(directory)
    assert remove_unused(tmp_path, tmp_path / USED) == 0


def test_one_removed_between_opening_and_locking_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = kept(tmp_path)
    lock = kernel_clean_up._lock

    def late(descriptor: int, kind: int) -> bool | None:
        monkeypatch.setattr(kernel_clean_up, "_lock", lock)
        age(directory)
        assert remove_unused(tmp_path, tmp_path / USED) == 1
        return lock(descriptor, kind)

    monkeypatch.setattr(kernel_clean_up, "_lock", late)
    use(directory, make_private_directory)
    assert directory.is_dir()
    age(directory)
    assert remove_unused(tmp_path, tmp_path / USED) == 0


def test_where_there_are_no_locks_nothing_is_removed_and_planes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = kept(tmp_path)
    monkeypatch.setattr(kernel_clean_up, "_lock", lambda _descriptor, _kind: None)
    assert remove_unused(tmp_path, tmp_path / USED) == 0
    made: list[Path] = []
    use(directory, made.append)
    assert made == [directory]  # nothing is waited for
    assert directory.stat().st_mtime > time.time() - UNUSED_S


def test_one_that_is_used_just_before_it_would_be_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = kept(tmp_path)
    lock = kernel_clean_up._lock

    def late(descriptor: int, kind: int) -> bool | None:
        age(directory, 0)  # by a plane that started and ended meanwhile
        return lock(descriptor, kind)

    monkeypatch.setattr(kernel_clean_up, "_lock", late)
    assert remove_unused(tmp_path, tmp_path / USED) == 0
    assert (directory / "step.work.o").exists()


@pytest.mark.parametrize("name", ["cuda", "0123456789ABCDEF", OLD + "0", "." + OLD])
def test_directories_of_other_names_stay(tmp_path: Path, name: str) -> None:
    directory = kept(tmp_path, name)
    assert remove_unused(tmp_path, tmp_path / USED) == 0
    assert (directory / "step.work.o").exists()


def test_files_that_are_no_kernels_stay_and_so_does_their_directory(tmp_path: Path) -> None:
    directory = kept(tmp_path)
    (directory / "notes.txt").write_text("mine")
    (directory / "linked.kernel.o").symlink_to(directory / "notes.txt")
    (directory / "folder.kernel.o").mkdir()
    age(directory)
    assert remove_unused(tmp_path, tmp_path / USED) == 0
    assert {path.name for path in directory.iterdir()} == {
        "notes.txt", "linked.kernel.o", "folder.kernel.o",
    }  # fmt: skip


def test_links_and_directories_of_other_users_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / OLD).symlink_to(kept(tmp_path / "elsewhere"))
    age(tmp_path / OLD)
    assert remove_unused(tmp_path, tmp_path / USED) == 0
    other, empty = kept(tmp_path, "1" * 16), tmp_path / ("2" * 16)
    empty.mkdir()
    age(empty)
    monkeypatch.setattr("os.geteuid", lambda: 123456)
    assert remove_unused(tmp_path, tmp_path / USED) == 0
    assert (other / "step.work.o").exists()
    assert empty.exists()


def test_of_the_directory_in_use_only_what_was_torn_long_ago_is_removed(tmp_path: Path) -> None:
    used = kept(tmp_path, USED)
    torn = used / f".step.work.{OLD}"
    for seconds, is_there in ((HALF_WRITTEN_S - 60, True), (HALF_WRITTEN_S + 60, False)):
        for path in used.iterdir():
            age(path, seconds)
        remove_unused(tmp_path, used)
        assert torn.exists() is is_there
    assert [path.name for path in used.iterdir()] == ["step.work.o"]


def test_one_start_removes_so_many_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_clean_up, "_MOST_REMOVED", 2)
    for digit in "123":
        kept(tmp_path, digit * 16)
    assert remove_unused(tmp_path, tmp_path / USED) == 2
    assert remove_unused(tmp_path, tmp_path / USED) == 1
    assert remove_unused(tmp_path / "missing", tmp_path / USED) == 0
