"""How many tokens a request took, in the two spellings of OpenAI's API and in Anthropic's."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel


class TokenCounts(NamedTuple):
    """Tokens of all prompts (each once, however many samples) and of all answers."""

    prompt: int
    completion: int
    cached: int


class PromptTokensDetails(BaseModel):
    """`cached_tokens`: of the prompt, found computed."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """`reasoning_tokens`: of the answers, those any text of which is reasoning."""

    reasoning_tokens: int


class CompletionUsage(BaseModel):
    """Token counts of a completion or chat completion; the last of a chat completion only."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


def completion_usage(counts: TokenCounts, num_reasoning_tokens: int | None) -> dict[str, object]:
    """Spell the counts for completions and chat completions.

    `num_reasoning_tokens`: None where reasoning is not told apart.
    """
    usage: dict[str, object] = {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }
    if num_reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return usage


class InputTokensDetails(BaseModel):
    """`cached_tokens`: of the input, found computed; nothing is written to a cache for a fee."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """`reasoning_tokens`: of the output, those any text of which is reasoning."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


def response_usage(counts: TokenCounts, num_reasoning_tokens: int) -> dict[str, object]:
    """Spell the counts for responses."""
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": counts.prompt + counts.completion,
    }


class MessageTokensDetails(BaseModel):
    """`thinking_tokens`: of the output, those any text of which is reasoning."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """Token counts of a message. `input_tokens`: of the prompt, but for those found computed."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails


def message_usage(counts: TokenCounts, num_reasoning_tokens: int) -> dict[str, object]:
    """Spell the counts for messages: the three of the input are together its tokens.

    Nothing is written to a cache for a fee, so none are `cache_creation_input_tokens`.
    """
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.completion,
        "output_tokens_details": {"thinking_tokens": num_reasoning_tokens},
    }
