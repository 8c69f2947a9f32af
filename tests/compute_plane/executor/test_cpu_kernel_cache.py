from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numba
import pytest

from compute_plane.executor.kernel_cache import kernel_fingerprint, prepare_kernel_cache
from planes.errors import ConfigError


@pytest.fixture(autouse=True)
def _numba_keeps_its_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)


def test_the_cache_is_private_and_named_after_the_sources(tmp_path: Path) -> None:
    directory = prepare_kernel_cache(tmp_path / "cache")
    assert directory == tmp_path / "cache" / kernel_fingerprint()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.parent.stat().st_mode & 0o777 == 0o700
    assert str(directory) == numba.config.CACHE_DIR
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


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from compute_plane.executor.kernel_cache import prepare_kernel_cache\n"
        "prepare_kernel_cache(pathlib.Path(sys.argv[1]))\n"
        "from kernels.cpu import row_inputs, step\n"
        "row_inputs.plain_rows.address\n"
        "for kernel in (step.work, row_inputs.plain_rows._compiled):\n"
        "    hits = getattr(kernel, 'stats', None)\n"
        "    print(sum(hits.cache_hits.values()) if hits else kernel.cache_hits, end=' ')\n"
    )
    hits = [
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "cache")],
            check=True, capture_output=True, text=True,
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert hits == [["0", "0"], ["1", "1"]]
