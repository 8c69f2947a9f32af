"""`hetero-infer --input TEXT`: one text, from two planes that live as long as it takes."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_infer.commands.answer_object import answer_object
from hetero_infer.commands.prompt import prompt_of
from hetero_infer.commands.server import STARTING, Notices, own_server
from hetero_infer.config import EngineConfig, Settings
from hetero_infer.generation_config import GenerationConfig
from planes.default_int import DefaultInt
from planes.errors import ExecutionError, ValidationError

if TYPE_CHECKING:
    from hetero_infer.client import Answer, Client, ModelInfo

TITLE = "Heterogeneous Inference System"


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer, and how long the planes took to start."""

    answer: Answer
    startup_s: float


def generate(settings: Settings, *, as_json: bool, is_quiet: bool) -> int:
    """Generate one text and print it. Raises EngineError; returns the exit status."""
    config = _engine_config(settings)
    generation = settings.resolve(GenerationConfig)
    generation.params.validate()
    generation.options.validate()
    _check_room(generation.max_tokens, config.max_model_len)
    prompt = prompt_of(settings, generation, max_model_len=config.max_model_len)
    printer = Printer(is_silent=as_json or is_quiet, prints_text=not as_json)
    printer.header(config)
    result = _run(config, generation, prompt, printer)
    if as_json:
        sys.stdout.write(_to_json(result) + "\n")
    printer.footer(result)
    sys.stdout.flush()
    if result.answer.finish_reason in ("error", "cancelled"):
        raise ExecutionError(f"the generation ended early: {result.answer.finish_reason}")
    return 0


def _engine_config(settings: Settings) -> EngineConfig:
    """Resolve and check the configuration of the planes."""
    config = settings.resolve(EngineConfig)
    config.validate()
    return config


def _check_room(max_tokens: int, max_model_len: int) -> None:
    """Refuse before anything is loaded what no prompt leaves room for. Raises ValidationError."""
    if max_tokens >= max_model_len and not isinstance(max_tokens, DefaultInt):
        raise ValidationError(
            f"max_tokens must be below max_model_len ({max_model_len}), which the prompt shares, "
            f"got {max_tokens}",
            field="max_tokens",
        )


def _run(
    config: EngineConfig, generation: GenerationConfig, prompt: str, printer: Printer
) -> Generation:
    """Start both planes, stream one text through the public gRPC API, end both planes."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        with printer.notices.progress(STARTING):
            server = stack.enter_context(own_server(config, printer.notices.log))
            # Imported by now, while the planes were starting.
            from hetero_infer.client import Client

            client = stack.enter_context(Client(server.address))
            info = client.model_info(generation.adapter or "")
            num_blocks = client.get_memory_stats().total_blocks
        printer.model(info)
        printer.pool(config, num_blocks)
        startup_s = time.monotonic() - began
        printer.prompt(prompt, generation.max_tokens)
        return Generation(_stream(client, prompt, generation, printer), startup_s)


def _stream(client: Client, prompt: str, generation: GenerationConfig, printer: Printer) -> Answer:
    from hetero_infer.client import Delta, Started
    from hetero_infer.client.requests import can_resume

    params = generation.params
    with client.stream(
        prompt,
        params,
        priority=generation.priority,
        cache_salt=generation.cache_salt or "",
        model=generation.adapter or "",
        resume=can_resume(params),
    ) as stream:
        if params.n == 1:
            for event in stream:
                if isinstance(event, Started):
                    printer.begin_text()
                elif isinstance(event, Delta):
                    printer.text(event.text)
        answer = stream.answer()
    if params.n == 1:
        printer.end_text()
    else:  # they came all at once, and are told one after the other
        for number, sample in enumerate(answer.samples, start=1):
            if number > 1:
                printer.separate()
            printer.begin_text(number)
            printer.text(sample.text)
            printer.end_text()
    return answer


def _to_json(result: Generation) -> str:
    """Spell the answer as one JSON object on one line."""
    found = answer_object(result.answer, startup_s=result.startup_s)
    return json.dumps(found, ensure_ascii=False)


class Printer:
    """Results to stdout, in the same plain form on a terminal and in a pipe; the rest to stderr.

    `is_silent`: nothing but the text. `prints_text`: show it as it comes.
    """

    def __init__(self, *, is_silent: bool, prints_text: bool) -> None:
        self._is_silent = is_silent
        self._prints_text = prints_text
        self.notices = Notices()

    def header(self, config: EngineConfig) -> None:
        """Say what is about to run."""
        self._line(TITLE)
        self._line("=" * len(TITLE))
        self._line("Configuration:")
        self._line(f"  Block size: {config.block_size}")
        self._line(f"  Max blocks: {config.max_num_blocks}")
        self._line(f"  Max batch size: {config.max_batch_size}")
        self._line(f"  Max sequences: {config.max_num_seqs}")

    def model(self, info: ModelInfo) -> None:
        """Say what was loaded."""
        self._line(f"  Model: {info.model} ({info.weight_format}, computed in {info.dtype})")
        self._line(f"  Executor: {info.executor} on {info.device}")

    def pool(self, config: EngineConfig, num_blocks: int) -> None:
        """Say how large the pool is where the compute plane has chosen that."""
        if num_blocks != config.max_num_blocks:
            self._line(f"  KV pool: {num_blocks} blocks")

    def prompt(self, prompt: str, max_tokens: int) -> None:
        """Say what is asked."""
        self._line(f"\nInput: {prompt}")
        self._line(f"Generating up to {max_tokens} tokens...\n")

    def begin_text(self, number: int | None = None) -> None:
        """Announce the text, once the prompt is accepted; `number`: which one of several."""
        if not self._is_silent:
            sys.stdout.write("Output: " if number is None else f"Output {number}: ")
            sys.stdout.flush()

    def separate(self) -> None:
        """Part one of several texts from the one before, where they are not numbered."""
        if self._is_silent and self._prints_text:
            sys.stdout.write("\n")

    def text(self, piece: str) -> None:
        """Show a piece of the text as it comes."""
        if self._prints_text and piece:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def end_text(self) -> None:
        """End the text."""
        if self._prints_text:
            sys.stdout.write("\n")

    def footer(self, result: Generation) -> None:
        """Say how much and how fast."""
        answer, finished = result.answer, result.answer.finished
        plural = "" if finished.prompt_tokens == 1 else "s"
        self._line(f"Tokens generated: {finished.completion_tokens}")
        self._line(
            f"Speed: {answer.tokens_per_second:.1f} tokens/s "
            f"(first token after {finished.time_to_first_token_s:.2f} s, "
            f"{finished.prompt_tokens} prompt token{plural})"
        )

    def _line(self, text: str) -> None:
        if not self._is_silent:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
