"""Files of a Hugging Face directory that are damaged or hostile are named with their fault."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.safetensors import read_header
from tests.compute_plane.model.llama_weights import decoded_weights

FILE_SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"[]", "expected a JSON object, got list"),
        ("config.json", b"\xff", "not UTF-8"),
        ("config.json", b'{"a":1,"a":2}', "key a appears twice"),
        ("config.json", b'{"a":' + b"[" * 100_000, "not valid JSON"),
        ("config.json", b'{"hidden_size":' + b"9" * 5000 + b"}", "not valid JSON"),
        ("config.json", b" " * (1 << 21), "larger than 1048576 bytes"),
        ("config.json", b'{"model_type":"\\ud800"}', "half a character"),
        ("config.json", None, "m: no Hugging Face directory: it has no config.json"),
        ("tokenizer.json", b"{}", "not a tokenizer the library can read"),
        ("tokenizer.json", None, "No such file"),
        ("generation_config.json", b"nope", "not valid JSON"),
        ("tokenizer_config.json", b'{"eos_token":"<nope>"}', "eos_token '<nope>' is not in the"),
        ("tokenizer_config.json", b'{"eos_token":7}', "eos_token must be a string, got 7"),
        ("tokenizer_config.json", b'{"eos_token":"\\udfff"}', "half a character"),
        ("tokenizer_config.json", b'{"chat_template":"\\ud83d"}', "half a character"),
        ("tokenizer_config.json", b'{"chat_template":7}', "chat_template must be a string"),
        ("model.safetensors", None, "no model.safetensors"),
        ("model.safetensors", b"", "the file is empty"),
        ("model.safetensors", b"\x00" * 7, "truncated: 7 bytes"),
        ("model.safetensors", b"\xff" * 64, "it declares 18446744073709551615"),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]", "expected a JSON object"),
        ("model.safetensors.index.json", b"{}", "weight_map must be an object"),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(tiny, tmp_path, file, content, words):
    directory = tiny.directory(tmp_path / "m", tiny.model())
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        load_model(str(directory))
    assert words in caught.value.message
    assert caught.value.message.startswith(str(directory))
    assert caught.value.message.isprintable()
    if content is not None:
        assert file in caught.value.message


def test_a_config_whose_link_leads_nowhere_is_there_and_named(tiny, tmp_path):
    directory = tiny.directory(tmp_path / "m", tiny.model())
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("gone")
    with pytest.raises(ModelFileError, match=r"config\.json: No such file"):
        load_model(str(directory))


def test_a_sentencepiece_model_alone_is_refused_by_name(tiny, tmp_path):
    directory = tiny.directory(tmp_path / "m", tiny.model())
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    with pytest.raises(
        UnsupportedModelError, match=r"tokenizer\.model: .* needs a tokenizer\.json"
    ):
        load_model(str(directory))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tiny, tmp_path, file):
    directory = tiny.directory(tmp_path / "m", tiny.model())
    (directory / file).unlink()
    os.mkfifo(directory / file)
    with pytest.raises(ModelFileError, match=f"{file}: not a regular file"):
        load_model(str(directory))


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


HOSTILE_HEADERS = {
    "is not described by an object": {"a": 3},
    "has type I64": {"a": ENTRY | {"dtype": "I64"}},
    "has type ['F32']": {"a": ENTRY | {"dtype": ["F32"]}},
    "has shape [4, 0]": {"a": ENTRY | {"shape": [4, 0]}},
    "has shape [4, -1]": {"a": ENTRY | {"shape": [4, -1]}},
    "has shape [True, 4]": {"a": ENTRY | {"shape": [True, 4]}},
    "shape [] as F32 needs 4": {"a": ENTRY | {"shape": []}},
    "has shape [1000000": {"a": ENTRY | {"shape": [10**4000, 10**4000]}},
    "needs 1125899906842624": {"a": ENTRY | {"shape": [1 << 48]}},
    "has data_offsets [0, 48]": {"a": ENTRY | {"data_offsets": [0, 48]}},
    "has data_offsets [16, 0]": {"a": ENTRY | {"data_offsets": [16, 0]}},
    "has data_offsets [-16, 0]": {"a": ENTRY | {"data_offsets": [-16, 0]}},
    "has data_offsets [0, 16.0]": {"a": ENTRY | {"data_offsets": [0, 16.0]}},
    "has data_offsets None": {"a": {"dtype": "F32", "shape": [4]}},
    "overlaps the one before it": {"a": ENTRY, "b": ENTRY | {"data_offsets": [8, 24]}},
    "16 unused bytes before a": {"a": ENTRY | {"data_offsets": [16, 32]}},
    "the tensors take 16 bytes of data, the file has 32": {"a": ENTRY},
}


@pytest.mark.parametrize("words", HOSTILE_HEADERS)
def test_a_hostile_safetensors_header_is_refused_with_its_fault(tmp_path, words):
    text = json.dumps(HOSTILE_HEADERS[words]).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert words in caught.value.message
    assert len(caught.value.message) < 1000


@FILE_SETTINGS
@given(data=st.data())
def test_damaged_safetensors_load_or_are_refused(tiny, tmp_path, data):
    model = tiny.model()
    directory = tmp_path / "m"
    if not directory.exists():
        tiny.directory(directory, model)
        (directory / "whole").write_bytes((directory / "model.safetensors").read_bytes())
    content = bytearray((directory / "whole").read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    is_cut = data.draw(st.booleans(), label="cut")
    if is_cut:
        del content[data.draw(st.integers(0, len(content) - 1), label="end") :]
    else:
        at = data.draw(st.integers(0, header_end - 1), label="byte")
        content[at] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    (directory / "model.safetensors").write_bytes(content)
    error = None
    try:
        decoded_weights(load_model(str(directory)))
    except ModelFileError as fault:
        error = fault
    assert error is not None or not is_cut
    if error is not None:
        assert error.message.startswith(str(directory))
        assert error.message.isprintable()


def test_weights_that_are_not_finite_are_reported_with_their_tensor(tiny, tmp_path):
    model = tiny.model()
    model.weights["model.layers.1.mlp.down_proj.weight"][3, 5] = np.nan
    loaded = load_model(str(tiny.directory(tmp_path / "m", model)))
    with pytest.raises(ModelFileError, match=r"model\.safetensors: .*down_proj.* row 3, column 5"):
        decoded_weights(loaded)
