from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import llvmlite
import llvmlite.binding
import pytest

import kernels
from compute_plane.cpu import kernel_cache
from compute_plane.cpu.kernel_cache import kernel_fingerprint, prepare_kernel_cache
from compute_plane.cpu.kernel_notices import KernelNotices
from kernels.cpu import instruction_set, machine_code
from kernels.cpu.compiled import int64_at, object_code, operation
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.machine_code import find_code, keep_code, keep_code_in, load_code
from kernels.cpu.operation import Operation
from planes.errors import ConfigError


@pytest.fixture(autouse=True)
def _kept_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "_directory", machine_code._directory)
    monkeypatch.setattr(machine_code, "_watch", machine_code._watch)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where machine code is kept; read and written again whatever the test did to it."""
    keep_code_in(tmp_path)
    yield tmp_path
    tmp_path.chmod(0o700)


@operation(num_arguments=2)
def add_one(address: int, count: int) -> None:
    """Add 1 to `count` int64 numbers."""
    from_ = int64_at(address)
    for i in range(count):
        from_[i] += 1


def test_the_cache_is_private_and_named_after_the_sources(tmp_path: Path) -> None:
    directory = prepare_kernel_cache(tmp_path / "cache")
    assert directory == tmp_path / "cache" / kernel_fingerprint()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.parent.stat().st_mode & 0o777 == 0o700
    assert machine_code._directory == directory
    assert prepare_kernel_cache(tmp_path / "cache") == directory


def test_a_cache_others_may_enter_is_refused_by_name(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=f"{root} has mode 0755"):
        prepare_kernel_cache(root)


def test_a_cache_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: 123456)
    with pytest.raises(ConfigError, match="belongs to user"):
        prepare_kernel_cache(tmp_path / "cache")


def test_a_link_or_a_file_in_place_of_the_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is not a directory"):
        prepare_kernel_cache(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="File exists"):
        prepare_kernel_cache(tmp_path / "file")


OTHERS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "processor": lambda patch: patch.setattr(
        llvmlite.binding, "get_host_cpu_name", lambda: "another"
    ),
    "features": lambda patch: patch.setattr(
        llvmlite.binding, "get_host_cpu_features", lambda: llvmlite.binding.FeatureMap(new=True)
    ),
    "forced instruction set": lambda patch: patch.setattr(
        instruction_set, "_forced", ("x86-64-v3", "")
    ),
    # A processor with AMX, but a system that does not give it to this process.
    "another instruction set": lambda patch: patch.setattr(
        instruction_set, "_selected", replace(selected_instruction_set(), name="another")
    ),
    "Python": lambda patch: patch.setattr("platform.python_version", lambda: "3.0.0"),
    "NumPy": lambda patch: patch.setattr("numpy.__version__", "0"),
    "Numba": lambda patch: patch.setattr(kernel_cache, "version", lambda _: "0"),
    "LLVM": lambda patch: patch.setattr(llvmlite, "__version__", "0"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_processor_or_version_finds_nothing(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kernel_fingerprint()
    OTHERS[other](monkeypatch)
    assert kernel_fingerprint() != before


def test_other_sources_find_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_fingerprint()
    sources = Path(kernels.__file__ or "").parent
    copied = shutil.copytree(sources, tmp_path / "kernels")
    monkeypatch.setattr(kernels, "__file__", str(copied / "__init__.py"))
    assert kernel_fingerprint() == before
    with (copied / "cpu" / "vector_ir.py").open("a") as source:
        source.write("\n")
    assert kernel_fingerprint() != before


def test_machine_code_is_found_as_it_was_kept(directory: Path) -> None:
    keep_code("a.b", b"machine code")
    assert find_code("a.b") == b"machine code"
    assert find_code("a.c") is None
    assert [path.name for path in directory.iterdir()] == ["a.b.o"]  # and nothing half written


@pytest.mark.parametrize("size", [0, 10, 32, 33, 43])
def test_torn_machine_code_counts_as_none(directory: Path, size: int) -> None:
    keep_code("a.b", b"machine code")
    os.truncate(directory / "a.b.o", size)
    assert find_code("a.b") is None


def test_machine_code_that_has_changed_or_is_of_another_name_counts_as_none(
    directory: Path,
) -> None:
    keep_code("a.b", b"machine code")
    shutil.copy(directory / "a.b.o", directory / "a.c.o")
    assert find_code("a.c") is None
    (directory / "a.b.o").write_bytes((directory / "a.b.o").read_bytes()[:-1] + b"?")
    assert find_code("a.b") is None


def test_what_is_found_torn_is_made_anew(directory: Path) -> None:
    # A handle of its own: the process's is loaded once.
    (directory / "step.dismiss.o").write_bytes(b"torn")
    assert Operation("step.dismiss").address
    assert find_code("step.dismiss")


def test_two_planes_may_keep_the_same_at_once_even_if_their_processes_have_one_number(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Containers that share a cache: the plane is process 1 in each.
    to_its_place = Path.replace

    def late(beside: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", to_its_place)
        keep_code("a.b", b"machine code")
        return to_its_place(beside, target)

    monkeypatch.setattr(Path, "replace", late)
    keep_code("a.b", b"machine code")
    assert find_code("a.b") == b"machine code"
    assert [path.name for path in directory.iterdir()] == ["a.b.o"]


def test_a_full_disk_is_named_and_nothing_half_written_stays(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_beside: Path, _target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match=f"{directory}: No space left"):
        keep_code("a.b", b"machine code")
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("at_fault", ["mkdir", "replace"])
def test_a_plane_starts_on_a_full_disk_and_says_once_that_kernels_are_not_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at_fault: str,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, at_fault, full)
    notices = KernelNotices()
    prepare_kernel_cache(tmp_path / "cache", notices)
    for name in ("step.dismiss", "step.board_bytes"):
        keep_code(name, b"machine code")
        assert find_code(name) is None
    said = capsys.readouterr().out
    assert said.count("compiled kernels cannot be kept") == 1
    assert "No space left" in said


def test_a_cache_that_may_be_read_and_not_written_to_keeps_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, make = tmp_path / "cache", Path.mkdir
    make(root, mode=0o700)

    def may_not_write(path: Path, *rest: object, **named: object) -> None:
        if root in path.parents:  # as where another user's process made it so; root may all
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        make(path, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", may_not_write)
    prepare_kernel_cache(root, KernelNotices())
    keep_code("step.dismiss", b"machine code")
    assert find_code("step.dismiss") is None
    assert capsys.readouterr().out.count("compiled kernels cannot be kept") == 1
    with pytest.raises(ConfigError, match="Permission denied"):
        prepare_kernel_cache(root / "deeper", KernelNotices())


def test_a_cache_in_a_place_that_is_wrong_is_refused_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        prepare_kernel_cache(tmp_path / "file" / "cache", KernelNotices())


def test_a_start_says_before_that_it_compiles_and_after_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*names: str) -> list[str]:
        notices = KernelNotices()
        prepare_kernel_cache(tmp_path / "cache", notices)
        for name in names:
            if find_code(name) is None:
                keep_code(name, b"machine code")
        notices.sum_up()
        return re.findall(
            r"(compiling kernels[^;]*;|compiled kernels +kernels=\d+)", capsys.readouterr().out
        )

    first = "compiling kernels, once, in about half a minute;"
    more = "compiling kernels that no earlier start needed;"
    assert start("a.b", "a.c") == [first, "compiled kernels               kernels=2"]
    assert start("a.b", "a.c") == []
    assert start("a.b", "a.d", "a.c") == [more, "compiled kernels               kernels=1"]


def test_a_cache_that_cannot_be_written_or_read_is_named(directory: Path) -> None:
    keep_code_in(directory / "gone")
    with pytest.raises(ConfigError, match=f"{directory / 'gone'}: No such file"):
        keep_code("a.b", b"machine code")
    keep_code_in(directory)
    (directory / "a.b.o").mkdir()
    with pytest.raises(ConfigError, match=f"{directory}: Is a directory"):
        find_code("a.b")


def test_functions_outside_of_the_kernels_are_not_kept(directory: Path) -> None:
    numbers = (ctypes.c_int64 * 3)(1, 2, 3)
    add_one.to_function(2)(ctypes.addressof(numbers), 2)
    assert list(numbers) == [2, 3, 3]
    assert list(directory.iterdir()) == []


def test_machine_code_that_defines_something_else_is_not_taken_for_it() -> None:
    with pytest.raises(ValueError, match=r"a\.b does not define it"):
        load_code("a.b", object_code(add_one.name))


@operation(num_arguments=1)
def make_a_list(count: int) -> None:
    """Ask for memory that only Numba's runtime manages."""
    numbers = [count]
    while len(numbers) < count:
        numbers.append(count)
    int64_at(count)[0] = numbers[-1]


def test_an_operation_that_needs_numba_when_it_runs_is_refused() -> None:
    with pytest.raises(TypeError, match="make_a_list needs NRT_"):
        object_code(make_a_list.name)


@pytest.mark.wide
def test_a_second_start_compiles_nothing_and_imports_no_compiler(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from compute_plane.cpu.kernel_cache import prepare_kernel_cache\n"
        "prepare_kernel_cache(pathlib.Path(sys.argv[1]))\n"
        "import compute_plane.cpu.executor\n"
        "from kernels.cpu.catalogue import plain_rows, work\n"
        "assert plain_rows.address and work.address\n"
        "print('numba' in sys.modules)\n"
    )
    has_compiler = [
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "cache")],
            check=True, capture_output=True, text=True,
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert has_compiler == [["True"], ["False"]]
