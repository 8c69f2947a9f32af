"""The generations of one HTTP request, read as the choices of one answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from control_plane.api.answer_size import AnswerSize
from control_plane.core.batch import EndToken, TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason
from control_plane.core.request_options import RequestOptions
from control_plane.engine.frontend import EngineFrontend, Generation, TextDelta
from control_plane.errors import RequestCancelledError
from control_plane.groups import first_error
from control_plane.http.usage import TokenCounts
from control_plane.text.answers.text_form import PLAIN, TextForm
from planes.errors import EngineError

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Piece(NamedTuple):
    """A piece of one choice. `logprobs`: one entry a token, or none at all.

    `end_token`: what ended it and is no part of it, if log-probabilities were asked for.
    `matched_stop`: the text or token of the caller's that ended it, if one did.
    """

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    end_token: EndToken | None = None
    matched_stop: str | int | None = None


Take: TypeAlias = Callable[[int, Piece], Awaitable[None]]
"""Takes the next piece of the choice of that index."""


class Answers:
    """All generations of one request; choice i is sample i mod n of prompt i div n.

    `only_prompts`: what was generated is left out (the engine generates at least one token).
    """

    def __init__(self, generations: Sequence[Generation], *, only_prompts: bool = False) -> None:
        self._generations = generations
        self._only_prompts = only_prompts
        self._num_samples = generations[0].params.n
        self._num_cached = 0

    @property
    def num_choices(self) -> int:
        """Prompts times samples."""
        return len(self._generations) * self._num_samples

    @property
    def counts(self) -> TokenCounts:
        """What it took until now; `cached` is known of what was read to its end."""
        generations = self._generations
        generated = sum(generation.num_generated_tokens for generation in generations)
        return TokenCounts(
            prompt=sum(generation.num_prompt_tokens for generation in generations),
            completion=0 if self._only_prompts else generated,
            cached=self._num_cached,
        )

    def prompt_of(self, choice: int) -> Generation:
        """Return the generation that knows the choice's prompt, all of it once a piece has come."""
        return self._generations[choice // self._num_samples]

    async def read(self, take: Take) -> None:
        """Hand every piece to `take`; exactly one of each choice has a finish reason, its last.

        Raises EngineError if a request failed.
        """
        if len(self._generations) == 1:
            await self._read_one(0, take)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._generations)):
                    group.create_task(self._read_one(index, take))
        # A group of whatever the parts raised; they are the same kind of thing as one alone.
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _read_one(self, index: int, take: Take) -> None:
        generation, first = self._generations[index], index * self._num_samples
        while True:
            delta = await generation.next_delta()
            await take(first + delta.sample_index, self._piece(delta))
            if delta.end is not None:
                self._num_cached += delta.end.cached_tokens
                return

    def _piece(self, delta: TextDelta) -> Piece:
        reason = None if delta.finish_reason is None else _finish_reason(delta.finish_reason)
        if self._only_prompts:
            return Piece("", finish_reason=reason and _FINISH_REASONS[FinishReason.LENGTH])
        return Piece(
            delta.text,
            delta.token_ids,
            delta.logprobs,
            reason,
            delta.end_token,
            delta.matched_stop,
        )


@contextlib.asynccontextmanager
async def answers_to(
    frontend: EngineFrontend,
    prompts: Sequence[str | Sequence[int]],
    params: GenerationParams,
    options: RequestOptions,
    *,
    is_whole: bool,
    only_prompts: bool = False,
    form: TextForm = PLAIN,
) -> AsyncIterator[Answers]:
    """Submit every prompt and wait until the engine has taken them; leaving it ends them all.

    `is_whole`: the answer is collected before it is sent. `form`: of its text. Raises EngineError
    if one of them is refused, or all of them have too many log-probabilities.
    """
    if len(prompts) > 1:  # one alone is checked as it is submitted
        frontend.check_places(len(prompts))
    num_samples = params.n if is_whole else 0
    size = AnswerSize(
        frontend.max_model_len, num_samples=num_samples, num_echoes=max(1, num_samples)
    )
    async with contextlib.AsyncExitStack() as stack:
        generations: list[Generation] = []
        for index, prompt in enumerate(prompts):
            named = options
            if len(prompts) > 1:
                named = replace(options, name=f"{options.name}-{index}")
            with _named(index) if len(prompts) > 1 else contextlib.nullcontext():
                generation = await frontend.submit(prompt, params, named, form=form)
            generations.append(await stack.enter_async_context(generation))
            size.add(generation)
            await asyncio.sleep(0)  # each may take a millisecond; others come between
        for generation in generations:
            await generation.admitted()
        yield Answers(generations, only_prompts=only_prompts)


@contextlib.contextmanager
def _named(index: int) -> Iterator[None]:
    """Say in errors of a prompt which of several it is."""
    try:
        yield
    except EngineError as error:
        if error.field in ("prompt", "token_ids"):
            place = f"prompt[{index}]"
            error.message = f"{place}: {error.message.removeprefix(f'{error.field}: ')}"
            error.field = place
        raise


def _finish_reason(reason: FinishReason) -> str:
    """Return OpenAI's word. Raises RequestCancelledError for an end that it has no word for."""
    word = _FINISH_REASONS.get(reason)
    if word is None:
        raise RequestCancelledError("the request was cancelled by the server")
    return word
