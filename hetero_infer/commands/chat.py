"""`hetero-infer chat`: a conversation in the terminal, or one turn a line from a pipe.

Answers go to stdout as they come, everything else to stderr. What a model thinks is shown on a
terminal only, dim. Exit statuses: 0 the end of the input or `/exit`; 1 a turn of a pipe was not
answered; 130 Ctrl-C twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Mapping
from typing import Any

from control_plane.core.errors import ContextLengthError, RequestNeverFitsError
from control_plane.core.generation_params import GenerationParams
from control_plane.errors import DrainingError
from hetero_infer.client import Client, Delta, Event, Finished, Message
from hetero_infer.commands.chat_history import History
from hetero_infer.commands.chat_input import HELP, Command, Said, TurnReader, UnreadableError
from hetero_infer.commands.chat_interrupts import Interrupts, cancelling
from hetero_infer.commands.server import Notices, server_of
from hetero_infer.commands.target import ChatGenerationConfig, ChatSettings
from hetero_infer.config import Settings
from hetero_infer.generation_config import GenerationConfig
from hetero_infer.wire_errors import ServerLostError
from planes.errors import EngineError, ValidationError

PROGRAM = "hetero-infer"

EXIT_UNANSWERED = 1
EXIT_INTERRUPTED = 128 + signal.SIGINT

CONTEXT_FULL = "the conversation fills the model's context: /reset begins a new one"

DIM = "\x1b[2m"
PLAIN = "\x1b[0m"

INVISIBLE = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")
"""Control characters but tab and newline: on a terminal they would be commands to it."""


def chat(settings: Settings, target: ChatSettings, flags: Mapping[str, object]) -> int:
    """Talk until the input ends; the exit status. Raises EngineError if there is no server."""
    generation = settings.resolve(ChatGenerationConfig)
    reader = TurnReader()
    params = dataclasses.replace(
        generation.params,
        n=1,
        beam_width=None,
        length_penalty=1.0,
        early_stopping=False,
        num_logprobs=None,
        num_prompt_logprobs=None,
    )
    params.validate()
    generation.options.validate()
    notices = Notices()
    with (
        server_of(settings, target, flags, notices) as server,
        Client(
            server.address, token=server.token, tls=server.tls, on_wait=notices.tell_wait
        ) as client,
    ):
        info = client.model_info(generation.adapter or "")
        if not info.has_chat_template:
            raise ValidationError(
                f"{info.model}: {_why_no_chat(client)}; without one there is only `--input` (give "
                "a template with --chat-template FILE)",
                field="chat_template",
            )
        if target.template_kwargs:  # what is wrong with them is told before the first turn
            client.apply_chat_template(
                [Message("user", "hello")], chat_template_kwargs=target.template_kwargs
            )
        if reader.is_interactive:
            _say(f"{info.model}: /help shows the commands, Ctrl-D ends the chat")
        answerer = Answerer(
            client,
            params,
            generation,
            template_kwargs=target.template_kwargs,
            max_model_len=info.max_model_len,
        )
        return Chat(reader, answerer, History(target.system)).run()


def _why_no_chat(client: Client) -> str:
    """Return what the server says of conversations: there is no template, or it is none."""
    try:
        client.apply_chat_template([Message("user", "hello")])
    except ValidationError as error:
        return error.message
    return "the model has no chat template"  # it has one by now


class Answerer:
    """Streams answers to stdout, over the death of the server."""

    def __init__(
        self,
        client: Client,
        params: GenerationParams,
        generation: GenerationConfig,
        *,
        template_kwargs: Mapping[str, Any],
        max_model_len: int,
    ) -> None:
        self._client = client
        self._template_kwargs = template_kwargs
        self._params = params
        self._generation = generation
        self._max_model_len = max_model_len
        self._is_terminal = sys.stdout.isatty()
        self._is_lost = False
        self._is_mid_line = False
        self._is_thinking = False
        """Whether what was shown last is thought."""
        self.has_broken_off = False
        """Whether the last answer failed when some of it had been shown."""

    def answer(self, history: History, interrupts: Interrupts) -> None:
        """Answer the last question, add the answer to the history.

        Raises EngineError if there is none; then the history is as it was.
        """
        messages = history.messages
        prompt = self._client.apply_chat_template(
            messages, chat_template_kwargs=self._template_kwargs
        )
        params = self._that_fit(len(prompt.token_ids))
        self._is_thinking = False
        with self._client.chat_stream(
            messages,
            params,
            chat_template_kwargs=self._template_kwargs,
            priority=self._generation.priority,
            cache_salt=self._generation.cache_salt or "",
            model=self._generation.adapter or "",
            resume=True,
            on_lost=self._note_loss,
        ) as stream:
            interrupts.watch(stream)
            try:
                for event in stream:
                    if self._is_lost and isinstance(event, Delta):
                        self._is_lost = False
                        _say("the server is back, the answer goes on")
                    self._show_event(event)
            except EngineError:
                self.has_broken_off = bool(stream.text)
                raise
            finally:
                self._is_lost = False
                if stream.text or interrupts.came:
                    self._show("\n")
            is_interrupted = interrupts.came and not stream.is_finished
            if not is_interrupted:
                self._note_end(stream.answer().finish_reason, params.max_tokens)
            history.answer(stream.parts, is_interrupted=is_interrupted)
        if is_interrupted:
            _say("cancelled; what came stays in the conversation")

    def _note_loss(self, error: EngineError, patience_s: float) -> None:
        """Say at once why nothing comes any more, and how long that may last."""
        if self._is_terminal and self._is_mid_line:
            self._show("\n")
        self._is_lost = True
        is_gone = isinstance(error, ServerLostError | DrainingError)
        what = "the server is lost" if is_gone else "the server has no answer for now"
        _say(f"{what} ({error.message}): trying to reach it for {patience_s:g} s")

    def _that_fit(self, num_prompt_tokens: int) -> GenerationParams:
        """Return the parameters with as many tokens as are left. Raises ContextLengthError."""
        room = self._max_model_len - num_prompt_tokens
        if room < 1:
            raise ContextLengthError(
                f"{num_prompt_tokens} tokens of {self._max_model_len}", field="messages"
            )
        return dataclasses.replace(self._params, max_tokens=min(self._params.max_tokens, room))

    def _note_end(self, finish_reason: str, max_tokens: int) -> None:
        if finish_reason == "length" and max_tokens < self._params.max_tokens:
            _say(f"cut off: {CONTEXT_FULL}")
        elif finish_reason == "length":
            _say(f"cut off after {max_tokens} tokens (--max-tokens)")
        elif finish_reason != "stop":
            _say(f"the answer ended early: {finish_reason}")

    def _show_event(self, event: Event) -> None:
        """Show what the model says, on a terminal what it thinks, too, dim."""
        if not isinstance(event, Delta | Finished):
            return
        parts = event.parts
        if parts is None:
            self._show(event.text if isinstance(event, Delta) else "")
            return
        if parts.reasoning_content and self._is_terminal:
            self._show(parts.reasoning_content, DIM)
            self._is_thinking = True
        if parts.content and self._is_thinking:
            self._show("\n\n")
            self._is_thinking = False
        self._show(parts.content)

    def _show(self, text: str, style: str = "") -> None:
        if not text:
            return
        if self._is_terminal:
            text = text.translate(INVISIBLE)
        sys.stdout.write(f"{style}{text}{PLAIN}" if style else text)
        sys.stdout.flush()
        self._is_mid_line = not text.endswith("\n")


class Chat:
    """One conversation from its first turn to its end."""

    def __init__(self, reader: TurnReader, answerer: Answerer, history: History) -> None:
        self._reader = reader
        self._answerer = answerer
        self._history = history
        self._was_interrupted = False
        self._num_unanswered = 0

    def run(self) -> int:
        """Take turns; the exit status."""
        while True:
            try:
                turn = self._reader.read()
                if turn is None or turn == Command("exit"):
                    if turn is None and self._reader.is_interactive:
                        sys.stderr.write("\n")
                    break
                if isinstance(turn, Said):
                    self._was_interrupted = self._answer(turn.text)
                else:
                    self._obey(turn)
            except KeyboardInterrupt:
                if not self._reader.is_interactive or self._was_interrupted:
                    return EXIT_INTERRUPTED
                self._was_interrupted = True
                sys.stderr.write("\n")
                _say("Ctrl-C once more, Ctrl-D or /exit ends the chat")
            except UnreadableError:
                raise
            except EngineError as error:
                self._note_failure(error)
        return EXIT_UNANSWERED if self._num_unanswered else 0

    def _answer(self, text: str) -> bool:
        """Have a question answered; whether that was interrupted. Raises EngineError."""
        num_turns = self._history.num_turns
        self._history.ask(text)
        try:
            with self._interruptible() as interrupts:
                self._answerer.answer(self._history, interrupts)
        except BaseException as error:  # Ctrl-C too: a question without its answer is no turn
            self._history.rewind(num_turns)
            self._was_interrupted = isinstance(error, KeyboardInterrupt)  # it was the second one
            raise
        return interrupts.came

    def _interruptible(self) -> contextlib.AbstractContextManager[Interrupts]:
        """Let Ctrl-C cancel an answer; in a pipe it ends everything, as always."""
        if self._reader.is_interactive:
            return cancelling()
        return contextlib.nullcontext(Interrupts())

    def _obey(self, command: Command) -> None:
        if command.name == "reset":
            self._history.reset()
            _say("the conversation begins anew")
        elif command.name == "system":
            self._history.system = command.text or None
            _say("system message " + ("set" if command.text else "removed"))
        else:
            sys.stderr.write(HELP)

    def _note_failure(self, error: EngineError) -> None:
        """Say why there is no answer; a person may try something else."""
        if not self._reader.is_interactive:
            self._num_unanswered += 1
        if isinstance(error, ContextLengthError | RequestNeverFitsError):
            _say(f"error: {CONTEXT_FULL} ({error.message})")
        else:
            _say(f"error: {error.message}")
        if self._answerer.has_broken_off:
            self._answerer.has_broken_off = False
            _say("neither the question nor its half answer stays in the conversation")


def _say(line: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{PROGRAM}: {line}\n")
    sys.stderr.flush()
