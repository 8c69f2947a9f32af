"""The tokenizer of a GGUF file, rewritten as a tokenizer.json."""

from __future__ import annotations

import json

from compute_plane.model.assets import MAX_MODEL_NAME_BYTES, MAX_TEMPLATE_BYTES, ModelAssets
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.gguf_header import GgufFile
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.pre_tokenizers import WORD_SPLITS, WordSplit
from compute_plane.model.spec import ModelSpec

MODEL = "gpt2"  # what GGUF calls byte-level BPE, whichever model it belongs to

# Token types of GGUF.
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4

# Control tokens by which chat and base models end their text. A GGUF file names one end token, but
# a model may emit another: chat models fall back on the end of their pre-training documents.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
)
END_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)


def read_gguf_assets(file: GgufFile, spec: ModelSpec) -> ModelAssets:
    """Return the text side of a model in a GGUF file.

    Token ids are those of the tokenizer.json that the model was published with. Raises
    ModelFileError for a vocabulary that contradicts itself, UnsupportedModelError for a tokenizer
    that is no byte-level BPE of a known way of cutting words.
    """
    keys = GgufMetadata(file)
    split = _word_split(file, keys)
    tokens = _tokens(file, keys, spec)
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise ModelFileError(file.path, f"token {printable(twice)!r} is in the vocabulary twice")
    types = _types(file, keys, len(tokens))
    bos = _token_id(file, keys, "tokenizer.ggml.bos_token_id", len(tokens))
    add_bos = keys.boolean("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = split.adds_bos and bos is not None
    if add_bos and bos is None:
        raise ModelFileError(
            file.path, "tokenizer.ggml.add_bos_token is set, but tokenizer.ggml.bos_token_id is not"
        )
    return ModelAssets(
        tokenizer_json=_tokenizer_json(split, vocab, types, _merges(file, keys, vocab)),
        chat_template=keys.text("tokenizer.chat_template", MAX_TEMPLATE_BYTES) or "",
        bos_token_id=bos,
        eos_token_ids=_end_tokens(file, keys, vocab, types),
        pad_token_id=_token_id(file, keys, "tokenizer.ggml.padding_token_id", len(tokens)),
        add_bos_token=add_bos,
        context_length=spec.context_length,
        model_name=spec.name[:MAX_MODEL_NAME_BYTES],
    )


def _word_split(file: GgufFile, keys: GgufMetadata) -> WordSplit:
    model = keys.require_text("tokenizer.ggml.model")
    if model != MODEL:
        raise UnsupportedModelError(
            file.path,
            f"tokenizer {printable(model)} is not supported; supported is {MODEL} (byte-level BPE)",
        )
    kind = keys.require_text("tokenizer.ggml.pre")
    split = WORD_SPLITS.get(kind)
    if split is None:
        raise UnsupportedModelError(
            file.path,
            f"pre-tokenizer {printable(kind)} is not supported; supported are "
            f"{', '.join(sorted(WORD_SPLITS))}",
        )
    for key in ("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_eos_token"):
        if keys.boolean(key):
            raise UnsupportedModelError(file.path, f"{key} = true is not supported")
    return split


def _tokens(file: GgufFile, keys: GgufMetadata, spec: ModelSpec) -> list[str]:
    tokens = keys.texts("tokenizer.ggml.tokens", max_count=spec.vocab_size)
    if tokens is None:
        raise ModelFileError(file.path, "key tokenizer.ggml.tokens is missing")
    if len(tokens) != spec.vocab_size:
        raise ModelFileError(
            file.path,
            f"the vocabulary has {len(tokens)} tokens, the embedding {spec.vocab_size} rows",
        )
    if "" in tokens:
        raise ModelFileError(file.path, f"token {tokens.index('')} is empty")
    return tokens


def _types(file: GgufFile, keys: GgufMetadata, num_tokens: int) -> list[int]:
    types = keys.integers("tokenizer.ggml.token_type", max_count=num_tokens)
    if types is None:
        raise ModelFileError(file.path, "key tokenizer.ggml.token_type is missing")
    if len(types) != num_tokens:
        raise ModelFileError(
            file.path, f"{num_tokens} tokens, but tokenizer.ggml.token_type has {len(types)}"
        )
    return [int(code) for code in types.tolist()]


def _merges(file: GgufFile, keys: GgufMetadata, vocab: dict[str, int]) -> list[str]:
    """Return the merges, "left right" each, every one checked to join two tokens to a third."""
    merges = keys.texts("tokenizer.ggml.merges", max_count=4 * len(vocab))
    if merges is None:
        raise ModelFileError(file.path, "key tokenizer.ggml.merges is missing")
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelFileError(
                file.path,
                f"merge {index} ({printable(merge)!r}) does not join two tokens to a third",
            )
    return merges


def _token_id(file: GgufFile, keys: GgufMetadata, key: str, num_tokens: int) -> int | None:
    token = keys.integer(key)
    if token is not None and not 0 <= token < num_tokens:
        raise ModelFileError(file.path, f"{key} must be below {num_tokens}, got {token}")
    return token


def _end_tokens(
    file: GgufFile, keys: GgufMetadata, vocab: dict[str, int], types: list[int]
) -> tuple[int, ...]:
    """Return every token that ends a generation: those the file names, then the well-known ones."""
    named = [_token_id(file, keys, key, len(vocab)) for key in END_KEYS]
    known = [vocab[token] for token in END_TOKENS if token in vocab]
    ends = [token for token in named if token is not None]
    ends += [token for token in known if types[token] == CONTROL]
    return tuple(dict.fromkeys(ends))


def _tokenizer_json(
    split: WordSplit, vocab: dict[str, int], types: list[int], merges: list[str]
) -> bytes:
    """Return the bytes of a tokenizer.json."""
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[index] != USER_DEFINED,
        }
        for token, index in vocab.items()
        if types[index] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": split.normalizer,
        "pre_tokenizer": split.pre_tokenizer,
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split.ignore_merges,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
