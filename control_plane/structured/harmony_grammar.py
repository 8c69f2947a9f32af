"""Answers in channels in Lark's notation, as `HarmonyReader` reads them.

    start      thoughts? (call | preamble? call | final)
    thoughts   <|channel|>analysis<|message|>…<|end|><|start|>assistant        any number of them
    preamble   <|channel|>commentary<|message|>…<|end|><|start|>assistant
    call       <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}
    final      <|channel|>final<|message|>…

An answer has one call: what ends a call ends the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from control_plane.core.tool_calls import ToolCalls
from control_plane.structured.lark import lark_text, without
from control_plane.structured.refusals import NameRefusedError
from control_plane.text.answers.harmony_reader import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    MESSAGE,
    RETURN,
    START,
)

_PLAIN_NAME = re.compile(r"[^\s<]+")
"""What a header names a function by."""
_ENDS = without("|".join(map(re.escape, (START, END, RETURN, CALL))))
"""Added to a text where marks are no tokens: none is to be spelled in it, as it would be one."""


def harmony_rules(calls: ToolCalls) -> list[str]:
    """Return the rules of an answer; schemas go by `call_grammars`' names. Raises ValueError."""
    tokens = dict(calls.tokens)

    def mark(name: str) -> str:
        return lark_text(name) if name not in tokens else f"<[{tokens[name]}]>"

    def text_until_end(name: str) -> Iterator[str]:
        """Yield the rule of a text, up to what ends a message."""
        if END in tokens:
            yield f"{name}: TEXT? {mark(END)}"
        else:
            yield f'{name}[suffix="{END}"]: /(?s:.*)/'

    follows = f'{mark(START)} "assistant"'
    rules = ["TEXT: /(?s:.+)/" + ("" if END in tokens else _ENDS)]
    answer = "call"
    if calls.may_say:
        answer = "(preamble? call | final)"
        rules += [
            f'preamble: {mark(CHANNEL)} "commentary" {mark(MESSAGE)} preface {follows}',
            *text_until_end("preface"),
            f'final: {mark(CHANNEL)} "final" {mark(MESSAGE)} TEXT?',
        ]
    if calls.thought != "none":
        answer = f"thought* {answer}"
        rules += [
            f'thought: {mark(CHANNEL)} "analysis" {mark(MESSAGE)} reasoning {follows}',
            *text_until_end("reasoning"),
        ]
    if not calls.is_start:  # a message is gone on with
        answer = f"rest {follows} {answer}" + (" | TEXT?" if calls.may_say else "")
        rules += text_until_end("rest")
    call = _call(calls, mark(CHANNEL), mark(CONSTRAIN), mark(MESSAGE))
    return [f"start: {answer}", *rules, call]


def check_harmony_name(name: str) -> None:
    """Raise NameRefusedError for a function that no header can name."""
    if not _PLAIN_NAME.fullmatch(name):
        raise NameRefusedError("in this format names have no space and no <")


def _call(calls: ToolCalls, channel: str, constrain: str, message: str) -> str:
    """Return the rule of a call."""
    bodies = [
        f'{lark_text(tool.name)} " " {constrain} "json" {message} @tool_{index}'
        for index, tool in enumerate(calls.tools)
    ]
    begin = lark_text(f"commentary to={FUNCTIONS}")
    return f"call: {channel} {begin} ({' | '.join(bodies)})"
