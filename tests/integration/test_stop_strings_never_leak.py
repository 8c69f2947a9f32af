"""Every piece of a known text as the stop string that ends it, wherever it cuts tokens in two.

What a client may see is known: the text before the first occurrence, nothing of it and nothing
behind it, and the name of what was found. First all pieces of what the model answers to the golden
prompts, on the part of the server that finds them; then drawn ones, several at once, through both
planes, over gRPC and HTTP, whole and streamed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from compute_plane.model.loader import load_model
from compute_plane.model.source import DEFAULT
from control_plane.core.generation_params import GenerationParams
from control_plane.engine.sample_text import SampleText
from control_plane.text.huggingface_tokenizer import load_huggingface_tokenizer
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.golden.prompts import DATA
from tests.integration.asking import PATIENCE_S, Server

pytestmark = pytest.mark.model

RUNS: list[dict[str, Any]] = json.loads((DATA / "greedy.json").read_text("utf-8"))["runs"]
NUM_TOKENS = 24
LONGEST_PIECE = 24
NUM_WORKERS = 32
"""As many as there are requests: together they take as many steps as one."""
NAMES = ("fact", "python", "chinese", "emoji")
SETS_OF_A_PROMPT = 2


@pytest.fixture(scope="module")
def tokenizer():
    return load_huggingface_tokenizer(load_model(DEFAULT).assets.tokenizer_json)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the string that is complete first, the longest of several; and which."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def text_of(tokenizer, run: dict[str, Any], num_tokens: int) -> str:
    """What is seen of the first tokens of an answer: a character cut at the end is left out."""
    sample = SampleText(tokenizer, GenerationParams())
    return sample.push(run["token_ids"][:num_tokens]).text + sample.finish().text


@pytest.mark.spread(5)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_no_piece_of_an_answer_leaks_when_it_is_the_stop_string(tokenizer, run):
    token_ids = run["token_ids"][:NUM_TOKENS]
    text = text_of(tokenizer, run, NUM_TOKENS)
    pieces = {
        text[first : first + length]
        for first in range(len(text))
        for length in range(1, LONGEST_PIECE + 1)
    }
    for piece in pieces:
        expected = text[: text.index(piece)]
        sample = SampleText(tokenizer, GenerationParams(stop=(piece,)))
        seen, given = "", []
        for token_id in token_ids:
            part = sample.push((token_id,))
            seen += part.text
            given += part.token_ids
            assert expected.startswith(seen)  # nothing is taken back either
            if sample.has_ended:
                break
        else:
            seen += sample.finish().text
        assert (seen, sample.matched_stop) == (expected, piece)
        assert given == token_ids[: len(given)]


class Asked:
    """One deployment, asked for the greedy answer to a golden prompt with some stop strings."""

    def __init__(self, server: Server, http: httpx.Client) -> None:
        self.stub = server.stub
        self.http = http
        self.model = http.get("/v1/models").json()["data"][0]["id"]

    def of_grpc(self, run: dict[str, Any], stops: list[str]) -> tuple[str, str | None]:
        response = self.stub.Generate(self._message(run, stops), timeout=PATIENCE_S)
        assert response.finish_reason == reason_of(response)
        return response.text, response.matched_stop.text or None

    def of_grpc_stream(self, run: dict[str, Any], stops: list[str]) -> tuple[str, str | None]:
        *events, last = self.stub.GenerateStream(self._message(run, stops), timeout=PATIENCE_S)
        finished = last.finished
        assert finished.finish_reason == reason_of(finished)
        return "".join(event.delta.text for event in events), finished.matched_stop.text or None

    def of_http(self, run: dict[str, Any], stops: list[str]) -> tuple[str, str]:
        response = self.http.post("/v1/completions", json=self._body(run, stops))
        (choice,) = response.json()["choices"]
        return choice["text"], choice["finish_reason"]

    def of_http_stream(self, run: dict[str, Any], stops: list[str]) -> tuple[str, str | None]:
        body = self._body(run, stops) | {"stream": True}
        blocks = self.http.post("/v1/completions", json=body).text.split("\n\n")
        *chunks, done, rest = [block.removeprefix("data: ") for block in blocks]
        assert (done, rest) == ("[DONE]", "")
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]

    def _message(self, run: dict[str, Any], stops: list[str]) -> pb.GenerateRequest:
        sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, stop=stops)
        return pb.GenerateRequest(text=run["prompt"], sampling=sampling)

    def _body(self, run: dict[str, Any], stops: list[str]) -> dict[str, Any]:
        sampling = {"max_tokens": NUM_TOKENS, "temperature": 0, "stop": stops}
        return {"model": self.model, "prompt": run["prompt"], **sampling}


def reason_of(end: Any) -> pb.FinishReason:
    return pb.FINISH_REASON_STOP if end.matched_stop.text else pb.FINISH_REASON_LENGTH


@pytest.fixture(scope="module")
def asked(exact_deployment) -> Iterator[Asked]:
    limits = httpx.Limits(max_connections=NUM_WORKERS)
    with (
        Server(exact_deployment.control) as server,
        httpx.Client(
            base_url=f"http://{exact_deployment.http}", timeout=PATIENCE_S, limits=limits
        ) as http,
    ):
        yield Asked(server, http)


def drawn_stops(draw: random.Random, text: str) -> list[str]:
    """One to four pieces of the text from anywhere in it, some of them spoilt at the end."""
    stops = []
    for _ in range(draw.randint(1, 4)):
        first = draw.randrange(len(text) // 4, len(text))
        piece = text[first : first + draw.randint(1, 12)]
        stops.append(piece + "§" * (draw.random() < 0.3))
    return stops


def test_nothing_of_a_stop_string_is_seen_by_any_client(asked, tokenizer):
    draw = random.Random(6)
    cases = []
    for run in RUNS:
        if run["name"] in NAMES:
            text = text_of(tokenizer, run, NUM_TOKENS)
            cases += [(run, text, drawn_stops(draw, text)) for _ in range(SETS_OF_A_PROMPT)]

    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        answers = [
            [
                pool.submit(of_client, run, stops)
                for of_client in (
                    asked.of_grpc, asked.of_grpc_stream, asked.of_http, asked.of_http_stream,
                )
            ]
            for run, _, stops in cases
        ]  # fmt: skip
    have_matched = set()
    for case, found in zip(cases, answers, strict=True):
        expected, matched = cut(*case[1:])
        reason = "length" if matched is None else "stop"
        wanted = [(expected, matched)] * 2 + [(expected, reason)] * 2
        assert [answer.result() for answer in found] == wanted, case
        have_matched.add(matched is not None)
    assert have_matched == {True, False}
