"""The rules of an answer with text and calls in Lark's notation: where calls may begin.

Each format has rules of its own for what stands behind the marks.
"""

from __future__ import annotations

import re

from control_plane.core.tool_calls import ToolCalls
from control_plane.structured.lark import lark_text, without
from control_plane.text.bounds import MAX_TOOL_CALLS


def mark_of(calls: ToolCalls, name: str) -> str:
    """Return a mark: one token where it is one that has no text."""
    token = dict(calls.tokens).get(name)
    return lark_text(name) if token is None else f"<[{token}]>"


def unspelled(mark: str) -> str:
    """Return what to add to a text in which a mark must not be spelled, letter by letter.

    Readers cannot tell it from the token, so that it would be one.
    """
    return without(re.escape(mark))


def further(calls: ToolCalls, call: str) -> str:
    """Return what follows a call: further ones.

    Of an answer that must be calls no more than a message may have; what is behind those in others
    would be text, and keep to nothing.
    """
    if calls.is_single:
        return ""
    return f"({call})*" if calls.may_say else f"({call}){{0,{MAX_TOOL_CALLS - 1}}}"


def behind_marks(
    calls: ToolCalls, mark: str, *, between: str = "", before: str = "", bare: str | None = None
) -> list[str]:
    """Return the rules of an answer with a mark before each call; `call` is what follows it.

    `between`: what stands between two calls, and `before` in front of the first where there must be
    some. `bare`: a mark with which calls may begin in text.
    """
    if calls.may_say:
        return text_and_calls(calls, mark, bare=bare)
    begin = mark_of(calls, mark)
    more = further(calls, f"{between} {begin} call")
    return [f"calls: {before} {begin} call {more}"]


def behind_one_mark(calls: ToolCalls, mark: str, *, before: str = "") -> list[str]:
    """Return the rules of an answer with all calls behind one mark; `call` is what follows it.

    `before`: what stands in front of the mark where there must be calls.
    """
    if calls.may_say:
        return text_and_calls(calls, mark)
    return [f"calls: {before} {mark_of(calls, mark)} call"]


def text_and_calls(
    calls: ToolCalls,
    mark: str,
    *,
    begins_with_call: bool = False,
    goes_on: str | None = None,
    bare: str | None = None,
) -> list[str]:
    """Return the rules of text with calls in it, each behind a mark, with which none is text.

    `begins_with_call`: what the answer begins with may be a call without a mark, and is one if it
    looks like it. `goes_on`: what begins a further call behind a call, a regular expression.
    `bare`: another mark, which is text; what follows it is `bare_call`.
    """
    token = dict(calls.tokens).get(mark)
    taken = [r"\{"] if begins_with_call else []
    if calls.thought == "may begin":
        taken.append(re.escape(calls.thought_marks.opening))
    at_start = "".join(map(_not_first, taken))
    behind = "" if goes_on is None else _not_first(goes_on)
    unmarked = "" if token is None else unspelled(mark)
    if token is None:
        spelled = f"/(?s:.*){re.escape(mark)}/"
        begins = [
            *("first[lazy]: FIRST", f"FIRST: {spelled}{at_start}"),
            *("next[lazy]: NEXT", f"NEXT: {spelled}{behind}"),
        ]
    else:
        begins = [f"first: TEXT? <[{token}]>", f"next: MORE? <[{token}]>"]
    first, later = "first call", "next call"
    if bare is not None:
        spelled = f"/(?s:.*){re.escape(bare)}/{unspelled(mark)}"
        begins += [
            *("first_bare[lazy]: FIRST_BARE", f"FIRST_BARE: {spelled}{at_start}"),
            *("next_bare[lazy]: NEXT_BARE", f"NEXT_BARE: {spelled}{behind}"),
        ]
        first = f"({first} | first_bare bare_call)"
        later = f"{later} | next_bare bare_call"
    more = "" if calls.is_single else f"{further(calls, later)} MORE?"
    alone = " | call" if begins_with_call else ""
    return [
        f"calls: TEXT? | {first} {more}{alone}",
        f"TEXT: /(?s:.+)/{at_start}{unmarked}",
        f"MORE: /(?s:.+)/{behind}{unmarked}",
        *begins,
    ]


def _not_first(pattern: str) -> str:
    """Return what to add to a text that must not begin so, behind space."""
    return rf" & ~/[ \t\r\n]*{pattern}(?s:.*)/"
