"""What schemathesis is told of this server; loaded by it, in its own process.

The schema cannot say how fields go together. Whatever it allows is answered, or refused by one of
the rules below.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import threading
import zlib

import schemathesis
from schemathesis.core.failures import AcceptedNegativeData

LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
LONG_ENOUGH = 1
CONTEXT = 2048
MANY = 4
MOST_SAMPLES = 128

ANTHROPIC = "/v1/messages"
"""Under it, refusals and streams have Anthropic's shape."""

STREAMED = 3
"""One of so many bodies that say nothing of it is answered as a stream."""

RULES = [
    r"only allowed with",
    r"has no (include_usage|continuous_usage_stats)",
    r"must (be )?equal",
    r"at most \d+ choices, prompts times n",
    r"at most \d+ log-probabilities",
    r"min_tokens must be at most",
    r"must be at least 1 without echo",
    r"prompt must have at least 1 token",  # a text may have none
    r"one of prompt and messages must be given",
    r"add_special_tokens must be false with messages",
    r"continue_final_message must be false unless",
    r"chat template does not read",
    r"nothing is stored here",  # an item that is its id alone
    r"content is required without tool_calls",
    r"arguments.*must be",
    r"must be 0 to \d+, got \d+",  # token ids: the vocabulary has fewer than the schema
    r"keys must be token ids",
    r"must have a name of its own",
    r"has no place for tool",
    r"structured_outputs must have one of",
    r"none of them empty",
    r"not allowed with (response_format|text\.format|output_config\.format)",
    r"is not supported",  # of a schema, a pattern or a grammar
    r"(tool_choice|strict) must be|tool_choice names|must be unset with a tool_choice",
    r"at most \d+ (calls in one turn|tool_use blocks)",
    r"the last message must be the user's",
    r"name is required with the type tool",
    r"max_model_len is",
    r"bytes",  # a limit of bytes where the schema counts characters
    r"got -?\d+\.0\.$",  # a number with a point is an integer for JSON schema, and not here
    r"'seed'.*got (184467440737095|-92233720368547)\d+",  # schemathesis rounds its bounds
]


def make_short(body: dict, path: str) -> None:
    """Make an answer short; what is refused for its size stays as it is."""
    limit = LIMITS.get(path)
    if limit is None:
        return
    for name in (limit, "max_tokens"):
        given = body.get(name)
        if type(given) is int and LONG_ENOUGH < given < CONTEXT:
            body[name] = LONG_ENOUGH
    if body.get(limit) is None and body.get("max_tokens") is None:
        body[limit] = LONG_ENOUGH
    if body.get("stream") is None and zlib.crc32(json.dumps(body).encode()) % STREAMED == 0:
        body["stream"] = True
    n = body.get("n")
    if type(n) is int and MANY < n < MOST_SAMPLES:
        body["n"] = MANY
        if body.get("best_of") == n:
            body["best_of"] = MANY


PARSING = threading.Lock()
ATTEMPTS = 8
parse = ast.parse


def parse_alone(*args, **options):
    """Python 3.11 mixes up how deep two threads are that parse at once; hypothesis does.

    The lock does not reach who compiles without `ast`: what they spoil is parsed again.
    """
    with PARSING:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(SystemError):
                return parse(*args, **options)
        return parse(*args, **options)


ast.parse = parse_alone


@schemathesis.hook
def before_call(context, case, kwargs):  # noqa: ARG001 - schemathesis names them
    if isinstance(case.body, dict):
        make_short(case.body, case.operation.path)


@schemathesis.check
def what_the_schema_allows_is_refused_by_a_rule_only(ctx, response, case):  # noqa: ARG001
    if case.meta is None or case.meta.generation.mode.value != "positive":
        return
    if response.status_code < 400 or response.status_code == 404:
        return
    assert response.status_code == 400, response.status_code
    message = json.loads(response.content)["error"]["message"]
    assert any(re.search(rule, message) for rule in RULES), message


@schemathesis.check
def refusals_are_errors_in_the_shape_of_their_api(ctx, response, case):  # noqa: ARG001
    if response.status_code < 400 or case.operation.path == "/readyz":
        return
    if case.method == "HEAD":
        return
    error = json.loads(response.content)["error"]
    is_anthropic = case.operation.path.startswith(ANTHROPIC)
    rest = {"details"} if is_anthropic else {"param", "code"}
    assert set(error) == {"message", "type"} | rest
    assert error["message"]
    assert "Traceback" not in error["message"]


@schemathesis.check
def streams_have_their_end(ctx, response, case):  # noqa: ARG001
    kind = response.headers.get("content-type", [""])[0]
    if not kind.startswith("text/event-stream"):
        return
    text = response.content.decode()
    assert text.endswith("\n\n")
    *_, last = text.split("\n\n")[:-1]
    if case.operation.path == "/v1/responses":
        assert last.startswith(("event: response.completed\n", "event: response.incomplete\n"))
    elif case.operation.path == ANTHROPIC:
        assert last.startswith("event: message_stop\n")
    else:
        assert (last, text.count("[DONE]")) == ("data: [DONE]", 1)


@schemathesis.hook
def filter_failure(context, failure, case, response):  # noqa: ARG001
    """Let 413 be a refusal, too: a list far over its bound is too large to be looked at."""
    return not (isinstance(failure, AcceptedNegativeData) and response.status_code == 413)
