"""Prompts echoed with log-probabilities over HTTP, as evaluation harnesses ask for them.

Against what transformers says in float32 (`tests/golden/record.py`). lm-evaluation-harness takes
from `token_logprobs[n:-1]` what it wants to know of a prompt whose first n tokens are given, so one
entry more than the prompt has is not a detail.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.golden.prompts import DATA

pytestmark = pytest.mark.model

RUNS: list[dict[str, Any]] = json.loads((DATA / "likeliest.json").read_text("utf-8"))["runs"]
TOLERANCE = 1e-3
END_OF_TURN = 2
MOST_TOPS = 5
MAX_PROMPTS = 256
"""Of one request."""

ids_of_runs = pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])


@pytest.fixture(scope="module")
def client(exact_deployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{exact_deployment.http}", timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def model(client) -> str:
    return client.get("/v1/models").json()["data"][0]["id"]


@pytest.fixture(scope="module")
def names(client, model) -> dict[int, str]:
    """How the server spells every token that is asked for: of the likeliest ones five at most."""
    seen = {t for run in RUNS for row in run["top_token_ids"] for t in row[:MOST_TOPS]}
    ids = sorted(seen.union(*(run["prompt_token_ids"] for run in RUNS)))
    found = {}
    for first in range(0, len(ids), MAX_PROMPTS):
        some = ids[first : first + MAX_PROMPTS]
        choices = ask(client, model, [[token_id] for token_id in some], logprobs=0, max_tokens=0)
        for token_id, choice in zip(some, choices, strict=True):
            (found[token_id],) = choice["logprobs"]["tokens"]
    return found


def ask(client, model, prompt, **fields) -> list[dict[str, Any]]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "seed": 1234, "echo": True}
    response = client.post("/v1/completions", json=body | fields)
    assert response.status_code == 200, response.text
    return sorted(response.json()["choices"], key=lambda choice: choice["index"])


def check(logprobs: dict[str, list[Any]], run: dict[str, Any], num_tops: int, names) -> None:
    """Compare the echoed part with the recording."""
    prompt = run["prompt_token_ids"]
    assert logprobs["tokens"][: len(prompt)] == [names[token_id] for token_id in prompt]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    for index, token_id in enumerate(prompt[1:], 1):
        ours, tops = logprobs["token_logprobs"][index], logprobs["top_logprobs"][index]
        assert ours == pytest.approx(run["logprobs"][index - 1], abs=TOLERANCE)
        recorded_ids = run["top_token_ids"][index - 1][:MOST_TOPS]
        recorded = run["top_logprobs"][index - 1][:MOST_TOPS]
        known = dict(zip(map(names.get, recorded_ids), recorded, strict=True))
        assert tops[names[token_id]] == ours
        others = {name: value for name, value in tops.items() if name != names[token_id]}
        assert len(tops) in (num_tops, num_tops + (token_id not in recorded_ids[:num_tops]))
        assert others == pytest.approx({name: known[name] for name in others}, abs=TOLERANCE)
        likeliest = sorted(tops.values(), reverse=True)[:num_tops]
        assert likeliest == pytest.approx(recorded[:num_tops], abs=TOLERANCE)
        # What a harness calls greedy.
        assert (ours == max(tops.values())) == (token_id == recorded_ids[0])


@pytest.mark.spread(4)
@pytest.mark.parametrize("max_tokens", [0, 1])
@ids_of_runs
def test_an_echoed_text_has_transformers_log_probabilities(client, model, names, run, max_tokens):
    prompt, num_tokens = run["prompt"], len(run["prompt_token_ids"])
    # From one to five: each number is asked of some text, with a token behind it and without.
    num_tops = 1 + (RUNS.index(run) + max_tokens) % MOST_TOPS
    (choice,) = ask(client, model, prompt, logprobs=num_tops, max_tokens=max_tokens)
    logprobs, text = choice["logprobs"], choice["text"]
    check(logprobs, run, num_tops, names)
    assert {len(column) for column in logprobs.values()} == {num_tokens + max_tokens}
    assert text.startswith(prompt)
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    for name, offset in zip(logprobs["tokens"][:num_tokens], offsets, strict=False):
        assert name.startswith("bytes:") or text.startswith(name, offset)


@pytest.mark.spread(2)
@ids_of_runs
def test_token_ids_have_the_same_log_probabilities_as_their_text(client, model, run):
    fields = {"logprobs": 5, "max_tokens": 1}
    (of_text,) = ask(client, model, run["prompt"], **fields)
    (of_ids,) = ask(client, model, run["prompt_token_ids"], **fields)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert of_ids["logprobs"][name] == of_text["logprobs"][name]
    without_special = client.post("/detokenize", json={"tokens": run["prompt_token_ids"]})
    assert of_ids["text"].startswith(without_special.json()["prompt"])


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_ends_the_text_is_one_more_entry(client, model, names, stream):
    run = RUNS[0]
    assert run["top_token_ids"][-1][0] == END_OF_TURN
    prompt, body = run["prompt_token_ids"], {"logprobs": 1, "max_tokens": 5}
    if stream:
        choice = joined(client, model, prompt, **body)
    else:
        (choice,) = ask(client, model, prompt, **body)
    check(choice["logprobs"], run, 1, names)
    assert choice["finish_reason"] == "stop"
    last = {name: column[-1] for name, column in choice["logprobs"].items()}
    expected = pytest.approx(run["top_logprobs"][-1][0], abs=TOLERANCE)
    assert last == {
        "tokens": "<|im_end|>",
        "token_logprobs": expected,
        "top_logprobs": {"<|im_end|>": expected},
        "text_offset": len(choice["text"]),
    }
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1


def joined(client, model, prompt, **fields) -> dict[str, Any]:
    """The one choice of a stream, put together."""
    body = {"model": model, "prompt": prompt, "temperature": 0, "echo": True, "stream": True}
    text, columns, reason = "", {}, None
    for block in client.post("/v1/completions", json=body | fields).text.split("\n\n"):
        data = block.removeprefix("data: ")
        if data and data != "[DONE]":
            (piece,) = json.loads(data)["choices"]
            text, reason = text + piece["text"], piece["finish_reason"]
            for name, column in (piece["logprobs"] or {}).items():
                columns.setdefault(name, []).extend(column)
    return {"text": text, "finish_reason": reason, "logprobs": columns}


def test_a_batch_of_prompts_is_answered_as_each_of_them_alone(client, model, names):
    """As `lm_eval --model local-completions --batch_size 8` asks."""
    prompts = [run["prompt_token_ids"] for run in RUNS]
    for choice, run in zip(
        ask(client, model, prompts, logprobs=1, max_tokens=1), RUNS, strict=True
    ):
        check(choice["logprobs"], run, 1, names)
        assert len(choice["logprobs"]["tokens"]) == len(run["prompt_token_ids"]) + 1
