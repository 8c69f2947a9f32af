"""Generate the stubs beside the .proto files: `python -m protos.generate [--check]`.

`--check` writes nothing and fails if the committed stubs are not what the .proto files give.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = (
    "protos/hetero/compute/v1/compute.proto",
    "protos/hetero/compute/v1/recording.proto",
    "protos/hetero/inference/v1/inference.proto",
)
SCRIPTS = Path(sys.executable).parent
"""Where the environment of the running interpreter keeps the mypy-protobuf plugins."""
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Run protoc for every .proto file, writing below `out`."""
    from grpc_tools import protoc

    status = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"--plugin=protoc-gen-mypy={SCRIPTS / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={SCRIPTS / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *PROTOS,
        ]
    )
    if status != 0:
        raise SystemExit(status)


def stale_stubs() -> list[str]:
    """Names of committed stubs that differ from what the generator gives now."""
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        return [
            name
            for proto in PROTOS
            for name in (proto.removesuffix(".proto") + suffix for suffix in SUFFIXES)
            if (Path(directory) / name).read_bytes() != _read(ROOT / name)
        ]


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def main() -> int:
    """Generate, or with --check compare."""
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    stale = stale_stubs()
    for name in stale:
        sys.stderr.write(f"{name} is not what its .proto gives: run `make protos`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
