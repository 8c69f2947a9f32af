"""What GGUF files' names of ways to cut words mean, where llama.cpp cuts otherwise or in a row."""

from __future__ import annotations

import functools
import json

import pytest
import regex
from tokenizers import Tokenizer

from compute_plane.model.pre_tokenizers import WORD_SPLITS

OF_KIMI = regex.compile(
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]*"
    r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]+"
    r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    regex.V1,
)
"""The pattern of Moonshot's tokenizer, as another library reads it."""


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Return a tokenizer without tokens."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    cut = WORD_SPLITS[kind].pre_tokenizer
    return Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": cut}))


def words_of(kind: str, text: str) -> list[str]:
    """Return the words of a text, by the places where they begin and end."""
    cut = tokenizer_of(kind).pre_tokenizer
    assert cut is not None
    return [text[begin:end] for _, (begin, end) in cut.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("deepseek-llm", "in 2024, x", ["in", " ", "2", "0", "2", "4", ",", " x"]),
        ("deepseek-llm", "É\u0301 αβ ℵ", ["É", "\u0301", " αβ", " ", "ℵ"]),
        ("deepseek-llm", "a b가나 +x\r\n", ["a", " b", "가나", " +", "x", "\r", "\n"]),
        ("deepseek-llm", "§  \t ", ["§", "  \t "]),
        ("deepseek-llm", "a\u3000b", ["a", "\u3000", "b"]),
        ("deepseek-coder", "in 2024, x$", ["in", " ", "2", "0", "2", "4", ",", " x", "$"]),
        ("deepseek-coder", " 가나 다", [" ", "가나", " ", "다"]),
        ("deepseek-coder", "a  (b)\n\n", ["a", " ", " (", "b", ")", "\n", "\n"]),
        (
            "deepseek-v3",
            "in 20245 .text _x;\n\n",
            ["in", " ", "202", "45", " .", "text", " _", "x", ";\n\n"],
        ),
        ("deepseek-v3", "x北京カa e\u0301b", ["x", "北京カ", "a", " e\u0301b"]),
        ("joyai-llm", "12345$ab", ["123", "45", "$ab"]),
        ("youtu", "CamelCase 12 x/\n", ["Camel", "Case", " ", "1", "2", " x", "/\n"]),
        ("youtu", "don't，가ㄱㄴx北京ㄅ", ["don't", "，", "가ㄱㄴ", "x", "北京", "ㄅ"]),
        ("kimi-k2", "CamelCase don't 12345", ["Camel", "Case", " don't", " ", "123", "45"]),
        ("kimi-k2", "x北京々y カ。", ["x", "北京々", "y", " カ", "。"]),
    ],
)
def test_words_of_deepseek_s_kind_of_models_are_those(
    kind: str, text: str, words: list[str]
) -> None:
    assert words_of(kind, text) == words


def test_kimi_s_words_are_those_of_its_own_pattern() -> None:
    pieces = [
        "北",
        "々",
        "カ",
        "Ab",
        "A",
        "b",
        "é",
        "e\u0301",
        "'S",
        "'",
        " ",
        "\n",
        "\r\n",
        "\t",
        "1",
    ]
    pieces += ["٣", "!", "/", "_", "ǅ", "ʰ", "😀", "\u3000", "〇", "㐀", "⺀", "ａ"]
    for first in pieces:
        for second in pieces:
            for third in pieces:
                text = first + second + third + first
                assert words_of("kimi-k2", text) == OF_KIMI.findall(text), text
