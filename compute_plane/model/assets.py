"""What the control plane needs to know of a model: its tokenizer, its template, its special ids."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TEMPLATE_BYTES = 1 << 20
MAX_MODEL_NAME_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ModelAssets:
    """A model's text side, without its weights.

    `tokenizer_json`: a tokenizer.json as the `tokenizers` library reads it.
    `chat_template`: Jinja2 source, empty if the model has none.
    `eos_token_ids`: every token that ends a generation, the usual one first.
    `add_bos_token`: whether a prompt starts with `bos_token_id`. Whoever encodes puts it there and
    asks the library not to add special tokens; `bos_token_id` is then never None.
    `text_end_token_ids`: what the tokenizer puts behind a text that is not to be gone on with: one
    that an embedding is made of. Who encodes puts them there, too.
    All ids are below the width of the logits.
    """

    tokenizer_json: bytes
    chat_template: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    add_bos_token: bool
    model_name: str
    text_end_token_ids: tuple[int, ...] = ()
