from __future__ import annotations

import asyncio
import dataclasses
import re

import numpy as np
import pytest

from control_plane.core.embedding import NOTHING_GENERATED, Pooling
from control_plane.core.errors import ContextLengthError, RequestNeverFitsError
from control_plane.core.generation_params import GenerationParams
from control_plane.core.limits import RequestLimits
from control_plane.core.request_options import RequestOptions
from control_plane.engine.admission import Admission
from control_plane.engine.text_service import TextService
from control_plane.text.simple_tokenizer import SimpleTokenizer
from planes.default_int import DefaultInt
from planes.errors import EngineError, ValidationError


@pytest.fixture
def admission():
    limits = RequestLimits(max_model_len=20, block_size=4, num_blocks=5)
    return Admission(SimpleTokenizer(), limits, vocab_size=259, eos_token_ids=(257,))


def test_requests_are_numbered_and_stamped_and_get_a_seed_of_their_own(admission):
    first, second = (
        admission.make_request([1], GenerationParams(max_tokens=3), arrival_time=t)
        for t in (1.0, 2.0)
    )
    assert (first.id, second.id) == (1, 2)
    assert (first.arrival_time, second.arrival_time) == (1.0, 2.0)
    assert first.params.seed != second.params.seed
    assert first.eos_token_ids == {257}


def test_a_given_seed_stays(admission):
    params = GenerationParams(max_tokens=3, seed=0)
    assert admission.make_request([1], params, arrival_time=0.0).params.seed == 0


def test_prompt_and_completion_may_fill_the_model_length_and_no_more(admission):
    params = GenerationParams(max_tokens=15)
    assert admission.make_request([1] * 5, params, arrival_time=0.0).max_total_len == 20
    with pytest.raises(ContextLengthError, match=r"at most 14 after .* 6 tokens .* got 15") as left:
        admission.make_request([1] * 6, params, arrival_time=0.0)
    assert left.value.field == "max_tokens"


def test_a_length_that_nobody_gave_is_what_the_context_has_left(admission):
    for num_prompt_tokens, num_left in ((1, 19), (12, 8), (19, 1)):
        for default in (100, 8):
            params = GenerationParams(max_tokens=DefaultInt(default))
            request = admission.make_request([1] * num_prompt_tokens, params, arrival_time=0.0)
            assert request.max_tokens == min(default, num_left)
            assert type(request.params.max_tokens) is int
    plain = admission.make_request([1], GenerationParams(), arrival_time=0.0)
    assert plain.max_tokens == 19
    with pytest.raises(ContextLengthError, match=r"has 20 tokens, max_model_len \(20\)") as caught:
        admission.make_request([1] * 20, GenerationParams(), arrival_time=0.0)
    assert caught.value.field == "prompt"


def test_first_tokens_that_may_not_be_ends_are_a_mask_of_all_others(admission):
    def opens(**given):
        params = GenerationParams(**{"max_tokens": 3, "min_tokens": 2, **given})
        mask = admission.make_request([1], params, arrival_time=0.0).open_tokens
        return [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]

    assert opens() == [token for token in range(259) if token != 257]
    assert opens(stop_token_ids=(0, 258)) == [*range(1, 257)]
    assert opens(ignore_eos=True, stop_token_ids=(5,)) == [t for t in range(259) if t != 5]
    assert opens(ignore_eos=True) == []
    assert opens(min_tokens=0) == []


def test_first_tokens_that_are_known_need_no_mask(admission):
    params = GenerationParams(max_tokens=3, min_tokens=2, seed=1)
    for known, is_held in (([7], True), ([7, 7], False)):
        request = admission.make_request([1], params, arrival_time=0.0, continued=known)
        assert bool(request.open_tokens) == is_held


def test_a_model_all_of_whose_tokens_are_ends_has_no_first_tokens():
    limits = RequestLimits(max_model_len=20, block_size=4, num_blocks=5)
    tiny = Admission(SimpleTokenizer(), limits, vocab_size=3, eos_token_ids=(0,))
    params = GenerationParams(max_tokens=3, min_tokens=1, stop_token_ids=(1, 2))
    with pytest.raises(ValidationError, match="min_tokens must be 0 where every token is an end"):
        tiny.make_request([1], params, arrival_time=0.0)


def test_a_length_that_nobody_gave_has_room_for_the_least_that_somebody_did(admission):
    def length(least, default):
        params = GenerationParams(max_tokens=DefaultInt(default), min_tokens=least)
        return admission.make_request([1] * 5, params, arrival_time=0.0).max_tokens

    assert [length(9, 3), length(9, 12), length(15, 3)] == [9, 12, 15]
    with pytest.raises(ContextLengthError, match=r"min_tokens must be at most 15, .* got 16") as e:
        length(16, 3)
    assert e.value.field == "min_tokens"


def test_a_length_that_nobody_gave_is_what_the_pool_has_left_for_all_beams():
    limits = RequestLimits(max_model_len=99, block_size=4, num_blocks=8, shares_prompts=False)
    admission = Admission(SimpleTokenizer(), limits, vocab_size=259, eos_token_ids=())
    beams = GenerationParams(beam_width=2)
    for num_prompt_tokens, params, num_left in ((5, GenerationParams(), 28), (5, beams, 12)):
        request = admission.make_request([1] * num_prompt_tokens, params, arrival_time=0.0)
        assert request.max_tokens == num_left
        given = dataclasses.replace(params, max_tokens=num_left + 1)
        with pytest.raises(RequestNeverFitsError):
            admission.make_request([1] * num_prompt_tokens, given, arrival_time=0.0)
    with pytest.raises(RequestNeverFitsError) as caught:
        admission.make_request([1] * 17, beams, arrival_time=0.0)
    assert caught.value.field == "prompt"


def test_a_length_that_nobody_gave_is_what_the_roomiest_plane_has_left(admission):
    limits = RequestLimits(max_model_len=20, block_size=4, num_blocks=3)
    small = Admission(SimpleTokenizer(), limits, vocab_size=259, eos_token_ids=())
    assert small.make_request([1], GenerationParams(), arrival_time=0.0).max_tokens == 12
    small.add_alternative(admission)
    assert small.make_request([1], GenerationParams(), arrival_time=0.0).max_tokens == 19


def test_a_prompt_too_long_for_any_completion_is_what_is_at_fault(admission):
    params = GenerationParams(max_tokens=1)
    assert admission.make_request([1] * 19, params, arrival_time=0.0)
    with pytest.raises(ContextLengthError, match=r"has 20 tokens, max_model_len \(20\)") as caught:
        admission.make_request([1] * 20, params, arrival_time=0.0)
    assert caught.value.field == "prompt"


def test_a_request_may_fill_the_whole_pool_and_no_more():
    # The last token is never computed: 8 prompt tokens and 9 more need two blocks of 8.
    limits = RequestLimits(max_model_len=99, block_size=8, num_blocks=2)
    admission = Admission(SimpleTokenizer(), limits, vocab_size=259, eos_token_ids=())
    assert admission.make_request([1] * 8, GenerationParams(max_tokens=9), arrival_time=0.0)
    with pytest.raises(
        RequestNeverFitsError,
        match=r"at most 9 after .* got 10, .* needs 3 KV blocks of 8 .* pool has 2",
    ) as left:
        admission.make_request([1] * 8, GenerationParams(max_tokens=10), arrival_time=0.0)
    assert left.value.field == "max_tokens"
    with pytest.raises(
        RequestNeverFitsError, match=r"prompt of 17 .* needs 3 KV blocks of 8 .* pool has 2"
    ) as prompt:
        admission.make_request([1] * 17, GenerationParams(max_tokens=1), arrival_time=0.0)
    assert prompt.value.field == "prompt"


def test_a_prompt_of_one_token_is_spoken_of_in_the_singular():
    for limits in (RequestLimits(8, 4, 14), RequestLimits(99, 4, 1)):
        with pytest.raises(EngineError, match=r"after a prompt of 1 token[ ,]"):
            limits.check(1, 9)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize("num_prompt_tokens", [3, 8, 13])
def test_the_number_of_tokens_that_are_said_to_be_left_fits_and_one_more_does_not(
    num_prompt_tokens, shares_prompts, num_beams
):
    limits = RequestLimits(999, 4, 14, shares_prompts=shares_prompts)
    with pytest.raises(RequestNeverFitsError) as caught:
        limits.check(num_prompt_tokens, 900, num_beams)
    left = int(re.search(r"at most (\d+) after", caught.value.message)[1])
    limits.check(num_prompt_tokens, left, num_beams)
    with pytest.raises(RequestNeverFitsError):
        limits.check(num_prompt_tokens, left + 1, num_beams)


def test_any_kind_of_integer_becomes_a_plain_one(admission):
    request = admission.make_request(
        np.array([3, 4]), GenerationParams(max_tokens=3), arrival_time=0.0
    )
    assert request.input_tokens == [3, 4]
    assert {type(token) for token in request.input_tokens} == {int}


@pytest.mark.parametrize("bad", [None, 5, [1.5], ["a"], [[1]], [None], iter([1])])
def test_what_is_no_sequence_of_integers_is_refused(admission, bad):
    with pytest.raises(ValidationError, match="text or a sequence of token ids") as caught:
        admission.make_request(bad, GenerationParams(max_tokens=3), arrival_time=0.0)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("bad", [-1, 259, 2**40])
def test_token_ids_outside_of_the_vocabulary_are_refused(admission, bad):
    with pytest.raises(ValidationError, match=f"0 to 258, got {bad} at index 2"):
        admission.make_request([1, 2, bad], GenerationParams(max_tokens=3), arrival_time=0.0)


def test_a_text_too_long_to_be_a_prompt_is_refused_before_it_is_tokenized(admission):
    limit = 20 * 64
    assert len(admission.tokenize("x" * limit)) == limit
    for text in ("x" * (limit + 1), "你" * (limit // 3 + 1)):
        with pytest.raises(ContextLengthError, match=f"at most {limit} are taken"):
            admission.tokenize(text)


def test_an_empty_text_is_refused(admission):
    with pytest.raises(ValidationError, match="must not be empty"):
        admission.tokenize("")


class BeginningTokenizer(SimpleTokenizer):
    """Puts a token in front of every text, as Llama's do."""

    def encode(self, text):
        return [256, *super().encode(text)]


def test_no_prompt_is_empty_whatever_its_tokenizer_puts_in_front_but_a_text_may_be(admission):
    service = TextService(BeginningTokenizer(), admission, None, vocab_size=259)

    with pytest.raises(ValidationError, match="the prompt must not be empty"):
        asyncio.run(service.tokenize(""))
    assert asyncio.run(service.tokenize("", may_be_empty=True)) == [256]


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"priority": 2**31}, "priority", "priority must be in -2147483648 to 2147483647, got"),
        ({"priority": True}, "priority", "priority must be an integer, got True"),
        ({"priority": 0.5}, "priority", "priority must be an integer, got 0.5"),
        ({"cache_salt": "x" * 257}, "cache_salt", "at most 256 bytes, got 257"),
        ({"cache_salt": "你" * 86}, "cache_salt", "at most 256 bytes, got 258"),
        ({"cache_salt": "\ud800"}, "cache_salt", r"not valid Unicode \(at character 0\)"),
        ({"cache_salt": b"x"}, "cache_salt", "must be text, got b'x'"),
    ],
)
def test_priority_and_salt_have_their_ranges(admission, options, field, said):
    with pytest.raises(ValidationError, match=said) as caught:
        admission.make_request(
            [1],
            GenerationParams(max_tokens=3),
            arrival_time=0.0,
            options=RequestOptions(**options),
        )
    assert caught.value.field == field


def test_samples_and_beams_come_in_and_what_can_never_run_does_not():
    limits = RequestLimits(max_model_len=20, block_size=4, num_blocks=5, max_beams=3)
    admission = Admission(SimpleTokenizer(), limits, vocab_size=259, eos_token_ids=(257,))

    def make(**params):
        return admission.make_request([1, 2], GenerationParams(**params), arrival_time=0.0)

    assert make(max_tokens=5, n=128).params.n == 128
    assert make(max_tokens=2, beam_width=3, n=2).params.beam_width == 3
    with pytest.raises(ValidationError, match=r"at most max_num_seqs \(3\), .* got 4"):
        make(max_tokens=2, beam_width=4)
    with pytest.raises(RequestNeverFitsError, match=r"with 3 beams, got 5, which needs 6 KV"):
        make(max_tokens=5, beam_width=3)
    assert limits.num_blocks_for(2, 5, 3) == 6
    many_ends = Admission(
        SimpleTokenizer(), RequestLimits(99, 4, 99), vocab_size=259, eos_token_ids=range(18)
    )
    params = GenerationParams(max_tokens=2, beam_width=3)
    with pytest.raises(ValidationError, match=r"at most 2 with 18 end tokens.*, got 3"):
        many_ends.make_request([9], params, arrival_time=0.0)


def test_an_embedding_ends_with_its_prompt_which_may_be_as_long_as_the_model_takes(admission):
    request = admission.make_embedding_request([1] * 20, Pooling.LAST, arrival_time=1.0)
    assert (request.max_tokens, request.uses_cache) == (0, True)
    assert not admission.make_embedding_request([1], Pooling.MEAN, arrival_time=1.0).uses_cache
    with pytest.raises(ContextLengthError, match="at most 20"):
        admission.make_embedding_request([1] * 21, Pooling.LAST, arrival_time=1.0)


def test_an_embedding_needs_one_plane_that_gives_hidden_states(admission):
    limits = RequestLimits(max_model_len=20, block_size=4, num_blocks=5)
    tokenizer = SimpleTokenizer()
    without = Admission(
        tokenizer, limits, vocab_size=259, eos_token_ids=(257,), features=frozenset({"copies"})
    )
    assert not without.has_room(3, NOTHING_GENERATED, embeds=True)
    assert without.has_room(3, NOTHING_GENERATED)
    with pytest.raises(ValidationError, match="lacks embeddings"):
        without.make_embedding_request([1], Pooling.LAST, arrival_time=1.0)
    without.add_alternative(admission)
    assert without.make_embedding_request([1], Pooling.LAST, arrival_time=1.0).embedding
