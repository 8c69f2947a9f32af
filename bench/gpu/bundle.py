"""Everything that `make gpu` needs and a GPU machine without a network lacks, in one folder.

`python -m bench.gpu.bundle DIR` needs a network and no GPU. DIR gets an archive, in pieces if it
must be carried so, and `run.sh`. On the GPU machine, in the root of a checkout, that unpacks it
where temporary files are and makes the report with it; `make` need not be there:

    sh DIR/run.sh --only decode_attention

In it are the Python packages that the report and its tests need, of the versions that are installed
here, the embedded model, and the kernels as machine code (`needed_kernels`). A machine with a CUDA
torch has that torch and what torch brings. What else it has may stay out: `--there FILE` with what
`pip list --format=freeze` prints there, or `--without NAMES`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from bench.gpu import flashinfer_modules
from bench.gpu.bundled_packages import needed_packages, packages_there, pip_command
from bench.gpu.pieces import Pieces
from kernels.cuda.build import private_directory
from kernels.cuda.check import capability

ARCHIVE: Final = "bundle.tar.gz"
LIBRARIES: Final = "nvidia/cu13"
"""Where packages put the compiler's libraries of CUDA 13."""
TOOLKIT: Final = "/usr/local/cuda"
"""Where a toolkit lies whose programs are not on the PATH."""
GLIBC: Final = "2.31"
"""The oldest C library for which all packages are built (llguidance asks for it): Debian 11's,
Ubuntu 20.04's."""
SHOWN_BYTES: Final = 2**20
"""Packages that take more are named with their size."""

RUN_SH: Final = """\
#!/bin/sh
# Unpacks what lies beside this file, once, and does with it what `make gpu` does, and arguments.
set -eu
beside=$(dirname "$0")
place=${{TMPDIR:-/tmp}}/hetero-gpu-{label}
if [ ! -e "$place/unpacked" ]; then
    mkdir -p -m 700 "$place"
    cat "$beside"/{archive}.* | tar xz -C "$place" --no-same-owner
    touch "$place/unpacked"
fi
PYTHONPATH=$place/site${{PYTHONPATH:+:$PYTHONPATH}}
export PYTHONPATH
# The compiler's libraries are looked for where these point, not in PYTHONPATH nor behind nvcc.
if [ -z "${{CUDA_PATH-}}${{CUDA_HOME-}}" ]; then
    nvcc=$(PATH="$PATH:{toolkit}/bin" command -v nvcc || true)
    if [ -d "$place/site/{libraries}" ]; then
        export CUDA_HOME="$place/site/{libraries}"
    elif [ -n "$nvcc" ]; then
        export CUDA_HOME="$(dirname "$(dirname "$(readlink -f "$nvcc")")")"
    fi
fi
# Modules that FlashInfer lacks would have it look for nvcc; it writes beside those it has.
if [ -d "$place/site/flashinfer" ]; then
    export FLASHINFER_DISABLE_JIT=1
    export FLASHINFER_WORKSPACE_BASE="${{FLASHINFER_WORKSPACE_BASE:-$place}}"
fi
exec "${{PYTHON:-python3}}" -m bench.gpu --out "${{GPU_REPORT:-gpu-report.json}}" \
    --prebuilt "$place/kernels"{commit} "$@"
"""

SITECUSTOMIZE: Final = '''\
"""Reads the .pth files beside this one, as of installed packages: numba-cuda has one."""

import os
import site

site.addsitedir(os.path.dirname(__file__))
'''
"""Imported by every Python that has the folder in PYTHONPATH, whose .pth files it does not read."""

Install = Callable[[Mapping[str, str], Path, argparse.Namespace], None]
BuildKernels = Callable[[Path, str], int]
AddFlashinfer = Callable[[Path, str, Path], None]


def install(packages: Mapping[str, str], site: Path, options: argparse.Namespace) -> None:
    """Install packages for another Python into a folder. Raises CalledProcessError."""
    glibc_major, glibc_minor = map(int, options.glibc.split("."))
    machine = platform.machine()
    tags = [f"manylinux_{glibc_major}_{minor}" for minor in range(glibc_minor, 4, -1)]
    tags += ["manylinux2014", "manylinux2010", "manylinux1"]
    command = pip_command(
        site, packages, "--python-version", options.python, "--implementation", "cp",
        *(f"--platform={tag}_{machine}" for tag in tags),
    )  # fmt: skip
    subprocess.run(command, check=True)


def build_kernels(directory: Path, wanted: str) -> int:
    """Compile the kernels that the report needs; the exit code."""
    from bench.gpu import needed_kernels

    return needed_kernels.main([str(directory), "--for", wanted])


def main(
    arguments: Sequence[str] | None = None,
    *,
    install: Install = install,
    build_kernels: BuildKernels = build_kernels,
    add_flashinfer: AddFlashinfer = flashinfer_modules.add_to,
) -> int:
    """Make a bundle, and return the exit code."""
    options = _parse(arguments)
    directory: Path = options.directory
    if directory.exists() and any(directory.iterdir()):
        print(f"error: {directory} is not empty", file=sys.stderr)
        return 1
    there = packages_there(options.there.read_text(encoding="utf-8")) if options.there else {}
    there |= {canonicalize_name(name): None for name in options.without}
    try:
        packages = needed_packages(options.python, there, with_compiler=options.compiler)
    except metadata.PackageNotFoundError as error:
        print(f"error: {error.name} is not installed here: make test", file=sys.stderr)
        return 1
    if options.flashinfer:
        needed = flashinfer_modules.AT_RUN_TIME
        lacking = {*needed} - {*packages, *there} | {flashinfer_modules.PACKAGE}
        packages |= {name: needed[name] for name in lacking}
    with tempfile.TemporaryDirectory() as temporary:
        stage = Path(temporary)
        print(f"{len(packages)} packages for Python {options.python} …", flush=True)
        try:
            install(packages, stage / "site", options)
        except subprocess.CalledProcessError as error:
            print(f"error: pip ended with status {error.returncode}", file=sys.stderr)
            return 1
        if options.flashinfer:
            try:
                add_flashinfer(stage / "site", options.capability, stage / "flashinfer")
            except (subprocess.CalledProcessError, OSError) as error:
                print(f"error: FlashInfer's modules: {error}", file=sys.stderr)
                return 1
        (stage / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
        _print_sizes(stage / "site")
        status = build_kernels(private_directory(stage / "kernels"), options.capability)
        if status != 0:
            return status
        directory.mkdir(parents=True, exist_ok=True)
        pieces = _pack(stage, directory, options.piece_mib)
    label = _write_run_sh(directory, pieces)
    total = sum(piece.stat().st_size for piece in pieces)
    print(f"{directory}: {len(pieces)} pieces, {total / 2**20:.1f} MiB in all ({label})")
    for piece in pieces:
        print(f"    {piece.name} {piece.stat().st_size / 2**20:.1f} MiB")
    print(f"on the GPU machine, in the root of this very checkout: sh {directory}/run.sh")
    return 0


def _pack(stage: Path, directory: Path, piece_mib: float | None) -> list[Path]:
    """Pack packages and kernels; return the pieces in their order."""
    limit = None if piece_mib is None else int(piece_mib * 2**20)
    with Pieces(directory / ARCHIVE, limit) as pieces:
        # Most of it is the model, which no level makes smaller.
        with (
            gzip.GzipFile(fileobj=pieces, mode="wb", compresslevel=6) as packed,
            tarfile.open(fileobj=packed, mode="w|") as archive,
        ):
            for name in ("site", "kernels"):
                archive.add(stage / name, name)
        return pieces.paths


def _write_run_sh(directory: Path, pieces: Sequence[Path]) -> str:
    """Write the script; return what tells this bundle from others."""
    from bench.gpu.provenance import describe_commit

    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.read_bytes())
    label = digest.hexdigest()[:12]
    commit = describe_commit()["commit"]
    told = "" if commit is None else f" --commit {commit}"
    script = RUN_SH.format(
        label=label, archive=ARCHIVE, commit=told, libraries=LIBRARIES, toolkit=TOOLKIT
    )
    (directory / "run.sh").write_text(script, encoding="utf-8")
    return label


def _print_sizes(site: Path) -> None:
    """Print what the packages take, the large ones by name."""
    sizes = {}
    for package in metadata.distributions(path=[str(site)]):
        files = [Path(str(file.locate())) for file in package.files or ()]
        size = sum(file.stat().st_size for file in files if file.is_file())
        sizes[f"{package.name} {package.version}"] = size
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size >= SHOWN_BYTES:
            print(f"    {name:<40} {size / 2**20:7.1f} MiB")
    rest = [size for size in sizes.values() if size < SHOWN_BYTES]
    print(f"    {f'{len(rest)} others':<40} {sum(rest) / 2**20:7.1f} MiB", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.bundle",
        description="Pack what `make gpu` needs on a machine with a GPU and no network.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="made; must be empty")
    parser.add_argument(
        "--python", type=_version, default="3.12", metavar="VERSION",
        help="Python of the GPU machine (default: 3.12)",
    )  # fmt: skip
    parser.add_argument(
        "--glibc", type=_version, default=GLIBC, metavar="VERSION",
        help="its C library, or an older one (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--for", dest="capability", type=_capability, default="9.0", metavar="CAPABILITY",
        help="compute capability of the GPU (default: 9.0)",
    )  # fmt: skip
    parser.add_argument(
        "--there", type=Path, metavar="FILE",
        help="what `pip list --format=freeze` prints there: what is new enough stays out",
    )  # fmt: skip
    parser.add_argument(
        "--without", type=lambda names: names.split(","), default=[], metavar="NAMES",
        help="packages that stay out, with commas between them",
    )  # fmt: skip
    parser.add_argument(
        "--compiler", action="store_true",
        help="CUDA's compiler libraries too (180 MB), where there is no toolkit",
    )  # fmt: skip
    parser.add_argument(
        "--flashinfer", action="store_true",
        help="FlashInfer too, compiled for that GPU (needs a C++ compiler; ten to twenty minutes)",
    )  # fmt: skip
    parser.add_argument(
        "--piece-mib", type=float, metavar="N", help="the most that one file may have"
    )
    return parser.parse_args(arguments)


def _version(text: str) -> str:
    if re.fullmatch(r"\d+\.\d+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no version like 3.12")
    return text


def _capability(text: str) -> str:
    capability(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
