"""Tokens of reasoning: those any text of which is reasoning, however tokens come in pieces."""

from __future__ import annotations

import itertools
import random

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.text.answers.call_readers import HermesReader
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.reader import AnswerReader

MAY_BEGIN, HAS_BEGUN, IS_OVER = Thinking.MAY_BEGIN, Thinking.HAS_BEGUN, Thinking.IS_OVER

ANSWERS = [
    (MAY_BEGIN, ["<think>", "\n", "Rain", "?", "\n", "</think>", "\n\n", "It", " rains"], 2),
    # Space within counts, a mark in pieces does not.
    (MAY_BEGIN, [" ", "<th", "ink>", "a", "\n\n", "b", "</", "thi", "nk>", "c"], 3),
    # A token that is a mark and more, at either end, and one that is all.
    (MAY_BEGIN, ["<think>a", "b</think>", "c"], 2),
    (MAY_BEGIN, ["<think>a</think>c", "d"], 1),
    (MAY_BEGIN, ["<think>\n\n", "a", "\n</think>", "c"], 1),
    # What looks like the end and is none; an end that never comes, with what was held back.
    (MAY_BEGIN, ["<think>", "a", "</th", "e", "</think>", "c"], 3),
    (MAY_BEGIN, ["<think>", "a", " ", "\n", "</thi"], 4),
    # Nothing was thought, or nobody could have.
    (MAY_BEGIN, ["<think>", "\n\n", "</think>", "c"], 0),
    (MAY_BEGIN, ["<think>"], 0),
    (MAY_BEGIN, ["Hi", "<think>", "a", "</think>"], 0),
    (MAY_BEGIN, [], 0),
    (IS_OVER, ["<think>", "a", "</think>"], 0),
    # The prompt opened it.
    (HAS_BEGUN, ["\n", "a", "b", "</think>", "c"], 2),
    (HAS_BEGUN, ["</think>", "c"], 0),
    # Tokens without text, as of half a character, count with what comes behind them.
    (MAY_BEGIN, ["", "<think>", "", "a", "", "b", "", "</think>", "", "c"], 4),
    (HAS_BEGUN, ["a", " " * 5000, "b", "</think>", "c"], 3),
    (HAS_BEGUN, ["a" * 3000, "b", "</think>"], 2),
]


class Texts:
    """A detokenizer whose tokens are numbers of texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def push(self, tokens) -> str:
        return "".join(self._texts[token] for token in tokens)

    def finish(self) -> str:
        return ""


def counted(thinking, texts, cuts, push=AnswerReader.push) -> int:
    """Tokens that a reader counts which gets them in pieces that end at `cuts`."""
    form = AnswerFormat(thinking, HermesReader)
    params = GenerationParams(seed=1)
    reader = AnswerReader(form, [1], params, make_detokenizer=lambda: Texts(texts))
    for begin, end in itertools.pairwise([0, *cuts, len(texts)]):
        tokens = range(begin, end)
        push(reader, 0, "".join(texts[token] for token in tokens), tokens)
    reader.finish(0, "stop")
    return reader.num_reasoning_tokens


@pytest.mark.parametrize(("thinking", "texts", "count"), ANSWERS)
def test_tokens_with_a_part_in_the_reasoning_count_for_every_cut(thinking, texts, count):
    every = range(1, len(texts))
    cuts = [(), every, *((cut,) for cut in every)]
    draw = random.Random(3)
    cuts += [tuple(sorted(draw.sample(every, len(every) // 2))) for _ in range(10)]
    for push in (AnswerReader.push, AnswerReader.feed):
        assert {counted(thinking, texts, cut, push) for cut in cuts} == {count}


def test_nobody_counts_without_a_detokenizer():
    reader = AnswerReader(AnswerFormat(MAY_BEGIN), [1], GenerationParams(seed=1))
    reader.push(0, "<think>a</think>", [1])
    reader.finish(0, "stop")
    assert reader.num_reasoning_tokens == 0


def test_samples_are_counted_together():
    texts = ["<think>", "a", "b", "</think>", "c"]
    reader = AnswerReader(
        AnswerFormat(MAY_BEGIN),
        [1],
        GenerationParams(seed=1, n=2),
        make_detokenizer=lambda: Texts(texts),
    )
    for token in range(5):
        for sample in range(2):
            reader.push(sample, texts[token], [token])
    for sample in range(2):
        reader.finish(sample, "stop")
    assert reader.num_reasoning_tokens == 4
