from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from control_plane.text.assets import ModelAssets, make_tokenizer
from control_plane.text.huggingface_tokenizer import (
    HuggingFaceByteTokenizer,
    HuggingFaceTokenizer,
    load_huggingface_tokenizer,
)
from control_plane.text.simple_tokenizer import SimpleTokenizer
from control_plane.text.tokenizer import Tokenizer
from planes.errors import ConfigError, TokenizationError


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_simple_tokenizer_round_trips_every_text(text):
    tokenizer = SimpleTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_simple_tokenizer_has_the_names_of_the_protocol():
    tokenizer = SimpleTokenizer()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.vocab_size == 259
    specials = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert specials == [256, 257, 258]
    assert tokenizer.decode([*specials, 65]) == "A"


def test_the_simple_tokenizer_refuses_what_it_does_not_know():
    with pytest.raises(TokenizationError, match="0 to 258, got 259"):
        SimpleTokenizer().decode([259])
    with pytest.raises(ConfigError, match="at least 259, got 10"):
        SimpleTokenizer(10)
    assert SimpleTokenizer(512).decode([511, 66]) == "B"


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_byte_level_tokenizer_round_trips_every_text(tokenizer_json, text):
    tokenizer = load_huggingface_tokenizer(tokenizer_json)
    assert isinstance(tokenizer, HuggingFaceByteTokenizer)
    assume("<|" not in text)  # may spell a special token, which decoding leaves out
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_bytes_of_every_token_are_what_the_library_decodes(tokenizer_json):
    tokenizer = load_huggingface_tokenizer(tokenizer_json)
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        assert text == tokenizer.decode([token_id]), token_id


def test_special_tokens_in_a_prompt_are_read_as_such_and_have_no_text(tokenizer_json):
    tokenizer = load_huggingface_tokenizer(tokenizer_json)
    ids = tokenizer.encode("<|im_start|>hi")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.token_bytes(1) == b""


def test_bos_is_put_in_front_only_if_the_model_says_so(tokenizer_json):
    plain = load_huggingface_tokenizer(tokenizer_json, bos_token_id=0)
    with_bos = load_huggingface_tokenizer(tokenizer_json, bos_token_id=0, add_bos_token=True)
    assert with_bos.encode("hi") == [0, *plain.encode("hi")]
    assert with_bos.encode("") == [0]
    with pytest.raises(TokenizationError, match="names none"):
        load_huggingface_tokenizer(tokenizer_json, add_bos_token=True)


def test_another_decoder_than_the_byte_level_one_is_not_read_as_bytes(metaspace_json):
    tokenizer = load_huggingface_tokenizer(metaspace_json, eos_token_id=2)
    assert type(tokenizer) is HuggingFaceTokenizer
    assert tokenizer.decode(tokenizer.encode("hello 你 🙂")) == "hello 你 🙂"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 2)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b"[1]", b'{"version": "1.0"}'])
def test_a_broken_tokenizer_file_is_a_typed_error(data):
    with pytest.raises(TokenizationError, match=r"tokenizer\.json cannot be read"):
        load_huggingface_tokenizer(data)


def test_lone_surrogates_are_a_typed_error(tokenizer_json):
    for tokenizer in (SimpleTokenizer(), load_huggingface_tokenizer(tokenizer_json)):
        with pytest.raises(TokenizationError, match="the prompt is not valid Unicode"):
            tokenizer.encode("ab\ud800")


def test_assets_name_their_tokenizer(tokenizer_json):
    assert make_tokenizer(ModelAssets("m", simple_vocab_size=300)).vocab_size == 300
    assets = ModelAssets("m", tokenizer_json=tokenizer_json, eos_token_ids=(0, 1))
    assert make_tokenizer(assets).eos_token_id == 0
    with pytest.raises(TokenizationError, match="m comes without a tokenizer"):
        make_tokenizer(ModelAssets("m"))


@pytest.mark.parametrize("what", ["encode", "decode"])
def test_others_run_while_a_long_text_becomes_tokens_or_comes_of_them(tokenizer_json, what):
    tokenizer = load_huggingface_tokenizer(tokenizer_json)
    text = "hello 你 🙂" * 5_000
    given = text if what == "encode" else tokenizer.encode(text)
    begins, has_run, has_ended = threading.Event(), [], []

    def work() -> None:
        begins.set()
        for _ in range(100):  # the other is woken while one of them lasts, at the latest
            if has_run:
                break
            getattr(tokenizer, what)(given)
        has_ended.append(True)

    before = sys.getswitchinterval()
    sys.setswitchinterval(10)  # nobody runs before the other lets go of the interpreter
    try:
        thread = threading.Thread(target=work)
        thread.start()
        begins.wait()
        has_run.append(True)
        assert not has_ended
    finally:
        sys.setswitchinterval(before)
        thread.join()


def test_a_long_text_has_the_tokens_of_its_parts(tokenizer_json):
    tokenizer = load_huggingface_tokenizer(tokenizer_json)
    ids = tokenizer.encode("hello 你 ")
    assert tokenizer.encode("hello 你 " * 200) == ids * 200
    assert tokenizer.decode(ids * 200) == "hello 你 " * 200


def test_special_tokens_are_spelled_out_where_that_is_asked_for(tokenizer_json, metaspace_json):
    for data, text in ((tokenizer_json, "<|im_start|>hé 你"), (metaspace_json, "hé 你</s>")):
        tokenizer = load_huggingface_tokenizer(data)
        ids = tokenizer.encode(text)
        assert tokenizer.decode_with_special(ids) == text
        assert tokenizer.decode(ids) != text
    tokenizer = load_huggingface_tokenizer(tokenizer_json)
    ids = tokenizer.encode("<|im_start|>hé 你")
    assert tokenizer.decode_with_special(ids * 200) == "<|im_start|>hé 你" * 200
