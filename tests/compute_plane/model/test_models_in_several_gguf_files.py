"""Models whose tensors lie in several GGUF files, of which the first is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from compute_plane.model.errors import ModelFileError
from compute_plane.model.gguf_parts import names_of_parts
from compute_plane.model.loader import load_model
from compute_plane.model.source import fetch_from_hub
from tests.compute_plane.model.recorded_models import PROMPTS
from tests.devices import Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence


@pytest.fixture
def first(tiny, tmp_path: Path) -> Path:
    """The first of five files; there are 21 tensors."""
    return tiny.gguf(tmp_path / "m.gguf", tiny.model(tied=False), most_tensors=6)


def test_the_model_is_that_of_one_file(tiny, tmp_path: Path, first: Path) -> None:
    assert first.name == "m-00001-of-00005.gguf"
    whole = load_model(str(tiny.gguf(tmp_path / "whole.gguf", tiny.model(tied=False))))
    model = load_model(str(first))
    assert model.spec == whole.spec
    assert list(model.source.names) == list(whole.source.names)
    paths = set()
    for name in whole.source.names:
        one, other = model.source.tensor(name), whole.source.tensor(name)
        np.testing.assert_array_equal(one.to_float32(), other.to_float32())
        paths.add(one.path.name)
    assert paths == set(names_of_parts(first.name)[1:])
    said = []
    for one in (model, whole):
        with Target("cpu", "cpu").running(one, num_blocks=8, block_size=16) as executor:
            driver = BatchDriver(executor, num_blocks=8, block_size=16)
            said.append(driver.generate([DrivenSequence(list(PROMPTS[0]))], 5))
    assert said[0] == said[1]


def test_another_one_than_the_first_names_the_first(first: Path) -> None:
    with pytest.raises(ModelFileError, match=r"name the first one, m-00001-of-00005\.gguf"):
        load_model(str(first.with_name("m-00003-of-00005.gguf")))


def test_a_missing_part_is_named(first: Path) -> None:
    first.with_name("m-00004-of-00005.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"m-00004-of-00005\.gguf: No such file"):
        load_model(str(first))


def test_a_file_under_another_parts_name_is_noticed(first: Path) -> None:
    shutil.copy(first.with_name("m-00002-of-00005.gguf"), first.with_name("m-00003-of-00005.gguf"))
    with pytest.raises(ModelFileError, match=r"m-00003-of-.*: split\.no must be 2, got 1"):
        load_model(str(first))


def test_a_first_file_that_is_called_otherwise_says_how(first: Path) -> None:
    first.rename(first.with_name("other.gguf"))
    words = r"split\.count is 5: .* must be called NAME-00001-of-00005\.gguf"
    with pytest.raises(ModelFileError, match=words):
        load_model(str(first.with_name("other.gguf")))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"split.count": 0}, r"split\.count is 0: .*, 1024 at most, must be"),
        ({"split.count": 65535}, r"split\.count is 65535: .*, 1024 at most, must be"),
        ({"split.count": 2, "split.no": 1}, "one of 2 files of a model"),
        ({"split.count": 2, "split.no": 0}, r"m-00002-of-00002\.gguf: No such file"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    tiny, tmp_path: Path, numbers: dict[str, int], words: str
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for key, number in numbers.items():
            writer.add_uint16(key, number)

    path = tiny.gguf(tmp_path / "m-00001-of-00002.gguf", tiny.model(), change=change)
    with pytest.raises(ModelFileError, match=words) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("declared", [0, 21])
def test_tensors_are_counted_and_no_two_files_have_the_same(
    tiny, tmp_path: Path, declared: int
) -> None:
    made = tiny.model()
    num_tensors = len(made.weights)

    def write(number: int) -> Path:
        def change(writer: gguf.GGUFWriter) -> None:
            writer.add_uint16("split.count", 2)
            writer.add_uint16("split.no", number)
            writer.add_int32("split.tensors.count", declared or num_tensors)

        return tiny.gguf(tmp_path / f"m-0000{number + 1}-of-00002.gguf", made, change=change)

    path = write(0)
    write(1)
    with pytest.raises(ModelFileError, match=r"m-00002-of-.* is also in m-00001-of-00002\.gguf"):
        load_model(str(path))
    other = tmp_path / "m-00002-of-00002.gguf"
    writer = gguf.GGUFWriter(other, "llama")
    writer.add_uint16("split.count", 2)
    writer.add_uint16("split.no", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not declared:
        assert load_model(str(path)).spec.num_layers == 2
        return
    words = rf"split\.tensors\.count is 21, the files have {num_tensors}"
    with pytest.raises(ModelFileError, match=words):
        load_model(str(path))


def test_all_parts_are_fetched_from_the_hub(tmp_path: Path, monkeypatch) -> None:
    import huggingface_hub

    wanted: list[str] = []

    def download(_: str, allow_patterns: list[str]) -> str:
        wanted.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "Q4").mkdir()
    (tmp_path / "Q4" / "m-00001-of-00002.gguf").touch()
    found = fetch_from_hub("org/name", "Q4/m-00001-of-00002.gguf")
    assert found == tmp_path / "Q4" / "m-00001-of-00002.gguf"
    assert wanted == ["Q4/m-00001-of-00002.gguf", "Q4/m-00002-of-00002.gguf"]


def test_names_that_say_no_part_stand_for_one_file() -> None:
    assert names_of_parts("m.gguf") == ["m.gguf"]
    for name in ("m-00001-of-00000.gguf", "m-00001-of-09999.gguf", "m-1-of-2.gguf"):
        assert names_of_parts(name) == [name]
