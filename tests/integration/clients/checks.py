"""What an answer must be: what its case says, what holds for all, what another client was told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.integration.clients.case_table import Case, Client

TOLERANCE = 1e-4
"""Of log-probabilities: they are float32 on one surface, and decimal text on the other."""

TextOf = Callable[[str], str]
"""The first text of the answer to another case."""

Answer = dict[str, Any]


def problems_of(
    answer: Answer, request: Answer, case: Case, client: Client, text_of: TextOf
) -> list[str]:
    """Return what is wrong with an answer, in words."""
    if "error" in case.see:
        return _error_problems(answer, case.see["error"], client.surface)
    if "error" in answer:
        return [f"refused: {answer['error']}"]
    if "choices" not in answer:
        return _plain_problems(answer, request, case, text_of)
    return [*_general_problems(answer, case), *_seen_problems(answer, case, client, text_of)]


def differences(answer: Answer, other: Answer) -> list[str]:
    """Return in what two answers to one request differ, as far as both tell."""
    if "choices" not in answer or "choices" not in other:
        return _of_field("answer", answer, other) if "error" not in answer else []
    found = []
    if answer["usage"] is not None and other["usage"] is not None:
        found += _of_field("usage", answer["usage"], other["usage"])
    for index, (one, two) in enumerate(zip(answer["choices"], other["choices"], strict=True)):
        for name in sorted(one.keys() & two.keys() - {"pieces"}):
            same = _is_close if name.endswith("logprobs") else _is_equal
            if not same(one[name], two[name]):
                found.append(f"{name} of choice {index}: {one[name]!r}, not {two[name]!r}")
    return found


def _error_problems(answer: Answer, expected: Answer, surface: str) -> list[str]:
    if "error" not in answer:
        return [f"not refused: {answer}"]
    expected = expected.get(surface, expected)
    told = answer["error"]
    return [
        f"{name} of the error: {told.get(name)!r}, not {value!r}"
        for name, value in expected.items()
        if told.get(name) != value
    ]


def _plain_problems(answer: Answer, request: Answer, case: Case, text_of: TextOf) -> list[str]:
    """Check what generates nothing."""
    found = []
    for name, value in case.see.items():
        if name == "text":
            found += _text_problems(answer["text"], value, text_of)
        elif name == "num_token_ids":
            found += _of_field(name, len(answer["token_ids"]), value)
        elif name == "models":
            found += _of_field(name, answer["models"], [request["model"]])
        elif name != "request_is":
            found += _of_field(name, answer[name], value)
    return found


def _general_problems(answer: Answer, case: Case) -> list[str]:
    """Check what holds for every generated answer."""
    choices, max_tokens = answer["choices"], case.ask["max_tokens"]
    found = _of_field("number of choices", len(choices), case.see.get("choices", 1))
    for index, choice in enumerate(choices):
        if choice["finish_reason"] not in ("stop", "length"):
            found.append(f"finish reason of choice {index}: {choice['finish_reason']!r}")
        pieces = choice.get("pieces", [choice["text"]])
        found += _of_field("text of all pieces", "".join(pieces), choice["text"])
        if any("\ufffd" in piece for piece in pieces):
            found.append(f"a piece of choice {index} has half a character: {pieces}")
        for name in ("logprobs", "prompt_logprobs"):
            if any(value is not None and value > 0 for value in choice.get(name, ())):
                found.append(f"{name} of choice {index} are not all negative: {choice[name]}")
    if answer["usage"] is not None and all(one["finish_reason"] == "length" for one in choices):
        spent, at_most = answer["usage"]["completion_tokens"], max_tokens * len(choices)
        found += _of_field("completion tokens of what ended by length", spent, at_most)
    return found


def _seen_problems(answer: Answer, case: Case, client: Client, text_of: TextOf) -> list[str]:
    """Check what the case says."""
    see, choices = case.see, answer["choices"]
    texts = [choice["text"] for choice in choices]
    found = []
    for text, condition in zip(texts, see.get("texts", [see.get("text", {})]), strict=False):
        found += _text_problems(text, condition, text_of)
    if see.get("texts_differ") and len(set(texts)) < len(texts):
        found.append(f"texts are the same: {texts}")
    if "finish_reason" in see:
        reasons = [choice["finish_reason"] for choice in choices]
        found += _of_field("finish reasons", reasons, [see["finish_reason"]] * len(choices))
    if "matched_stop" not in client.does_not_tell:
        stops = [choice["matched_stop"] for choice in choices]
        found += _of_field("matched stops", stops, [see.get("matched_stop")] * len(choices))
    usage = see.get("usage", {})
    if usage is None:
        found += _of_field("usage", answer["usage"], None)
    else:
        for name, value in usage.items():
            found += _of_field(name, answer["usage"][name], value)
    pieces = choices[0].get("pieces")
    if pieces is not None and len(pieces) < see.get("pieces_at_least", 0):
        found.append(f"only {len(pieces)} pieces: {pieces}")
    if pieces is not None and "events" in see:
        found += _of_field("events", choices[0]["events"], see["events"])
    return [*found, *_logprob_problems(choices[0], case)]


def _logprob_problems(choice: Answer, case: Case) -> list[str]:
    see, ask = case.see, case.ask
    found = []
    for name in ("logprobs", "prompt_logprobs"):
        found += _of_field(f"number of {name}", len(choice.get(name, ())), see.get(name, 0))
    top = choice.get("top_logprobs", [])
    num_top = ask.get("logprobs", ask.get("prompt_logprobs", 0))
    # A completion has the drawn token among the best even where it is none of them.
    drawn = choice.get("logprobs", [])
    for value, best in zip(drawn, top, strict=True):
        if value is not None and len(best) - num_top not in (0, 1):
            found.append(f"{num_top} best log-probabilities were asked for, got {best}")
        if see.get("drawn_is_best") and abs(value - best[0]) > TOLERANCE:
            found.append(f"the drawn token has {value}, the best {best[0]}")
    if see.get("prompt_logprobs") and choice["prompt_logprobs"][0] is not None:
        found.append(f"the prompt's first token has {choice['prompt_logprobs'][0]}")
    return found


def _text_problems(text: str, condition: str | Answer, text_of: TextOf) -> list[str]:
    if isinstance(condition, str):
        return _of_field("text", text, condition)
    found = []
    for name, value in condition.items():
        if not _holds(name, value, text, text_of):
            met = f", {text_of(value)!r}" if name in ("same_as", "differs_from") else ""
            found.append(f"text {text!r} is not: {name} {value!r}{met}")
    return found


def _holds(name: str, value: Any, text: str, text_of: TextOf) -> bool:
    match name:
        case "same_as":
            return text == text_of(value)
        case "differs_from":
            return text != text_of(value)
        case "starts_with":
            return text.startswith(value)
        case "lacks":
            return value not in text
        case "joined":
            return text == "".join(_part(part, text_of) for part in value)
        case _:
            raise ValueError(f"the table has a condition that there is not: {name}")


def _part(part: str | Answer, text_of: TextOf) -> str:
    return part if isinstance(part, str) else text_of(part["text_of"])


def _of_field(name: str, found: object, expected: object) -> list[str]:
    return [] if found == expected else [f"{name}: {found!r}, not {expected!r}"]


def _is_equal(one: object, two: object) -> bool:
    return one == two


def _is_close(one: Any, two: Any) -> bool:
    """Compare log-probabilities, and lists of them as far as the shorter one goes."""
    if one is None or two is None:
        return one is two
    if isinstance(one, list):
        if one and isinstance(one[0], list):
            return len(one) == len(two) and all(
                all(_is_close(a, b) for a, b in zip(x, y, strict=False))
                for x, y in zip(one, two, strict=True)
            )
        return len(one) == len(two) and all(map(_is_close, one, two))
    return bool(abs(one - two) <= TOLERANCE)
