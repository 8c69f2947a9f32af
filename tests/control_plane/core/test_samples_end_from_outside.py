"""Stop strings are found outside the scheduler, which is then told to end the sample."""

from __future__ import annotations

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason, Request, RequestState
from planes.errors import ValidationError

TOKEN = 5
DECODE, COMPLETED = RequestState.DECODE, RequestState.COMPLETED


def test_a_lone_sample_that_is_ended_completes_its_request_and_frees_its_blocks(engine):
    engine = engine()
    request = engine.ask(1, [TOKEN] * 6, max_tokens=20)
    for _ in range(5):
        engine.step()
    event = engine.scheduler.end_sample(1, 0, 3, now=9.0)
    assert (event.state, event.finish_reason, event.new_token_ids) == (
        COMPLETED,
        FinishReason.STOP,
        (),
    )
    assert request.output_tokens == request.samples[0].output_tokens == [TOKEN] * 3
    assert request.finish_reason is FinishReason.STOP
    assert request.history[-1] == (COMPLETED, 9.0)
    assert engine.used_blocks == 0
    assert engine.scheduler.end_sample(1, 0, 3) is None


def test_a_sample_in_flight_keeps_its_blocks_until_its_steps_have_come(engine):
    engine = engine(prefix_cache=True)
    engine.ask(1, [TOKEN] * 6, max_tokens=20)
    engine.step()
    engine.step()
    engine.send()
    engine.send()
    assert engine.scheduler.end_sample(1, 0, 1).state is COMPLETED
    assert engine.used_blocks > 0
    assert engine.commit() == []
    assert engine.commit() == []
    assert engine.used_blocks == 0
    assert not engine.scheduler.has_pending_work()


def test_the_other_samples_go_on(engine):
    engine = engine()
    request = engine.ask(1, [TOKEN] * 6, max_tokens=5, n=3)
    engine.step()
    engine.step()
    event = engine.scheduler.end_sample(1, 1, 1)
    assert (event.state, event.finish_reason, event.sample_index) == (DECODE, FinishReason.STOP, 1)
    engine.run()
    assert [len(sample.output_tokens) for sample in request.samples] == [5, 1, 5]
    assert request.finish_reason is FinishReason.LENGTH
    assert engine.used_blocks == 0


def test_a_waiting_sample_is_taken_out_of_the_queue(engine):
    engine = engine(max_num_seqs=1)
    request = engine.ask(1, [TOKEN] * 6, max_tokens=5, n=2)  # the second waits for the slot
    engine.step()
    assert engine.scheduler.get_stats().num_waiting == 1
    assert engine.scheduler.end_sample(1, 1, 0).state is DECODE
    assert engine.scheduler.get_stats().num_waiting == 0
    engine.run()
    assert [sample.finish_reason for sample in request.samples] == [
        FinishReason.LENGTH,
        FinishReason.STOP,
    ]


def test_what_ended_samples_left_is_filed_under_what_it_holds(engine):
    engine = engine(256, prefix_cache=True, roles_matter=False, max_batch_size=64)
    prompts = {i: [20 + i, 2, 3, 4, 5] for i in range(1, 41)}  # more than are filed in one step
    for i, prompt in prompts.items():
        engine.ask(i, prompt, max_tokens=20)
    for token in (6, 7, 8, 9):
        engine.step(dict.fromkeys(prompts, token))
    for i in prompts:
        engine.scheduler.end_sample(i, 0, 1)  # all but 6 is discarded; a block has 6, 7, 8 too
    same = [
        engine.ask(100 + i, [*prompt, 6, 7, 8, 9], max_tokens=2) for i, prompt in prompts.items()
    ]
    other = engine.ask(99, [*prompts[1], 6, 7, 9, 9], max_tokens=2)
    engine.run()
    assert {request.cached_tokens for request in same} == {8}
    assert other.cached_tokens == 4


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_token_ends_a_sample_like_the_models_own(engine, ignore_eos, include_stop):
    engine = engine()
    request = Request(
        1,
        [TOKEN] * 3,
        GenerationParams(
            max_tokens=9,
            seed=1,
            ignore_eos=ignore_eos,
            stop_token_ids=(8, 7),
            include_stop=include_stop,
        ),
        frozenset({0}),
    )
    engine.scheduler.add_request(request)
    engine.step()
    engine.send()
    (event,) = engine.commit({1: 7})
    kept = (7,) if include_stop else ()
    assert (event.new_token_ids, event.matched_stop) == (kept, 7)
    assert (event.state, event.finish_reason) == (COMPLETED, FinishReason.STOP)
    assert request.output_tokens == [TOKEN, *kept]


def test_the_models_own_end_token_is_no_matched_stop(engine):
    engine = engine()
    engine.submit(1, 3)
    engine.send()
    (event,) = engine.commit({1: 0})
    assert (event.finish_reason, event.matched_stop) == (FinishReason.STOP, None)


def test_the_prefix_cache_can_be_emptied_while_requests_run(engine):
    engine = engine(prefix_cache=True)
    engine.ask(1, list(range(1, 10)), max_tokens=1)
    engine.run()
    running = engine.ask(2, list(range(1, 10)), max_tokens=6)
    engine.step()
    assert running.cached_tokens == 8
    ended = engine.ask(3, list(range(21, 30)), max_tokens=1)
    while ended.finish_reason is None:
        engine.step()
    assert engine.scheduler.flush_prefix_cache() == 2  # those of 3; those of 2 are in use
    later = engine.ask(4, list(range(1, 10)), max_tokens=1)
    engine.run()
    assert later.cached_tokens == 0
    assert len(running.output_tokens) == 6


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"stop": tuple("abcdefghijklmnopq")}, "at most 16 texts, got 17"),
        ({"stop": ("",)}, "1 to 256 characters, got one of 0"),
        ({"stop": ("x" * 257,)}, "1 to 256 characters, got one of 257"),
        ({"stop": "text"}, "a list or tuple of texts, got 'text'"),
        ({"stop": [7]}, "tuple of texts"),
        ({"stop_token_ids": tuple(range(65))}, "at most 64 entries, got 65"),
        ({"stop_token_ids": (-1,)}, "tuple of token ids, got"),
        ({"stop_token_ids": {1}}, "a list or tuple of token ids, got"),
        ({"stop_token_ids": [True]}, "tuple of token ids, got"),
        ({"include_stop": 1}, "true or false, got 1"),
        ({"num_prompt_logprobs": 21}, "0 to 20, got 21"),
        ({"num_prompt_logprobs": True}, "0 to 20, got True"),
        ({"stop": ("a",), "beam_width": 2}, "unset with beam_width"),
        ({"stop_token_ids": (1,), "beam_width": 2}, "unset with beam_width"),
    ],
)
def test_what_ends_a_sample_is_checked(params, said):
    with pytest.raises(ValidationError, match=said) as caught:
        GenerationParams(**params).validate()
    assert caught.value.field == next(iter(params))


def test_a_list_is_as_good_as_a_tuple():
    listed = GenerationParams(stop=["a", "b"], stop_token_ids=[1])
    listed.validate()
    assert listed == GenerationParams(stop=("a", "b"), stop_token_ids=(1,))
    assert hash(listed) == hash(GenerationParams(stop=("a", "b"), stop_token_ids=(1,)))
