"""Machine code is kept by what made it, in a directory nobody else can write to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cuda.pathfinder as pathfinder
import numba.cuda
import pytest

from kernels import reference
from kernels.cuda import attention_decode, build
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.errors import CacheDirectoryError, CompileError, MissingToolchainError
from kernels.cuda.operations import all_variants
from kernels.cuda.rms_norm import RmsNormVariant

VARIANT = DecodeVariant("float32", 64, 1, 16)
HOPPER = (9, 0)


@pytest.fixture
def cache_dir(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def compiled(monkeypatch):
    """Names of the variants compiled; the compiler itself is replaced by one that takes no time."""
    names = []

    def link(name, ptx, capability):
        names.append(name)
        return f"{ptx} for {capability}".encode(), None

    monkeypatch.setattr(build, "compile_ptx", lambda variant: variant.name)
    monkeypatch.setattr(build, "link", link)
    return names


@pytest.fixture
def no_linker(monkeypatch):
    """A machine on which the linker's library is not installed."""
    load = pathfinder.load_nvidia_dynamic_lib

    def refuse(name):
        if name == "nvJitLink":
            raise pathfinder.DynamicLibNotFoundError(name)
        return load(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", refuse)


def test_a_kernel_is_compiled_once_and_said_so(cache_dir, compiled):
    said = []

    first = build.build(VARIANT, HOPPER, cache_dir, progress=said.append)
    second = build.build(VARIANT, HOPPER, cache_dir, progress=said.append)

    assert first == second
    assert compiled == [VARIANT.name]
    assert said == [f"compiling {VARIANT.name} for sm_90"]


@pytest.mark.parametrize("changed", ["source_hash", "toolchain_hash"])
def test_other_sources_or_another_toolchain_compile_again(
    changed, cache_dir, compiled, monkeypatch
):
    build.build(VARIANT, HOPPER, cache_dir)
    monkeypatch.setattr(build, changed, lambda *_: "0" * 16)
    build.build(VARIANT, HOPPER, cache_dir)

    assert len(compiled) == 2


def test_machine_code_is_known_by_every_source_of_ours_that_its_kernel_is_made_of():
    sources = {path.stem for path in build._own_sources(Path(attention_decode.__file__))}

    assert {"attention_decode", "attention_decode_tensor", "attention_partials"} <= sources
    assert {"attention_chunks", "exact_float32"} <= sources
    assert not {"sampling", "check"} & sources


def variant_of(beginning):
    """Return the first variant of the spread whose name begins so."""
    return next(one for one in all_variants(every=False) if one.name.startswith(beginning))


@pytest.mark.parametrize(
    ("beginning", "module"),
    [
        ("silu_mul", "clamped_mul"),
        ("rope_write_kv", "quantized_kv"),
        ("quantized_matmul", "four_bit_floats"),
        ("sampling_weights", "exponential"),
        ("sampling_t256", "philox"),
        ("logprobs", "exponential"),
    ],
)
def test_other_constants_of_the_reference_are_other_machine_code(beginning, module, monkeypatch):
    """They are compiled in, by way of other modules of kernels, too."""
    variants = variant_of(beginning), RmsNormVariant("float32", 256)
    before, read = [build.source_hash(one) for one in variants], Path.read_bytes
    changed = Path(str(reference.__file__)).parent / f"{module}.py"
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == changed))
    after = [build.source_hash(one) for one in variants]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True]


@pytest.mark.usefixtures("compiled")
def test_every_variant_and_architecture_has_its_own_machine_code(cache_dir):
    other = DecodeVariant("float32", 64, 2, 16)
    built = {
        build.build(variant, capability, cache_dir)
        for variant in (VARIANT, other)
        for capability in ((8, 0), HOPPER)
    }

    assert len(built) == 4
    assert build.source_hash(VARIANT) != build.source_hash(other)


@pytest.mark.usefixtures("compiled")
def test_a_new_cache_directory_is_private(tmp_path):
    build.build(VARIANT, HOPPER, tmp_path / "new" / "cache")

    # A plane's cache lies in that of the CPU executor's kernels, which must be private, too.
    for directory in (tmp_path / "new", tmp_path / "new" / "cache"):
        assert directory.stat().st_mode & 0o777 == 0o700
    assert len(list((tmp_path / "new" / "cache").iterdir())) == 1


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_open_to_others_is_refused(mode, cache_dir):
    cache_dir.chmod(mode)

    with pytest.raises(CacheDirectoryError, match=f"mode 0700, not {mode:#o}"):
        build.build(VARIANT, HOPPER, cache_dir)


@pytest.mark.usefixtures("compiled")
def test_a_directory_of_someone_else_is_refused(cache_dir, monkeypatch):
    owner = cache_dir.stat().st_uid
    monkeypatch.setattr(build.os, "getuid", lambda: owner + 1)

    with pytest.raises(CacheDirectoryError, match=f"must belong to uid {owner + 1}, not {owner}"):
        build.build(VARIANT, HOPPER, cache_dir)


@pytest.mark.usefixtures("compiled")
def test_a_link_to_a_directory_is_refused(cache_dir, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(cache_dir)

    with pytest.raises(CacheDirectoryError, match="not a link"):
        build.build(VARIANT, HOPPER, link)


@pytest.mark.usefixtures("compiled")
def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(CacheDirectoryError, match="File exists"):
        build.build(VARIANT, HOPPER, tmp_path / "file")


@pytest.mark.usefixtures("no_linker")
def test_a_missing_library_is_one_line_that_names_the_extra(cache_dir):
    with pytest.raises(MissingToolchainError) as refusal:
        build.build(VARIANT, HOPPER, cache_dir)

    assert str(refusal.value) == (
        "the CUDA compiler needs the library nvJitLink, which is not installed: "
        "the extra 'cuda' (in the source directory: pip install -c constraints.txt -e '.[cuda]')"
    )


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)

    with pytest.raises(MissingToolchainError, match=r"the Python package cuda\.bindings"):
        build.require_toolchain()


@pytest.mark.usefixtures("compiled")
def test_machine_code_made_elsewhere_serves_a_machine_without_the_toolchain(cache_dir, request):
    made = build.build(VARIANT, HOPPER, cache_dir)
    request.getfixturevalue("no_linker")

    assert build.build(VARIANT, HOPPER, cache_dir) == made
    with pytest.raises(MissingToolchainError):
        build.build(VARIANT, (8, 0), cache_dir)


def test_machine_code_made_elsewhere_serves_where_the_compiler_fails(cache_dir, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(build, "toolchain_hash", lambda: "another")
        build.store(VARIANT, HOPPER, cache_dir, b"made there")

    def lost(*_, **__):
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    monkeypatch.setattr(numba.cuda, "compile", lost)
    assert build.build(VARIANT, HOPPER, cache_dir) == b"made there"
    with pytest.raises(CompileError, match="no attribute 'row_stack'"):
        build.build(VARIANT, (8, 0), cache_dir)
    assert not build.is_built(VARIANT, HOPPER, cache_dir)


@pytest.mark.wide
def test_importing_the_kernels_loads_no_driver_and_no_torch():
    script = (
        "import sys, kernels.cuda.attention_decode, kernels.cuda.build, kernels.cuda.launch, "
        "kernels.cuda.check; print('torch' in sys.modules, "
        "any('libcuda.so' in line for line in open('/proc/self/maps')))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert shown.stdout.split() == ["False", "False"]
