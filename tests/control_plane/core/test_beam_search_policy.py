"""Beam search by hand, by exhaustion, and beside transformers."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest

from control_plane.core.batch import TokenLogprobs
from control_plane.core.beam import Beam, BeamSearch, Continuation


def top(**logprobs: float) -> TokenLogprobs:
    """`t3=-0.5`: token 3 has log-probability −0.5."""
    pairs = sorted(((int(k[1:]), v) for k, v in logprobs.items()), key=lambda pair: -pair[1])
    return TokenLogprobs(pairs[0][1], tuple(t for t, _ in pairs), tuple(p for _, p in pairs))


def test_beams_are_forked_and_dropped_by_the_sum_of_their_log_probabilities():
    search = BeamSearch(2, max_tokens=5, end_token_ids=frozenset({0}))
    assert search.step([top(t1=-1.0, t2=-1.5, t3=-3.0)]) == [
        Continuation(0, 1, -1.0),
        Continuation(0, 2, -1.5),
    ]
    assert search.step([top(t4=-4.0, t5=-5.0), top(t6=-0.25, t7=-0.5)]) == [
        Continuation(1, 6, -1.75),
        Continuation(1, 7, -2.0),
    ]
    assert [beam.tokens for beam in search.beams] == [(2, 6), (2, 7)]


def test_a_beam_that_ends_is_an_answer_only_among_the_best_and_others_take_its_place():
    search = BeamSearch(2, max_tokens=5, end_token_ids=frozenset({0}))
    going_on = search.step([top(t0=-0.5, t1=-1.0, t2=-2.0, t3=-3.0)])
    assert [c.token_id for c in going_on] == [1, 2]
    assert [(h.tokens, h.has_ended) for h in search.finished] == [((), True)]
    search.step([top(t4=-0.1, t5=-0.2, t0=-0.3), top(t6=-9.0)])  # the end is only third best
    assert len(search.finished) == 1


def test_the_last_token_ends_every_beam():
    search = BeamSearch(2, max_tokens=1, end_token_ids=frozenset({0}))
    assert search.step([top(t1=-1.0, t2=-2.0, t3=-3.0)]) == []
    assert [(h.tokens, h.has_ended) for h in search.finished] == [((1,), False), ((2,), False)]


def test_early_stopping_ends_the_search_with_as_many_answers_as_beams():
    for early_stopping, num_going_on in ((True, 0), (False, 2)):
        search = BeamSearch(
            2, max_tokens=9, end_token_ids=frozenset({0}), early_stopping=early_stopping
        )
        search.step([top(t0=-0.1, t1=-0.2, t2=-1.0)])
        # Answers: −0.1, and now −2.2 / 2. The best running beam, −0.3 / 2, is better than that.
        going_on = search.step([top(t3=-0.1, t0=-2.0, t4=-9.0), top(t5=-9.0)])
        assert [h.tokens for h in search.finished] == [(), (1,)]
        assert len(going_on) == num_going_on


def test_answers_are_the_best_of_all_that_have_ended_and_no_more_than_beams():
    search = BeamSearch(2, max_tokens=9, end_token_ids=frozenset({0}))
    search.step([top(t0=-0.1, t1=-0.2, t2=-0.3)])
    search.step([top(t0=-0.1, t3=-0.2, t4=-9.0), top(t0=-0.05, t3=-9.0, t4=-9.5)])
    assert [h.tokens for h in search.finished] == [(), (1,)]  # and not (2,)


def test_a_search_is_over_where_a_running_beam_could_only_become_as_good():
    search = BeamSearch(1, max_tokens=9, end_token_ids=frozenset({0}))
    assert search.step([top(t0=-0.5, t1=-0.5)]) == []
    assert [h.tokens for h in search.finished] == [()]


def test_scores_that_are_one_float32_are_equal_and_the_lower_token_comes_first():
    search = BeamSearch(2, max_tokens=9, end_token_ids=frozenset({0}))
    going_on = search.step([top(t5=-1.0, t4=-1.00000001, t6=-2.0)])
    assert [c.token_id for c in going_on] == [4, 5]


@pytest.mark.parametrize("num_tokens", [40_000, 1_000_000])
@pytest.mark.parametrize("length_penalty", [-10.0, 10.0])
def test_a_score_beyond_what_a_float32_holds_ends_no_engine(length_penalty, num_tokens):
    search = BeamSearch(1, num_tokens, frozenset({0}), length_penalty)
    search.beams = [Beam((1,) * (num_tokens - 1), -100.0)]
    assert search.step([top(t1=-0.5, t2=-1.0)]) == []
    (found,) = search.finished
    assert len(found.tokens) == num_tokens
    assert found.score == (-math.inf if length_penalty < 0 else 0.0)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_a_search_wide_enough_finds_the_best_answer_there_is(length_penalty):
    vocabulary, num_tokens = range(1, 4), 3

    def logprob(tokens, token):
        return -(((sum(tokens) * 7 + token * 5 + len(tokens)) % 11) / 4 + 0.1)

    search = BeamSearch(9, num_tokens, frozenset({0}), length_penalty=length_penalty)
    while search.beams:
        search.step(
            [top(**{f"t{t}": logprob(beam.tokens, t) for t in vocabulary}) for beam in search.beams]
        )
    best = max(
        itertools.product(vocabulary, repeat=num_tokens),
        key=lambda ts: sum(logprob(ts[:i], ts[i]) for i in range(num_tokens)),
    )
    assert search.finished[0].tokens == best


@pytest.mark.parametrize("num_ends", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_candidates_asked_for_lead_to_the_same_as_the_whole_vocabulary(width, num_ends):
    random = Random(width * 10 + num_ends)
    for _ in range(50):
        ends = frozenset(random.sample(range(30), num_ends))
        narrow, whole = (BeamSearch(width, 6, ends) for _ in range(2))
        while whole.beams:
            rows = []
            for _ in whole.beams:
                row = [(token, -random.expovariate(0.3)) for token in range(30)]
                rows.append(sorted(row, key=lambda pair: -pair[1]))
            going_on = [
                search.step(
                    [
                        TokenLogprobs(
                            0.0, *(tuple(column) for column in zip(*row[:n], strict=True))
                        )
                        for row in rows
                    ]
                )
                for search, n in ((narrow, narrow.num_candidates), (whole, 30))
            ]
            assert going_on[0] == going_on[1]
        assert narrow.finished == whole.finished


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5, 2.0])
@pytest.mark.parametrize("width", [2, 3, 5, 10])
def test_the_answer_is_that_of_transformers(width, length_penalty, early_stopping):
    import torch
    import transformers

    torch.manual_seed(width)
    config = transformers.LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, initializer_range=1.0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    num_compared = 0
    for prompt in ([5, 6, 7], [9], [3, 3, 8, 2], [11, 4]):
        expected = model.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, do_sample=False,
            max_new_tokens=12, length_penalty=length_penalty, early_stopping=early_stopping,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        expected = [s.tolist()[len(prompt) :] for s in expected.sequences]
        search = BeamSearch(
            width, 12, frozenset({0}), length_penalty=length_penalty, early_stopping=early_stopping
        )
        while search.beams:
            tokens = torch.tensor([[*prompt, *beam.tokens] for beam in search.beams])
            with torch.no_grad():
                logprobs = model(tokens).logits[:, -1].float().log_softmax(-1)
            values, ids = logprobs.topk(min(search.num_candidates, 23))
            search.step(
                [
                    TokenLogprobs(v[0], tuple(i), tuple(v))
                    for v, i in zip(values.tolist(), ids.tolist(), strict=True)
                ]
            )
        for hypothesis, tokens in zip(search.finished, expected, strict=False):
            end = tokens.index(0) if 0 in tokens else len(tokens)
            assert list(hypothesis.tokens) == tokens[:end]
            num_compared += 1
    assert num_compared == 4 * width
