"""FlashInfer's kernels are compiled into a bundle; pip and the compilers are played."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu import flashinfer_modules


def flashinfer_in(site: Path) -> Path:
    """Make what FlashInfer's package has, empty."""
    data = site / "flashinfer" / "data"
    for name in ("csrc", *flashinfer_modules.SOURCES):
        (data / name).mkdir(parents=True)
    return data


def test_flashinfer_is_brought_with_its_modules_where_it_looks_for_them(tmp_path):
    """`run` plays pip, the C compiler, and FlashInfer compiling into its workspace."""
    data = flashinfer_in(tmp_path / "site")
    commands = []

    def run(command, *, check):
        assert check
        commands.append(command)
        if "pip" in command:
            target = Path(command[command.index("--target") + 1])
            (target / "nvidia" / "cu13" / "lib").mkdir(parents=True)
        elif command[0] == "sh":
            variables = dict(word.split("=", 1) for word in command[7:-3])
            assert variables["FLASHINFER_CUDA_ARCH_LIST"] == "9.0a"
            assert Path(variables["CUDA_HOME"], "lib64", "stubs").is_dir()
            made = Path(variables["FLASHINFER_WORKSPACE_BASE"], ".cache/flashinfer/0.5.3/90a")
            (made / "cached_ops" / "page").mkdir(parents=True)
            (made / "cached_ops" / "page" / "page.so").write_bytes(b"code")
            (made / "cached_ops" / "page" / "page.cuda.o").touch()

    flashinfer_modules.add_to(tmp_path / "site", "9.0", tmp_path / "temporary", run=run)
    assert len(commands) == 3
    assert {"flashinfer-python==0.5.3", "nvidia-cuda-nvcc==13.0.88"} < set(commands[0])
    assert [str(it.relative_to(data)) for it in sorted(data.rglob("*"))] == [
        "aot", "aot/page", "aot/page/page.so", "csrc"
    ]  # fmt: skip


def test_modules_that_are_nowhere_are_noticed(tmp_path):
    """Without them and without a compiler FlashInfer would fail where minutes are dear."""
    data = flashinfer_in(tmp_path / "site")

    def run(command, *, check):
        assert check
        if "pip" in command:
            target = Path(command[command.index("--target") + 1])
            (target / "nvidia" / "cu13" / "lib").mkdir(parents=True)

    with pytest.raises(FileNotFoundError, match="no modules"):
        flashinfer_modules.add_to(tmp_path / "site", "9.0", tmp_path / "temporary", run=run)
    assert (data / "include").exists()


@pytest.mark.parametrize(
    ("capability", "name"), [("8.0", "8.0"), ("9.0", "9.0a"), ("12.0", "12.0a")]
)
def test_new_devices_get_what_only_they_can_run(capability, name):
    assert flashinfer_modules.architecture(capability) == name
