"""Fifty requests, each whole and as a stream, over gRPC and HTTP: four times the same answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from protos.hetero.inference.v1 import inference_pb2 as pb
from protos.hetero.inference.v1 import inference_pb2_grpc
from tests.golden.prompts import PROMPTS
from tests.integration.asking import PATIENCE_S, Server

pytestmark = pytest.mark.model

NUM_WORKERS = 16
REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True)
class Case:
    """A request. `sampling`: in the words of gRPC, which HTTP shares but for `stop`'s kin."""

    text: str
    sampling: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = False

    @property
    def params(self) -> dict[str, Any]:
        greedy = {"max_tokens": 6, "temperature": 0.0, "top_p": 1.0, "seed": 1}
        return greedy | self.sampling


def drawn(seed: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": seed, **more}


TALES = "The ship left the harbour at dawn and nobody on the quay knew who steered it. " * 8
DATE = "[12][0-9]{3}-[01][0-9]-[0-3][0-9]"
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)
CASES = [
    *(Case(text) for text in PROMPTS.values()),
    *(Case(text, drawn(seed)) for seed, text in enumerate(PROMPTS.values()) if seed % 2),
    Case("你好,世界!你好,", drawn(11, max_tokens=16)),
    Case("😀😀😀😀😀😀", {"max_tokens": 16}),
    Case("🎉🚀🌍✨🎉🚀🌍✨🎉🚀", drawn(12, temperature=1.5, max_tokens=16)),
    Case("한국어 문장: 안녕하세요.", drawn(13, n=2, max_tokens=16)),
    Case("日本語の文章です。", drawn(14, n=3)),
    Case("نص باللغة العربية", drawn(15)),
    Case("Ελληνικά και हिन्दी और", drawn(16, temperature=1.3, max_tokens=20)),
    Case(TALES, {"max_tokens": 6}),
    Case(TALES, drawn(17, n=2)),
    Case("One. Two. Three.", {"stop": ["."]}),
    Case("A date: ", drawn(31, n=2, max_tokens=20, structured_outputs={"regex": DATE})),
    Case("A person: ", drawn(32, max_tokens=60, structured_outputs={"json": PERSON})),
    Case("1, 2, 3, 4,", {"stop": [" 7", "9"], "max_tokens": 20}),
    Case("Once upon a time", drawn(18, stop=["the", "a", "\n"], max_tokens=20)),
    Case("Once upon a time", drawn(19, stop=["e"], n=3)),
    Case("def f(x):\n    return", {"stop": ["\n\n", "def"], "max_tokens": 20}),
    Case("The capital of France is", {"stop": [" Paris"], "include_stop": True}),
    Case("Hi", drawn(20, top_k=5, min_p=0.01, repetition_penalty=1.2)),
    Case("Hi", {"logit_bias": {28: 5.0}, "presence_penalty": 0.5, "frequency_penalty": 0.5}),
    Case("What is the capital of France?", is_chat=True),
    Case("Say hi.", {"max_tokens": 40}, is_chat=True),
    Case("写一句话。", drawn(21, max_tokens=16), is_chat=True),
    Case("Answer with emoji only: 🎉?", drawn(22, n=2), is_chat=True),
    Case("List three colours.", {"stop": ["2", "\n"], "max_tokens": 16}, is_chat=True),
]


@dataclass
class Answer:
    """What one way of asking has brought: of each sample its text and reason, and the counts."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    counts: tuple[int, int] = (0, 0)

    def add(self, index: int, text: str, reason: str | None = None) -> None:
        assert index not in self.reasons, "something comes after the end of a sample"
        text.encode()  # no half of a surrogate pair
        self.texts[index] = self.texts.get(index, "") + text
        if reason is not None:
            self.reasons[index] = reason


class Ways:
    """The four ways of asking one deployment."""

    def __init__(self, server: Server, http: httpx.Client, *, keeps_bits: bool) -> None:
        self.server = server
        self.keeps_bits = keeps_bits
        self._num_salts = itertools.count(1)
        self.tokenizer = inference_pb2_grpc.TokenizerServiceStub(server.channel)
        self.http = http
        self.model = http.get("/v1/models").json()["data"][0]["id"]
        self.num_split_characters = 0

    @property
    def num_at_once(self) -> int:
        """Where bits depend on the company, each request is alone."""
        return NUM_WORKERS if self.keeps_bits else 1

    def salt(self) -> str:
        """Where they depend on how a prompt is cut, nothing of it is cached."""
        return "" if self.keeps_bits else str(next(self._num_salts))

    def ask(self, case: Case) -> tuple[Answer, Answer, Answer, Answer]:
        return (
            self.whole_of_grpc(case),
            self.stream_of_grpc(case),
            self.whole_of_http(case),
            self.stream_of_http(case),
        )

    def whole_of_grpc(self, case: Case) -> Answer:
        stub = self.server.stub
        call = stub.Chat if case.is_chat else stub.Generate
        response = call(message_of(case, self.salt()), timeout=PATIENCE_S)
        answer = Answer(counts=counts_of(response.usage))
        for sample in response.samples or [response]:
            index = sample.index if response.samples else 0
            answer.add(index, sample.text, REASONS[sample.finish_reason])
            self.check_text(sample)
        return answer

    def check_text(self, sample: pb.Sample | pb.GenerateResponse) -> None:
        """A text is that of its tokens decoded at once, less a character that was cut off.

        Whole answers are made of the pieces that streams have: a character split in two would be
        spoilt in both.
        """
        request = pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=sample.token_ids))
        decoded = self.tokenizer.Detokenize(request, timeout=PATIENCE_S).text
        assert decoded.startswith(sample.text)
        if not sample.HasField("matched_stop"):
            assert set(decoded[len(sample.text) :]) <= {"\ufffd"}

    def stream_of_grpc(self, case: Case) -> Answer:
        stub = self.server.stub
        call = stub.ChatStream if case.is_chat else stub.GenerateStream
        answer, num_tokens = Answer(), {}
        started, *events, last = call(message_of(case, self.salt()), timeout=PATIENCE_S)
        assert started.HasField("started")
        for event in events:
            if event.HasField("delta"):
                delta = event.delta
                assert delta.offset == num_tokens.get(delta.index, 0)
                num_tokens[delta.index] = delta.offset + len(delta.token_ids)
                self.num_split_characters += bool(delta.token_ids) and not delta.text
                answer.add(delta.index, delta.text)
            else:
                end = event.sample_finished
                assert end.completion_tokens == num_tokens[end.index]
                answer.add(end.index, "", REASONS[end.finish_reason])
        finished = last.finished
        assert finished.usage.completion_tokens == sum(num_tokens.values())
        assert started.started.prompt_tokens == finished.usage.prompt_tokens
        if case.params.get("n", 1) == 1:
            answer.add(0, "", REASONS[finished.finish_reason])
        answer.counts = counts_of(finished.usage)
        return answer

    def whole_of_http(self, case: Case) -> Answer:
        response = self.http.post(path_of(case), json=self.body_of(case))
        assert response.status_code == 200, response.text
        body, answer = response.json(), Answer()
        for choice in body["choices"]:
            text = choice["message"]["content"] if case.is_chat else choice["text"]
            answer.add(choice["index"], text, choice["finish_reason"])
        answer.counts = http_counts_of(body["usage"])
        return answer

    def stream_of_http(self, case: Case) -> Answer:
        asked = self.body_of(case) | {"stream": True, "stream_options": {"include_usage": True}}
        answer, usage, is_done = Answer(), None, False
        with self.http.stream("POST", path_of(case), json=asked) as response:
            assert response.status_code == 200
            content = b"".join(response.iter_raw())
        for block in content.split(b"\n\n")[:-1]:
            assert not is_done
            data = block.decode("utf-8", errors="strict").removeprefix("data: ")
            if data == "[DONE]":
                is_done = True
                continue
            chunk = json.loads(data)
            usage = chunk["usage"]
            for choice in chunk["choices"]:
                text = choice["delta"].get("content", "") if case.is_chat else choice["text"]
                answer.add(choice["index"], text, choice["finish_reason"])
        assert is_done
        answer.counts = http_counts_of(usage)
        return answer

    def body_of(self, case: Case) -> dict[str, Any]:
        params = case.params | {"cache_salt": self.salt()}
        if "include_stop" in params:
            params["include_stop_str_in_output"] = params.pop("include_stop")
        if case.is_chat:
            messages = [{"role": "user", "content": case.text}]
            return {"model": self.model, "messages": messages, **params}
        return {"model": self.model, "prompt": case.text, **params}


def path_of(case: Case) -> str:
    return "/v1/chat/completions" if case.is_chat else "/v1/completions"


def message_of(case: Case, salt: str) -> pb.ChatRequest | pb.GenerateRequest:
    sampling = pb.SamplingParams(**case.params)
    if case.is_chat:
        messages = [pb.ChatMessage(role="user", content=case.text)]
        return pb.ChatRequest(messages=messages, sampling=sampling, cache_salt=salt)
    return pb.GenerateRequest(text=case.text, sampling=sampling, cache_salt=salt)


def counts_of(usage: pb.Usage) -> tuple[int, int]:
    return usage.prompt_tokens, usage.completion_tokens


def http_counts_of(usage: dict[str, Any]) -> tuple[int, int]:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.fixture(scope="module")
def ways(deployment, target) -> Iterator[Ways]:
    limits = httpx.Limits(max_connections=NUM_WORKERS)
    with (
        Server(deployment.control) as server,
        httpx.Client(
            base_url=f"http://{deployment.http}", timeout=PATIENCE_S, limits=limits
        ) as http,
    ):
        yield Ways(server, http, keeps_bits=target.keeps_bits)


@pytest.mark.wide
def test_streams_equal_whole_answers_on_both_surfaces(ways):
    assert len(CASES) >= 50
    with ThreadPoolExecutor(ways.num_at_once) as pool:
        answers = list(pool.map(ways.ask, CASES))
    for case, (whole, *others) in zip(CASES, answers, strict=True):
        assert set(whole.reasons) == set(range(case.params.get("n", 1)))
        assert others == [whole] * 3, case
    # The prompts are such that there was something to do wrong.
    wholes = [whole for whole, *_ in answers]
    assert {reason for whole in wholes for reason in whole.reasons.values()} == {"stop", "length"}
    texts = [text for whole in wholes for text in whole.texts.values()]
    assert sum(not text.isascii() for text in texts) >= 12
    assert ways.num_split_characters >= 20
