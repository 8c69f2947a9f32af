"""docs/models.md names what loads, and the formats in which it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compute_plane.executor.weight_formats import OWN_FORMAT
from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.gguf_header import TENSOR_FORMATS
from compute_plane.model.group_config import METHODS
from compute_plane.model.hf_model_types import MODEL_TYPES
from compute_plane.model.hf_text_part import WHOLE_MODELS
from compute_plane.model.pre_tokenizers import WORD_SPLITS
from compute_plane.model.tensor import TensorFormat

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")


def column(heading: str, place: int) -> list[str]:
    """Return the cells of a table's column, the table being the first under a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    return [row[place].strip() for row in rows[2:]]


def test_every_architecture_is_listed_by_its_names_in_files_and_no_other():
    in_gguf, in_directories = column("Architectures", 1), column("Architectures", 2)
    assert {name.strip("`") for name in in_gguf} == {
        name for name, architecture in ARCHITECTURES.items() if architecture.is_in_gguf
    }
    # Of some only GGUF files are read.
    assert {name.strip("`") for name in in_directories} - {"–"} == {*MODEL_TYPES, *WHOLE_MODELS}


def test_formats_of_gguf_files_run_on_the_cpu_as_the_page_says():
    said: dict[str, str] = {}
    for stored, runs_as in zip(
        column("Formats of weights", 0), column("Formats of weights", 1), strict=True
    ):
        said |= {name: name if runs_as == "as it is" else runs_as for name in stored.split(", ")}
    for stored in TENSOR_FORMATS.values():
        assert said[stored.label] == OWN_FORMAT[stored].label


def test_formats_of_gguf_files_run_on_a_gpu_as_the_page_says():
    pytest.importorskip("torch")
    from compute_plane.cuda.weight_plan import RUNS_AS

    said: dict[str, str] = {}
    for stored, runs_as in zip(
        column("Formats of weights", 0), column("Formats of weights", 2), strict=True
    ):
        said |= {name: name if runs_as == "as it is" else runs_as for name in stored.split(", ")}
    plain = {TensorFormat.F32, TensorFormat.F16, TensorFormat.BF16}
    for stored in set(TENSOR_FORMATS.values()) - plain:
        assert said[stored.label] == RUNS_AS[stored].label
    assert {said[stored.label] for stored in plain} == {"the dtype of the step"}


@pytest.mark.parametrize("name", METHODS)
def test_every_way_of_quantising_directories_is_named(name):
    assert re.search(re.escape(name), PAGE, flags=re.IGNORECASE)


def test_every_way_of_cutting_words_is_named():
    listed = PAGE.partition("one of the ways that are known (")[2].partition(")")[0]
    assert set(re.findall(r"`([^`]+)`", listed)) == set(WORD_SPLITS)


def test_only_experts_with_biases_have_a_clamped_gate() -> None:
    """The CPU engine's experts are one or the other (`expert_records`)."""
    for architecture in ARCHITECTURES.values():
        assert (architecture.activation == "clamped") is architecture.has_all_biases
