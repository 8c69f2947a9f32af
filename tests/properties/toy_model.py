"""A model whose next token is a hash of those before it, and what it answers when alone."""

from __future__ import annotations

from control_plane.core.batch import TokenLogprobs
from control_plane.core.beam import BeamSearch, Hypothesis
from control_plane.core.request import FinishReason, Request
from tests.properties.toy_constraint import Rule, chosen, is_broken, is_complete

VOCABULARY = 11
EOS = frozenset({0})


def next_token(tokens: list[int], num_prompt: int, seed: int | None, sample_index: int) -> int:
    """A hash of all tokens; of every third request a word for each token, so it repeats itself."""
    if seed is not None and seed % 3 == 2:
        return hash((seed, sample_index, tokens[-1])) % VOCABULARY
    return hash((seed, sample_index, num_prompt, *tokens)) % VOCABULARY


def next_logprobs(tokens: list[int], seed: int | None, count: int) -> TokenLogprobs:
    """The likeliest next tokens; no two equally likely."""
    all_of_them = sorted(
        (-(hash((seed, token, *tokens)) % 89 + token / 16) / 8, token)
        for token in range(VOCABULARY)
    )[::-1]
    best = all_of_them[:count]
    return TokenLogprobs(best[0][0], tuple(t for _, t in best), tuple(p for p, _ in best))


def search_alone(request: Request) -> list[Hypothesis]:
    """What a beam search must find."""
    params = request.params
    search = BeamSearch(
        params.beam_width or 1,
        params.max_tokens,
        frozenset() if params.ignore_eos else request.eos_token_ids,
        params.length_penalty,
        params.early_stopping,
    )
    while search.beams:
        search.step(
            [
                next_logprobs(
                    [*request.input_tokens, *beam.tokens], params.seed, search.num_candidates
                )
                for beam in search.beams
            ]
        )
    return search.finished


def run_alone(
    request: Request, sample_index: int = 0, given: tuple[int, ...] = ()
) -> tuple[list[int], FinishReason]:
    """What a sample must produce after the output `given`, whoever else is there."""
    num_prompt, seed = request.num_prompt_tokens, request.params.seed
    tokens = [*request.input_tokens, *given]
    rule = Rule.of(request)
    while len(tokens) < request.max_total_len:
        token = next_token(tokens, num_prompt, seed, sample_index)
        token = chosen(token, rule.allowed(tokens[num_prompt:]))
        if token in request.end_token_ids:
            return tokens[num_prompt:], FinishReason.STOP
        tokens.append(token)
        if request.constraints and is_broken(seed, tokens[num_prompt:]):
            return tokens[num_prompt:-1], FinishReason.ERROR
        if request.constraints and is_complete(seed, tokens[num_prompt:]):
            return tokens[num_prompt:], FinishReason.STOP
    return tokens[num_prompt:], FinishReason.LENGTH
