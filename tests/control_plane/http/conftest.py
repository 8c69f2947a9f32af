"""The whole HTTP application in this process, before an engine that answers from a script.

Tokens are bytes. The answer to a prompt is the prompt backwards, its sample's number and some
characters of several bytes; the log-probability of token t is -t/1000, and every token has `z` and
`y` beside it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import random
from array import array
from dataclasses import dataclass, field

import httpx
import pytest

from control_plane.core.batch import EndToken, TokenLogprobs
from control_plane.core.limits import RequestLimits
from control_plane.core.request import FinishReason, RequestState
from control_plane.engine.admission import Admission
from control_plane.engine.events import RequestEnd, RequestTimings, RequestUpdate
from control_plane.engine.frontend import EngineFrontend, EngineParts
from control_plane.engine.gate import Gate
from control_plane.engine.plane import AdapterDescription, PlaneDescription
from control_plane.engine.stream_hub import StreamHub
from control_plane.http.anthropic_answer_schema import MessageEvent
from control_plane.http.app import make_app
from control_plane.http.backend import Backend
from control_plane.http.chat_answer_schema import ChatChunk, ChatCompletion
from control_plane.http.completion_schema import Completion, CompletionChunk
from control_plane.http.responses_answer_schema import Response, ResponseEvent
from control_plane.structured.grammars import Grammars
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.chat_template import ChatTemplate
from control_plane.text.simple_tokenizer import EOS_TOKEN_ID, SimpleTokenizer
from tests.control_plane.http.raw_port import Port
from tests.waiting import PATIENCE_S

MODEL = "tiny/bytes"
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.x }}{% endfor %}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TAIL = " é漢😀."
EVENTS = {
    "/v1/completions": CompletionChunk,
    "/v1/chat/completions": ChatChunk,
    "/v1/responses": ResponseEvent,
    "/v1/messages": MessageEvent,
}


def answer_to(prompt: str, sample: int = 0) -> str:
    return f"{prompt[::-1]}#{sample}{TAIL}"


def drawn(constraint, seed: str) -> list[int]:
    """Tokens that a constraint allows, as random as the seed; thoughts do not become long."""
    draw, tokens = random.Random(seed), []
    while not constraint.is_complete:
        mask = constraint.allowed_tokens
        allowed = [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]
        if EOS_TOKEN_ID in allowed and draw.random() < 0.3:
            break
        said = bytes(token for token in tokens if token < 256)
        end = b"<|end|>" if said.startswith(b"<|channel|>") else b"</think>"
        is_thought = len(allowed) > 100 and end not in said.rpartition(b"<|message|>")[2]
        chosen = [draw.choice([token for token in allowed if token != EOS_TOKEN_ID])]
        if is_thought and ord("<") in allowed and draw.random() < 0.1:
            chosen = list(end)
        for token in chosen:
            constraint.constrainer.advance([(constraint, [token])])
            assert constraint.error is None
        tokens += chosen
    return tokens


def embedding_of(tokens: list[int]) -> list[float]:
    """What the scripted engine makes of a text."""
    return [float(len(tokens)), float(sum(tokens)), float(tokens[-1])]


def logprobs_of(token_id: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(-token_id / 1000, (122, 121)[:count], (-0.25, -1.5)[:count])


def end_of(reason, state, error=None) -> RequestEnd:
    return RequestEnd(state, reason, RequestTimings(0, 0, 0), error, cached_tokens=2)


@dataclass
class ScriptedEngine:
    """Answers requests one byte a turn. Knobs are plain attributes.

    `says`: the texts of the samples, or their tokens, in place of the script. `draws`: they are
    drawn from the tokens that their constraints allow, whatever comes first.
    `hold`: tokens after which requests wait for `go`. `error`: of requests, behind the tokens that
    `hold` lets through (or at once). `cancelled`: ids of requests that were ended from outside.
    """

    hub: StreamHub
    says: list[str | list[int]] | None = None
    draws: bool = False
    hold: int | None = None
    error: Exception | None = None
    refusal: Exception | None = None
    end_reason: FinishReason | None = None
    go: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: list = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: dict = field(default_factory=dict)
    tasks: set = field(default_factory=set)

    def submit(self, request) -> None:
        self.submitted.append(request)
        self.news.set()
        task = asyncio.get_running_loop().create_task(self.run(request))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def run(self, request) -> None:
        if self.refusal is not None:
            self.publish(request, end=end_of(FinishReason.ERROR, RequestState.FAILED, self.refusal))
            return
        self.publish(request)
        params, prompt = request.params, request.input_tokens
        if request.embedding is not None:
            await self.embed(request)
            return
        if params.num_prompt_logprobs is not None:
            of_prompt = tuple(logprobs_of(t, params.num_prompt_logprobs) for t in prompt[1:])
            self.publish(request, prompt_logprobs=of_prompt)
        text = bytes(t for t in prompt if t < 256).decode(errors="replace")
        texts = self.says or [answer_to(text, n) for n in range(params.n)]
        if self.draws:
            texts = [drawn(one, f"{params.seed}/{n}") for n, one in enumerate(request.constraints)]
        tokens = [text.encode() if isinstance(text, str) else text for text in texts]
        answers = {n: [*tokens[n], EOS_TOKEN_ID] for n in range(params.n)}
        turn = len(request.output_tokens)  # of a stream that is resumed
        while answers:
            await asyncio.sleep(0)
            if turn == self.hold and await self.is_ended_at_hold(request):
                return
            for index in list(answers):
                self.add(request, index, turn, answers)
            turn += 1

    async def embed(self, request) -> None:
        """End a request with numbers that depend on its prompt."""
        if self.hold is not None and await self.is_ended_at_hold(request):
            return
        await asyncio.sleep(0)
        end = end_of(FinishReason.STOP, RequestState.COMPLETED)
        values = array("d", embedding_of(request.input_tokens))
        end = dataclasses.replace(end, embedding=values)
        self.publish(request, end=end, finish_reason=FinishReason.STOP)

    async def is_ended_at_hold(self, request) -> bool:
        if self.error is not None:
            self.publish(request, end=end_of(FinishReason.ERROR, RequestState.FAILED, self.error))
        elif self.end_reason is not None:
            self.publish(request, end=end_of(self.end_reason, RequestState.CANCELLED))
        else:
            await self.go.wait()
            return False
        return True

    def add(self, request, index: int, turn: int, answers: dict[int, list[int]]) -> None:
        """Publish the next token of a sample, or its end."""
        params, token_ids, logprobs = (
            request.params,
            (answers[index][turn % len(answers[index])],),
            (),
        )
        end_token = None
        reason = FinishReason.LENGTH if turn + 1 == params.max_tokens else None
        if (request.id, index) in self.stopped or token_ids[0] in request.end_token_ids:
            if params.num_logprobs is not None and token_ids[0] in request.end_token_ids:
                end_logprobs = logprobs_of(token_ids[0], params.num_logprobs)
                end_token = EndToken(token_ids[0], end_logprobs)
            token_ids, reason = (), FinishReason.STOP
        elif params.num_logprobs is not None:
            logprobs = (logprobs_of(token_ids[0], params.num_logprobs),)
        if reason is not None:
            del answers[index]
        self.publish(
            request,
            new_token_ids=token_ids,
            end=None if answers else end_of(reason, RequestState.COMPLETED),
            logprobs=logprobs,
            sample_index=index,
            finish_reason=reason,
            end_token=end_token,
        )

    def publish(self, request, **news) -> None:
        self.hub.publish([RequestUpdate(request.id, **news)])

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        self.news.set()

    def end_sample(self, request_id: int, sample_index: int, num_tokens: int) -> None:
        self.stopped[request_id, sample_index] = num_tokens

    def flush_prefix_cache(self, reply) -> None:
        reply(0)

    def inspect(self, reply, *, include_ended: bool = False) -> None:  # noqa: ARG002 - the door's
        reply([])


def make_plane(**changes) -> PlaneDescription:
    facts = {
        "protocol_version": 1, "model": MODEL, "architecture": "bytes", "dtype": "float32",
        "weight_format": "", "model_sha256": "", "num_parameters": 0, "vocab_size": 259,
        "context_length": 4096, "numerics_id": "scripted/1", "executor": "scripted",
        "device": "none", "block_size": 16, "num_blocks": 64, "max_slots": 8, "max_rows": 8,
        "max_tokens": 512, "preferred_prefill_chunk": 0, "max_batches_in_flight": 2,
        "software_version": "0", "epoch": 1, "current_session": 0, "hidden_size": 3,
    }  # fmt: skip
    return PlaneDescription(**(facts | changes))


def make_own_app(keyring=None):
    backend = Backend(Gate())
    return backend, make_app(backend, keyring)


shared_app = functools.cache(make_own_app)
"""Making an application takes longer than most tests; only the engine behind it is another."""


class Served:
    """One application and its client; made and used on one event loop."""

    def __init__(
        self,
        *,
        attached: bool = True,
        template: str | None = TEMPLATE,
        metrics=None,
        keyring=None,
        tokenizer=None,
        max_model_len: int = 512,
        max_queued_requests: int = 4096,
        num_planes: int = 1,
        adapters: tuple[AdapterDescription, ...] = (),
    ) -> None:
        self.gate = Gate()
        self.gate.set_linked(is_linked=True)
        self.hub = StreamHub(asyncio.get_running_loop())
        self.engine = ScriptedEngine(self.hub)
        is_plain = attached and keyring is None
        self.backend, self.app = shared_app() if is_plain else make_own_app(keyring)
        self.backend.gate, self.backend.metrics = self.gate, metrics
        tokenizer = tokenizer or SimpleTokenizer()
        chat_template = None if template is None else ChatTemplate(template)
        num_blocks = max_model_len // 8
        limits = RequestLimits(max_model_len=max_model_len, block_size=16, num_blocks=num_blocks)
        parts = EngineParts(
            plane=make_plane(num_blocks=num_blocks, adapters=adapters),
            tokenizer=tokenizer,
            admission=Admission(tokenizer, limits, vocab_size=259, eos_token_ids=(EOS_TOKEN_ID,)),
            grammars=Grammars(tokenizer, vocab_size=259, eos_token_ids=(EOS_TOKEN_ID,)),
            inbox=self.engine,
            hub=self.hub,
            gate=self.gate,
            wants_principal=keyring is not None,
            metrics=lambda: None,
            memory_stats=lambda: None,
            max_queued_requests=max_queued_requests,
            num_planes=num_planes,
            chat_template=chat_template,
            answer_formats=AnswerFormats(tokenizer, chat_template),
        )
        self.frontend = EngineFrontend(parts)
        if attached:
            self.backend.attach(self.frontend)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def complete(self, prompt: object = "Hi", **fields) -> dict:
        body = {"model": MODEL, "prompt": prompt, **fields}
        response = await self.post("/v1/completions", body)
        return checked(response, Completion)

    async def chat(self, content: object = "Hi", **fields) -> dict:
        fields.setdefault("messages", [{"role": "user", "content": content}])
        response = await self.post("/v1/chat/completions", {"model": MODEL, **fields})
        return checked(response, ChatCompletion)

    async def respond(self, given: object = "Hi", **fields) -> dict:
        response = await self.post("/v1/responses", {"model": MODEL, "input": given, **fields})
        return checked(response, Response)

    async def events(self, path: str, body: dict) -> list[tuple[str | None, object]]:
        """Every event of a stream: its name, and its data parsed but for `[DONE]`."""
        response = await self.post(path, {"model": MODEL, "stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        found = []
        for block in response.text.split("\n\n")[:-1]:
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            data = lines["data"]
            found.append((lines.get("event"), data if data == "[DONE]" else json.loads(data)))
            if data != "[DONE]" and lines.get("event") != "error":
                EVENTS[path].model_validate_json(data, strict=True, extra="forbid")
        return found

    async def error(self, path: str, body: object, status: int = 400) -> dict:
        """The error that refuses a body, which has OpenAI's shape."""
        response = await self.post(path, body)
        return error_of(response, status)


def checked(response: httpx.Response, model) -> dict:
    """The body of a success, which is exactly what `/openapi.json` says."""
    assert response.status_code == 200, response.text
    model.model_validate_json(response.content, strict=True, extra="forbid")
    return response.json()


def error_of(response: httpx.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.fixture(scope="session")
def openai():
    """OpenAI's package; to import it takes a second, and every worker imports every file."""
    import openai

    return openai


@pytest.fixture(scope="session")
def anthropic():
    """Anthropic's package, in the same way."""
    import anthropic

    return anthropic


@pytest.fixture
def on_loop():
    """Runs a test's coroutine with an application of its own."""

    def run(test, **options):
        async def main():
            served = Served(**options)
            async with served.client:
                return await asyncio.wait_for(test(served), PATIENCE_S)

        return asyncio.run(main())

    return run


@pytest.fixture
def on_port():
    def run(test, limit: int = 4) -> None:
        async def go() -> None:
            async with Port(limit) as port:
                await asyncio.wait_for(test(port), PATIENCE_S)

        asyncio.run(go())

    return run
