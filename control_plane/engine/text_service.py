"""Tokenizing, detokenizing and chat templates for API tasks, within bounds and off their loop."""

from __future__ import annotations

import asyncio
import functools
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from control_plane.core.errors import ContextLengthError
from control_plane.core.generation_params import GenerationParams
from control_plane.core.tool_calls import ToolCalls
from control_plane.engine.admission import Admission
from control_plane.text.answers.parser import AnswerFormat
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.answers.told_tools import ToldTools
from control_plane.text.bounds import MAX_MESSAGES
from control_plane.text.chat_template import (
    NO_TEMPLATE,
    ChatTemplate,
    up_to_the_end_of_the_last,
)
from control_plane.text.conversation import (
    MAX_TOOLS,
    check_continued,
    check_tools,
    described,
    template_messages,
)
from control_plane.text.reasoning_effort import (
    ReasoningEffort,
    ThinkingWish,
    with_effort,
    with_wish,
)
from control_plane.text.template_kwargs import check_template_kwargs
from control_plane.text.tokenizer import (
    MAX_BYTES_PER_TOKEN,
    ByteTokenizer,
    PlainTokenizer,
    SpellingTokenizer,
    Tokenizer,
)
from control_plane.text.tool_places import hides_tool_calls
from planes.errors import ValidationError

MAX_INLINE_CHARACTERS = 2048
"""Longer prompts are tokenized on another thread: the event loop must not wait milliseconds."""

MAX_INLINE_TOKENS = 512


class ChatPrompt(NamedTuple):
    """A conversation as the model wants it, special tokens included.

    `answer`: how the text of its answer is to be read; None: all of it is content. `form_ids`: what
    follows where the answer has a form of its own.
    """

    text: str
    token_ids: list[int]
    answer: AnswerFormat | None = None
    form_ids: Sequence[int] = ()

    def ids_for(self, params: GenerationParams) -> list[int]:
        """Return the tokens of the prompt of an answer; calls that must be are no form of it."""
        form = params.structured_outputs
        if form is None or isinstance(form, ToolCalls):
            return self.token_ids
        return [*self.token_ids, *self.form_ids]


class TextService:
    """The model's text side for tasks of one event loop.

    `chat_template`: None if the model has none that can be used, `why_no_chat` says why not.
    `answer_formats`: of answers to conversations; None: they are text. `vocab_size`: width of the
    model's logits. Methods raise ValidationError for what is out of bounds, TokenizationError.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        admission: Admission,
        chat_template: ChatTemplate | None,
        answer_formats: AnswerFormats | None = None,
        *,
        vocab_size: int,
        why_no_chat: str = NO_TEMPLATE,
    ) -> None:
        self._tokenizer = tokenizer
        self._admission = admission
        self._template = chat_template
        self._answer_formats = answer_formats
        self._vocab_size = vocab_size
        self._why_no_chat = why_no_chat

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        may_be_empty: bool = False,
        field: str = "prompt",
    ) -> list[int]:
        """Return the token ids of a text, as a prompt of it would have them.

        `may_be_empty`: it is no prompt. `field`: what errors call it.
        """
        tokenizer = self._tokenizer
        if text or not may_be_empty:
            self._admission.check_text(text, field)
        if add_special_tokens:
            encode = tokenizer.encode
        elif isinstance(tokenizer, PlainTokenizer):
            encode = tokenizer.encode_plain
        else:
            raise ValidationError(
                f"add_special_tokens must be true: {type(tokenizer).__name__} has no encode_plain",
                field="add_special_tokens",
            )
        if len(text) <= MAX_INLINE_CHARACTERS:
            return encode(text)
        return await asyncio.to_thread(encode, text)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids, of special ones their names or nothing."""
        tokenizer = self._tokenizer
        if skip_special_tokens:
            decode = tokenizer.decode
        elif isinstance(tokenizer, SpellingTokenizer):
            decode = tokenizer.decode_with_special
        else:
            raise ValidationError(
                f"skip_special_tokens must be true: {type(tokenizer).__name__} has no "
                "decode_with_special",
                field="skip_special_tokens",
            )
        limit = self._admission.max_model_len
        if len(token_ids) > limit:
            raise ValidationError(
                f"token_ids must have at most max_model_len ({limit}) entries, "
                f"got {len(token_ids)}",
                field="token_ids",
            )
        tokens = [self._check_id(token_id) for token_id in token_ids]
        if len(tokens) <= MAX_INLINE_TOKENS:
            return decode(tokens)
        return await asyncio.to_thread(decode, tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token stands for, those of U+FFFD where it has no text alone."""
        token_id = self._check_id(token_id)
        if isinstance(self._tokenizer, ByteTokenizer):
            return self._tokenizer.token_bytes(token_id)
        return self._tokenizer.decode([token_id]).encode()

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        reasoning_effort: ReasoningEffort | None = None,
        thinking: ThinkingWish | None = None,
    ) -> ChatPrompt:
        """Return a conversation as a prompt. The text has its own BOS where the model wants one.

        Raises ValidationError if the model has no template, or its template no place for tools,
        tool calls, a variable or an effort, and for a last message that cannot be gone on with.
        """
        template = self._template
        if template is None:
            raise ValidationError(self._why_no_chat, field="messages")
        if not messages:
            raise ValidationError("messages must not be empty", field="messages")
        # On another thread: a template is a program, it takes its time.
        return await asyncio.to_thread(
            self._render,
            template,
            messages,
            tools or None,
            chat_template_kwargs or {},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            reasoning_effort=reasoning_effort,
            thinking=thinking,
        )

    def _render(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        reasoning_effort: ReasoningEffort | None,
        thinking: ThinkingWish | None,
    ) -> ChatPrompt:
        check_continued(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        check_template_kwargs(variables)
        template.check_variables(variables)
        if reasoning_effort is not None:
            variables = with_effort(variables, reasoning_effort, template.variables)
        if thinking is not None:
            variables = with_wish(variables, thinking, template.variables)
        self._check_size(messages, tools)
        known = template_messages(messages)
        check_tools(tools or ())
        formats = self._answer_formats
        if tools and formats is not None and formats.has_channels:
            tools = described(tools)  # gpt-oss's template reads it whether it is there or not
        opens = (
            not continue_final_message if add_generation_prompt is None else add_generation_prompt
        )
        render: Callable[..., str] = functools.partial(
            template.render, add_generation_prompt=opens, variables=variables
        )
        if continue_final_message:
            render = functools.partial(up_to_the_end_of_the_last, render)
        told = ToldTools(template, None if formats is None else formats.calls)
        said, told_to_it = told.rewritten(known, tools)
        text = render(said, tools=told_to_it)
        if tools and text == render(told.rewritten(known, None).messages):
            # They would be ignored without a word.
            raise ValidationError(
                "the model's chat template has no place for tools, and --tool-call-parser no "
                "format that calls could be asked for in",
                field="tools",
            )
        if hides_tool_calls(functools.partial(render, tools=told_to_it), said, text):
            raise ValidationError(
                "the model's chat template has no place for tool calls", field="messages"
            )
        self._admission.check_text(text)
        tokenizer = self._tokenizer
        encode = (
            tokenizer.encode_plain if isinstance(tokenizer, PlainTokenizer) else tokenizer.encode
        )
        answer = None
        if formats is not None:
            continued = str(known[-1]["content"]) if continue_final_message else None
            answer = formats.of(text, messages=known, tools=tools or (), continued=continued)
        form_ids = encode(answer.form_opening) if answer and answer.form_opening else ()
        return ChatPrompt(text, encode(text), answer, form_ids)

    def _check_size(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
    ) -> None:
        """Refuse what is longer than any prompt before the template sees it."""
        for name, count, most in (
            ("messages", len(messages), MAX_MESSAGES),
            ("tools", len(tools or ()), MAX_TOOLS),
        ):
            if count > most:
                raise ValidationError(
                    f"{name} must have at most {most} entries, got {count}", field=name
                )
        limit = self._admission.max_text_bytes
        for field, values in (("messages", messages), ("tools", tools or ())):
            size = 0
            for value in values:  # one by one: others get to run between them
                try:
                    text = json.dumps(value, ensure_ascii=False)
                except (TypeError, ValueError, RecursionError) as error:
                    raise ValidationError(
                        f"{field} must be JSON values: {error}", field=field
                    ) from None
                size += len(text.encode(errors="surrogatepass"))
                if size > limit:
                    raise ContextLengthError(
                        f"{field} have at least {size} bytes, at most {limit} are taken "
                        f"({MAX_BYTES_PER_TOKEN} for each of the max_model_len "
                        f"{self._admission.max_model_len} tokens)",
                        field=field,
                    )

    def _check_id(self, token_id: int) -> int:
        try:
            token = operator.index(token_id)
        except TypeError as error:
            raise ValidationError(
                f"token ids must be integers: {error}", field="token_ids"
            ) from None
        if not 0 <= token < self._vocab_size:
            raise ValidationError(
                f"token ids must be 0 to {self._vocab_size - 1}, got {token}", field="token_ids"
            )
        return token
