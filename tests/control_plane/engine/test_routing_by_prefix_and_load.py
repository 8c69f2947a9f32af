from __future__ import annotations

import pytest

from control_plane.engine.routing import (
    CHUNK_TOKENS,
    MOST_AHEAD,
    TOKENS_PER_REQUEST,
    Candidate,
    PrefixTrace,
    choose,
    chunk_hashes,
)

PROMPT = list(range(4 * CHUNK_TOKENS + 1))


def test_the_longest_cached_prefix_wins_among_equally_loaded_planes():
    assert choose([Candidate(32, 3), Candidate(96, 3), Candidate(64, 3)]) == 1


def test_load_outweighs_a_short_prefix_and_not_a_long_one():
    assert choose([Candidate(TOKENS_PER_REQUEST - 1, 1), Candidate(0, 0)]) == 1
    assert choose([Candidate(TOKENS_PER_REQUEST + 1, 1), Candidate(0, 0)]) == 0


def test_of_equals_the_least_loaded_is_chosen_and_then_the_first():
    assert choose([Candidate(TOKENS_PER_REQUEST, 1), Candidate(0, 0)]) == 1
    assert choose([Candidate(0, 2), Candidate(0, 2)]) == 0


def test_a_prefix_decides_only_between_planes_that_are_about_as_busy():
    far_behind = Candidate(8192, MOST_AHEAD + 1)
    assert choose([far_behind, Candidate(0, 0)]) == 1
    assert choose([Candidate(8192, MOST_AHEAD), Candidate(0, 0)]) == 0
    assert choose([Candidate(8192, 60), Candidate(0, 50)]) == 0
    assert choose([Candidate(8192, 90), Candidate(0, 50)]) == 1


@pytest.mark.parametrize("num_planes", [2, 3])
def test_requests_with_one_long_prefix_reach_every_plane(num_planes):
    """A plane has the prefix from the first request on that it got."""
    loads, has_prefix = [0] * num_planes, [False] * num_planes
    for _ in range(300):
        planes = zip(has_prefix, loads, strict=True)
        chosen = choose([Candidate(8192 * has, load) for has, load in planes])
        loads[chosen] += 1
        has_prefix[chosen] = True
    assert all(has_prefix)
    assert max(loads) - min(loads) <= 1


def test_requests_without_a_common_prefix_are_spread_evenly():
    loads = [0, 0, 0]
    for _ in range(24):
        loads[choose([Candidate(0, load) for load in loads])] += 1
    assert loads == [8, 8, 8]


def test_a_trace_finds_as_many_chunks_as_two_prompts_have_in_common():
    trace = PrefixTrace(100)
    trace.note(chunk_hashes(PROMPT, ""))
    other = [*PROMPT[: 2 * CHUNK_TOKENS + 5], *[9] * 100]
    assert trace.num_cached_tokens(chunk_hashes(PROMPT, "")) == 4 * CHUNK_TOKENS
    assert trace.num_cached_tokens(chunk_hashes(other, "")) == 2 * CHUNK_TOKENS
    assert trace.num_cached_tokens(chunk_hashes(PROMPT[1:], "")) == 0
    assert trace.num_cached_tokens(chunk_hashes(PROMPT, "another tenant")) == 0
    trace.clear()
    assert trace.num_cached_tokens(chunk_hashes(PROMPT, "")) == 0


def test_the_last_token_of_a_prompt_is_never_taken_for_cached():
    assert len(chunk_hashes(PROMPT[:CHUNK_TOKENS], "")) == 0
    assert len(chunk_hashes(PROMPT[: CHUNK_TOKENS + 1], "")) == 1


def test_a_full_trace_forgets_the_end_of_the_oldest_prompt_first():
    trace = PrefixTrace(6)
    old, new = chunk_hashes(PROMPT, ""), chunk_hashes(PROMPT[::-1], "")
    trace.note(old)
    trace.note(new)
    assert len(trace) == 6
    assert trace.num_cached_tokens(old) == 2 * CHUNK_TOKENS
    assert trace.num_cached_tokens(new) == 4 * CHUNK_TOKENS
