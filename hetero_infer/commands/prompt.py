"""The prompt of one generation: from `--input`, or from what is piped into standard input."""

from __future__ import annotations

import sys
from typing import BinaryIO

from control_plane.text.tokenizer import MAX_BYTES_PER_TOKEN
from hetero_infer.config import Settings
from hetero_infer.generation_config import GenerationConfig
from planes.errors import ValidationError

NOTHING_TO_DO = "nothing to do: give --input TEXT, or `serve`; --help shows everything"


def prompt_of(settings: Settings, generation: GenerationConfig, *, max_model_len: int) -> str:
    """Return the prompt.

    Raises ValidationError without one, for one that is no text, and for one from standard input
    that is longer than any prompt of `max_model_len` tokens.
    """
    prompt = generation.input
    if prompt is None and settings.gives("input"):
        raise ValidationError("input must not be empty, got ''", field="input")
    if prompt is None:
        return _from_stdin(max_model_len * MAX_BYTES_PER_TOKEN)
    try:
        # A locale without UTF-8 makes single surrogates of bytes.
        return prompt.encode(errors="surrogateescape").decode()
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise ValidationError(
            f"input is not valid UTF-8 (at byte {error.start})", field="input"
        ) from None


def _from_stdin(max_bytes: int) -> str:
    """Return what is piped in, without the line end that `echo` adds. Raises ValidationError."""
    stdin = sys.stdin
    if stdin is None or stdin.closed or stdin.isatty():
        raise ValidationError(NOTHING_TO_DO, field="input")
    stream: BinaryIO = stdin.buffer
    try:
        data = stream.read(max_bytes + 1)
    except OSError as error:
        raise ValidationError(
            f"standard input cannot be read: {error.strerror}", field="input"
        ) from None
    if len(data) > max_bytes:
        raise ValidationError(
            f"the prompt from standard input must have at most {max_bytes} bytes "
            f"({MAX_BYTES_PER_TOKEN} for each token of --max-model-len), got more",
            field="input",
        )
    try:
        prompt = data.decode()
    except UnicodeDecodeError as error:
        raise ValidationError(
            f"standard input is not valid UTF-8 (at byte {error.start})", field="input"
        ) from None
    prompt = prompt.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise ValidationError(
            "standard input is empty: give --input TEXT, or `serve`; --help shows everything",
            field="input",
        )
    return prompt
