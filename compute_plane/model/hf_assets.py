"""The text side of a model in a Hugging Face directory: tokenizer, template, special ids."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from compute_plane.model.assets import MAX_TEMPLATE_BYTES, ModelAssets
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.json_file import JsonObject, read_bounded, read_text
from compute_plane.model.spec import ModelSpec

TOKENIZER = "tokenizer.json"
SENTENCE_PIECES = "tokenizer.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
DEFAULT_TEMPLATE = "default"
ANY_TEXT = "a"

MAX_TOKENIZER_BYTES = 128 << 20
MAX_TOKENIZER_CONFIG_BYTES = 4 << 20


def read_hf_assets(directory: Path, config: JsonObject, spec: ModelSpec) -> ModelAssets:
    """Return the text side of a model in a directory; `config` is its config.json.

    A generation ends at any id of generation_config.json (config.json, if that names none) and at
    the end token of tokenizer_config.json. Raises ModelFileError naming the file at fault,
    UnsupportedModelError for a SentencePiece model alone.
    """
    path = directory / TOKENIZER
    if not path.exists() and (directory / SENTENCE_PIECES).exists():
        raise UnsupportedModelError(
            directory / SENTENCE_PIECES,
            f"a SentencePiece model is not read from a directory: it needs a {TOKENIZER} beside "
            "it (or take a GGUF file of the model)",
        )
    tokenizer_json = read_bounded(path, MAX_TOKENIZER_BYTES)
    tokenizer_json, tokenizer = _parse(path, tokenizer_json, spec)
    settings = _optional(directory / TOKENIZER_CONFIG, MAX_TOKENIZER_CONFIG_BYTES)
    generation = _optional(directory / GENERATION_CONFIG)

    def special(kind: str) -> int | None:
        """Return the tokenizer's own token, else the id that generation or the model names."""
        own = _token_of(settings, f"{kind}_token", tokenizer)
        ids = [own] if own is not None else []
        for document in (generation, config):
            ids += _ids(document, f"{kind}_token_id", spec)
        return ids[0] if ids else None

    ends = _ids(generation, "eos_token_id", spec) or _ids(config, "eos_token_id", spec)
    own_end = _token_of(settings, "eos_token", tokenizer)
    if own_end is not None:
        ends.append(own_end)
    bos = special("bos")
    first, last = _around(tokenizer)
    return ModelAssets(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(directory, settings),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        pad_token_id=special("pad"),
        add_bos_token=_adds_bos(settings, first, bos),
        model_name=spec.name,
        text_end_token_ids=_text_end(settings, last, own_end),
    )


def _optional(path: Path, max_bytes: int = 1 << 20) -> JsonObject:
    """Read a JSON file that need not be there."""
    return JsonObject.read(path, max_bytes) if path.is_file() else JsonObject(path, {})


def _parse(path: Path, content: bytes, spec: ModelSpec) -> tuple[bytes, Tokenizer]:
    """Read the tokenizer once to know that the control plane can, and that its ids have logits.

    Added tokens without logits are left out: text models of a family have those of its images
    (Gemma 3). Returns the tokenizer as it is handed on, too.
    """
    tokenizer = _read(path, content)
    token, highest = _highest(path, tokenizer)
    if highest >= spec.vocab_size:
        content = _without_added_beyond(content, spec.vocab_size)
        tokenizer = _read(path, content)
        token, highest = _highest(path, tokenizer)
    if highest >= spec.vocab_size:
        raise ModelFileError(
            path,
            f"token {printable(token)!r} has id {highest}, the model has {spec.vocab_size} logits",
        )
    return content, tokenizer


def _read(path: Path, content: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # noqa: BLE001 - the library raises nothing more specific
        raise ModelFileError(
            path, f"not a tokenizer the library can read: {printable(str(error))}"
        ) from None


def _highest(path: Path, tokenizer: Tokenizer) -> tuple[str, int]:
    """Return the token with the highest id, and the id."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise ModelFileError(path, "the vocabulary is empty")
    return max(vocab.items(), key=lambda item: item[1])


def _without_added_beyond(content: bytes, vocab_size: int) -> bytes:
    """Return a tokenizer.json, which can be read, without added tokens that have no logits."""
    document = json.loads(content)
    added = document.get("added_tokens") or []
    document["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _token_of(settings: JsonObject, key: str, tokenizer: Tokenizer) -> int | None:
    """Return the id of a token named in tokenizer_config.json, as text or as an object."""
    value = settings.raw(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str):
        raise ModelFileError(settings.path, f"{key} must be a string, got {printable(repr(value))}")
    token = tokenizer.token_to_id(value)
    if token is None:
        raise ModelFileError(settings.path, f"{key} {printable(value)!r} is not in the vocabulary")
    return token


def _ids(document: JsonObject, key: str, spec: ModelSpec) -> list[int]:
    """Return the id or ids of a key; -1 and null mean none."""
    value = document.raw(key)
    ids = value if isinstance(value, list) else [] if value is None or value == -1 else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < spec.vocab_size:
            raise ModelFileError(
                document.path,
                f"{key} must be below {spec.vocab_size}, got {printable(repr(token))}",
            )
    return list(ids)


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that the post-processor puts in front of a text and behind it."""
    plain = tokenizer.encode(ANY_TEXT, add_special_tokens=False).ids
    whole = tokenizer.encode(ANY_TEXT).ids
    for first in range(len(whole) - len(plain) + 1):
        if plain and whole[first : first + len(plain)] == plain:
            return whole[:first], whole[first + len(plain) :]
    return tokenizer.encode("").ids, []  # nobody can tell: the text has no token


def _text_end(settings: JsonObject, last: list[int], end: int | None) -> tuple[int, ...]:
    """Return what encoding puts behind a text: as the tokenizer does, or else the settings say.

    transformers makes a post-processor of the settings where the file has none.
    """
    if last or not settings.boolean("add_eos_token"):
        return tuple(last)
    if end is None:
        raise ModelFileError(settings.path, "add_eos_token is true, but there is no EOS token")
    return (end,)


def _adds_bos(settings: JsonObject, first: list[int], bos: int | None) -> bool:
    """Tell whether encoding puts BOS in front: as the settings say, else as the tokenizer does."""
    declared = settings.boolean("add_bos_token")
    if declared is None:
        return bos is not None and first[:1] == [bos]
    if declared and bos is None:
        raise ModelFileError(settings.path, "add_bos_token is true, but there is no BOS token")
    return declared


def _chat_template(directory: Path, settings: JsonObject) -> str:
    """Return the template: its own file, else tokenizer_config.json's, which may have several."""
    path = directory / CHAT_TEMPLATE
    if path.is_file():
        return read_text(path, MAX_TEMPLATE_BYTES)
    template = settings.raw("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        template = named.get(DEFAULT_TEMPLATE)
    if template is None:
        return ""
    if not isinstance(template, str):
        raise ModelFileError(settings.path, "chat_template must be a string or a list of objects")
    if len(template.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
        raise ModelFileError(settings.path, f"chat_template exceeds {MAX_TEMPLATE_BYTES} bytes")
    return template
