"""SentencePiece's BPE vocabularies, rewritten as a tokenizer.json.

Text becomes pieces as SentencePiece does it (Kudo and Richardson 2018): spaces are spelled U+2581,
one more is put in front of the text, and of two neighbours whose joined text is a piece, those are
joined first whose piece has the highest score, the leftmost first where it can be joined twice.
(Different pieces of one score go by their ids, not from the left: see `_merges`.) A character that
is no piece becomes the bytes of its UTF-8. The library has no scores but a list of merges, best
first: every way of cutting a piece into two other ones, in the order of the pieces' scores.

Text between special tokens is text of its own, with a space in front: so do the tokenizer.json
files that such models are published with, and llama.cpp.

Gemma 4's files have the list of merges itself, and no space in front. Their scores say nothing.
"""

from __future__ import annotations

from pathlib import Path

from compute_plane.model.errors import ModelFileError, printable
from compute_plane.model.tokenizer_json import BYTE, NORMAL, UNKNOWN, Json, tokenizer_json

TOKENS_KEY = "tokenizer.ggml.tokens"
TYPES_KEY = "tokenizer.ggml.token_type"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
MAX_PIECE_CHARACTERS = 1024
"""The ways of cutting a piece are tried one by one; pieces have 16 characters, 64 at most."""


def sentence_pieces_json(
    path: Path,
    vocab: dict[str, int],
    types: list[int],
    scores: list[float],
    *,
    adds_space: bool,
) -> bytes:
    """Return the bytes of a tokenizer.json.

    `types`, `scores`: by token id. `adds_space`: a text has one more space in front, which decoding
    takes away. Raises ModelFileError for a vocabulary that cannot spell every byte.
    """
    _check_bytes(path, vocab, types)
    merges = _merges(path, vocab, types, scores)
    return _pieces_json(vocab, types, merges, adds_space=adds_space)


def merged_pieces_json(
    path: Path, vocab: dict[str, int], types: list[int], merges: list[str]
) -> bytes:
    """Return the bytes of a tokenizer.json; `merges`: "left right" each, best first.

    Raises ModelFileError for a vocabulary that cannot spell every byte.
    """
    _check_bytes(path, vocab, types)
    pairs = [merge.split(" ", 1) for merge in merges]
    return _pieces_json(vocab, types, pairs, adds_space=False)


def _pieces_json(
    vocab: dict[str, int], types: list[int], merges: list[list[str]], *, adds_space: bool
) -> bytes:
    unknown = [token for token, index in vocab.items() if types[index] == UNKNOWN]
    spell: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    speak: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        spell.insert(0, {"type": "Prepend", "prepend": SPACE})
        speak.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return tokenizer_json(
        vocab,
        types,
        normalizer={"type": "Sequence", "normalizers": spell},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": speak},
        bpe={
            "unk_token": unknown[0] if unknown else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": merges,
        },
    )


def _check_bytes(path: Path, vocab: dict[str, int], types: list[int]) -> None:
    for piece in BYTE_PIECES:
        if piece not in vocab:
            raise ModelFileError(
                path, f"{TOKENS_KEY}: no token {piece}, so not every text has tokens"
            )
        kind = types[vocab[piece]]
        if kind != BYTE:
            raise ModelFileError(
                path, f"{TYPES_KEY}: token {piece} must be of type {BYTE} (byte), got {kind}"
            )
    others = [token for token, index in vocab.items() if types[index] == BYTE]
    others = sorted(set(others).difference(BYTE_PIECES))
    if others:
        raise ModelFileError(
            path, f"{TYPES_KEY}: token {printable(others[0])!r} must not be of type {BYTE} (byte)"
        )


def _merges(
    path: Path, vocab: dict[str, int], types: list[int], scores: list[float]
) -> list[list[str]]:
    """Return [left, right] of every merge, best first; pieces of one score in the order of ids.

    Some converters know no scores and give all pieces the same one: such vocabularies list their
    pieces best first. Which of a piece's cuts comes first makes no difference (tested).
    """
    normal = {token: index for token, index in vocab.items() if types[index] == NORMAL}
    longest = max(map(len, normal), default=0)
    if longest > MAX_PIECE_CHARACTERS:
        index = next(i for token, i in normal.items() if len(token) == longest)
        raise ModelFileError(
            path,
            f"{TOKENS_KEY}: token {index} must have at most {MAX_PIECE_CHARACTERS} characters, "
            f"got {longest}",
        )
    merges: list[list[str]] = []
    for token in sorted(normal, key=lambda token: (-scores[normal[token]], normal[token])):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                merges.append([left, right])
    return merges
