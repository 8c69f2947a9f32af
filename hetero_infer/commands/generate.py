"""`hetero-infer --input TEXT`: one text, from two planes that live as long as it takes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console

from hetero_infer.client import (
    Delta,
    Finished,
    InferenceClient,
    ModelInfo,
    SampleFinished,
    Started,
)
from hetero_infer.config import EngineConfig, GenerationConfig, Settings
from hetero_infer.local_planes import (
    compute_socket,
    control_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import wait_all_ready
from planes.errors import ExecutionError, ValidationError

TITLE = "Heterogeneous Inference System"


@dataclass(slots=True)
class Sample:
    """One text as far as it has come; `finish_reason` is empty until its end."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer, and how long the planes took to start. `samples`: one at least."""

    samples: Sequence[Sample]
    started: Started
    finished: Finished
    startup_s: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time from receipt to the end."""
        finished = self.finished
        return finished.completion_tokens / finished.total_s if finished.total_s > 0 else 0.0


def generate(settings: Settings, *, as_json: bool, is_quiet: bool) -> int:
    """Generate one text and print it. Raises EngineError; returns the exit status."""
    config = _engine_config(settings)
    generation = settings.resolve(GenerationConfig)
    generation.params.validate()
    prompt = _prompt(settings, generation)
    printer = Printer(is_silent=as_json or is_quiet, prints_text=not as_json)
    printer.header(config)
    result = _run(config, generation, prompt, printer)
    if as_json:
        sys.stdout.write(_to_json(result) + "\n")
    printer.footer(result)
    sys.stdout.flush()
    if result.finished.finish_reason in ("error", "cancelled"):
        raise ExecutionError(f"the generation ended early: {result.finished.finish_reason}")
    return 0


def _engine_config(settings: Settings) -> EngineConfig:
    """Resolve and check the configuration of planes whose output goes through this process."""
    config = settings.resolve(EngineConfig)
    config.validate()
    if config.log_format == "auto":
        log_format = "console" if sys.stderr.isatty() else "json"
        config = dataclasses.replace(config, log_format=log_format)
    return config


def _prompt(settings: Settings, generation: GenerationConfig) -> str:
    """Return the prompt. Raises ValidationError without one, or for one that is no text."""
    prompt = generation.input
    if prompt is None:
        message = (
            "input must not be empty, got ''"
            if settings.gives("input")
            else "nothing to do: give --input TEXT, or `serve`; --help shows everything"
        )
        raise ValidationError(message, field="input")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValidationError(
            f"input is not valid UTF-8 (at character {error.start})", field="input"
        ) from None
    return prompt


def _run(
    config: EngineConfig, generation: GenerationConfig, prompt: str, printer: Printer
) -> Generation:
    """Start both planes, stream one text through the public gRPC API, end both planes."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(private_directory())
        compute, control = compute_socket(directory), control_socket(directory)
        with printer.progress("Starting the planes and loading the model …"):
            planes = [
                stack.enter_context(start_compute_plane(config, compute, printer.log)),
                stack.enter_context(
                    start_control_plane(
                        config, compute, f"--listen={control}", on_output=printer.log
                    )
                ),
            ]
            wait_all_ready(planes)
            client = stack.enter_context(InferenceClient(control))
            info = client.model_info()
        printer.model(info)
        startup_s = time.monotonic() - began
        printer.prompt(prompt, generation.max_tokens)
        return _stream(client, prompt, generation, startup_s, printer)


def _stream(
    client: InferenceClient,
    prompt: str,
    generation: GenerationConfig,
    startup_s: float,
    printer: Printer,
) -> Generation:
    started: Started | None = None
    finished: Finished | None = None
    params = generation.params
    samples = [Sample() for _ in range(params.n)]
    events = client.generate_stream(
        prompt, params, priority=generation.priority, cache_salt=generation.cache_salt or ""
    )
    with contextlib.closing(events):
        for event in events:
            match event:
                case Started():
                    started = event
                    if params.n == 1:
                        printer.begin_text()
                case Delta(text, new_token_ids, index):
                    samples[index].text += text
                    samples[index].token_ids += new_token_ids
                    if params.n == 1:
                        printer.text(text)
                case SampleFinished(index, finish_reason):
                    samples[index].finish_reason = finish_reason
                case Finished():
                    finished = event
    if started is None or finished is None:
        raise ExecutionError("the server ended the stream without saying how it began or ended")
    if params.n == 1:
        samples[0].finish_reason = finished.finish_reason
        printer.end_text()
    else:  # they came all at once, and are told one after the other
        for number, sample in enumerate(samples, start=1):
            printer.begin_text(number)
            printer.text(sample.text)
            printer.end_text()
    return Generation(samples, started, finished, startup_s)


def _to_json(result: Generation) -> str:
    """Spell the answer as one JSON object on one line."""
    finished, first = result.finished, result.samples[0]
    several = [dataclasses.asdict(sample) for sample in result.samples]
    return json.dumps(
        {
            "text": first.text,
            "token_ids": first.token_ids,
            "finish_reason": finished.finish_reason,
            **({"samples": several} if len(several) > 1 else {}),
            "usage": {
                "prompt_tokens": finished.prompt_tokens,
                "completion_tokens": finished.completion_tokens,
                "total_tokens": finished.prompt_tokens + finished.completion_tokens,
                "cached_tokens": finished.cached_tokens,
            },
            "timings": {
                "startup_s": result.startup_s,
                "queue_s": finished.queue_s,
                "time_to_first_token_s": finished.time_to_first_token_s,
                "total_s": finished.total_s,
                "tokens_per_second": result.tokens_per_second,
            },
            "model": result.started.model,
            "seed": result.started.params.seed,
        },
        ensure_ascii=False,
    )


class Printer:
    """Results to stdout, in the same plain form on a terminal and in a pipe; the rest to stderr.

    `is_silent`: nothing but the text. `prints_text`: show it as it comes.
    """

    def __init__(self, *, is_silent: bool, prints_text: bool) -> None:
        self._is_silent = is_silent
        self._prints_text = prints_text
        self._stderr = Console(stderr=True, soft_wrap=True)

    def progress(self, text: str) -> contextlib.AbstractContextManager[object]:
        """Show a spinner on a terminal, nothing in a pipe."""
        if self._stderr.is_terminal:
            return self._stderr.status(text)
        return contextlib.nullcontext()

    def log(self, line: str) -> None:
        """Pass on a line of a plane; any thread."""
        self._stderr.print(line, markup=False, highlight=False)

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

    def prompt(self, prompt: str, max_tokens: int) -> None:
        """Say what is asked."""
        self._line(f"\nInput: {prompt}")
        self._line(f"Generating up to {max_tokens} tokens...\n")

    def begin_text(self, number: int | None = None) -> None:
        """Announce the text, once the prompt is accepted; `number`: which one of several."""
        if not self._is_silent:
            sys.stdout.write("Output: " if number is None else f"Output {number}: ")
            sys.stdout.flush()

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
        self._line(f"Tokens generated: {result.finished.completion_tokens}")
        self._line(
            f"Speed: {result.tokens_per_second:.1f} tokens/s "
            f"(first token after {result.finished.time_to_first_token_s:.2f} s, "
            f"{result.finished.prompt_tokens} prompt tokens)"
        )

    def _line(self, text: str) -> None:
        if not self._is_silent:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
