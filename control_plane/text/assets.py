"""The model's text side, as the compute plane hands it over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from control_plane.text.chat_template import ChatTemplate
from control_plane.text.huggingface_tokenizer import (
    HuggingFaceTokenizer,
    load_huggingface_tokenizer,
)
from control_plane.text.simple_tokenizer import SimpleTokenizer
from control_plane.text.tokenizer import Tokenizer
from planes.errors import TokenizationError


@dataclass(frozen=True, slots=True)
class ModelAssets:
    """Tokenizer data, chat template and special ids.

    Exactly one of `tokenizer_json` and `simple_vocab_size` is set. `chat_template` is Jinja2
    source, None where the model has none. `text_end_token_ids`: what comes behind a text of which
    an embedding is made.
    """

    model_name: str
    tokenizer_json: bytes | None = None
    simple_vocab_size: int | None = None
    chat_template: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    add_bos_token: bool = False
    text_end_token_ids: tuple[int, ...] = ()


def make_tokenizer(assets: ModelAssets) -> Tokenizer:
    """Build the model's tokenizer. Raises TokenizationError."""
    if assets.tokenizer_json is not None:
        return load_huggingface_tokenizer(
            assets.tokenizer_json,
            bos_token_id=assets.bos_token_id,
            eos_token_id=assets.eos_token_ids[0] if assets.eos_token_ids else None,
            pad_token_id=assets.pad_token_id,
            add_bos_token=assets.add_bos_token,
        )
    if assets.simple_vocab_size is not None:
        return SimpleTokenizer(assets.simple_vocab_size)
    raise TokenizationError(f"model {assets.model_name} comes without a tokenizer")


def make_chat_template(
    assets: ModelAssets,
    tokenizer: Tokenizer,
    source: str | None,
    defaults: Mapping[str, object],
) -> ChatTemplate | None:
    """Compile the model's chat template, or `source` in its place; None if there is neither.

    `defaults`: variables for conversations that do not set them. Raises TokenizationError if it is
    no template.
    """
    source = source or assets.chat_template
    if not source:
        return None

    def name(token_id: int | None) -> str | None:
        if token_id is None or not isinstance(tokenizer, HuggingFaceTokenizer):
            return None
        return tokenizer.token_name(token_id)

    eos = assets.eos_token_ids[0] if assets.eos_token_ids else None
    return ChatTemplate(
        source, bos_token=name(assets.bos_token_id), eos_token=name(eos), defaults=defaults
    )
