"""The bytes of a tokenizer.json, from a vocabulary whose tokens have types."""

from __future__ import annotations

import json

Json = dict[str, object]

# Token types of SentencePiece, which GGUF files have for every kind of tokenizer.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6


def tokenizer_json(
    vocab: dict[str, int],
    types: list[int],
    *,
    normalizer: Json | None,
    pre_tokenizer: Json | None,
    decoder: Json,
    bpe: Json,
) -> bytes:
    """Return a tokenizer.json without a post-processor; tokens have the ids of `vocab`.

    `types`: by token id. Tokens that text is never cut into, but may spell out as they stand, are
    added ones. `bpe`: what the model has beside the vocabulary and the settings all have in common.
    """
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
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            **bpe,
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
