"""The tokenizer of a GGUF file, rewritten as a tokenizer.json."""

from __future__ import annotations

from compute_plane.model.assets import MAX_MODEL_NAME_BYTES, MAX_TEMPLATE_BYTES, ModelAssets
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.gguf_header import GgufFile
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.pre_tokenizers import WORD_SPLITS, WordSplit
from compute_plane.model.sentence_pieces import merged_pieces_json, sentence_pieces_json
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tokenizer_json import CONTROL, USER_DEFINED, Json, tokenizer_json

# What GGUF calls two kinds of tokenizers, whichever models they belong to, and Gemma 4's.
BYTE_LEVEL = "gpt2"
SENTENCE_PIECE = "llama"
MERGED_PIECES = "gemma4"
SENTENCE_PIECE_BOS = "<s>"

# Control tokens by which chat and base models end their text. A GGUF file names one end token, but
# a model may emit another: chat models fall back on the end of their pre-training documents.
END_TOKENS = (
    "</s>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<|observation|>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
)
OF_CHANNELS = ("<|return|>", "<|call|>")
"""End answers in channels (gpt-oss), whose messages end by `<|end|>`: that ends none of them."""
MESSAGE_END = "<|end|>"
END_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)


def read_gguf_assets(file: GgufFile, spec: ModelSpec) -> ModelAssets:
    """Return the text side of a model in a GGUF file.

    Token ids are those of the tokenizer.json that the model was published with. Raises
    ModelFileError for a vocabulary that contradicts itself, UnsupportedModelError for a tokenizer
    that is neither byte-level BPE of a known way of cutting words nor SentencePiece's BPE, by
    scores or, as Gemma 4's, by merges.
    """
    keys = GgufMetadata(file)
    model = _checked_model(file, keys)
    split = _word_split(file, keys) if model == BYTE_LEVEL else None
    tokens = _tokens(file, keys, spec)
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise ModelFileError(file.path, f"token {printable(twice)!r} is in the vocabulary twice")
    types = _types(file, keys, len(tokens))
    bos = _token_id(file, keys, "tokenizer.ggml.bos_token_id", len(tokens))
    add_bos = keys.boolean("tokenizer.ggml.add_bos_token")
    if bos is None and model == SENTENCE_PIECE and SENTENCE_PIECE_BOS in vocab:
        bos = vocab[SENTENCE_PIECE_BOS]
    if model == MERGED_PIECES:
        add_bos = bos is not None  # early converters wrote that Gemma 4's texts begin with none
    if add_bos is None:
        add_bos = (split is None or split.adds_bos) and bos is not None
    if add_bos and bos is None:
        raise ModelFileError(
            file.path, "tokenizer.ggml.add_bos_token is set, but tokenizer.ggml.bos_token_id is not"
        )
    if split is not None:
        document = _of_byte_level(split, vocab, types, _merges(file, keys, vocab))
    elif model == MERGED_PIECES:
        document = merged_pieces_json(file.path, vocab, types, _merges(file, keys, vocab))
    else:
        document = _of_sentence_pieces(file, keys, vocab, types)
    return ModelAssets(
        tokenizer_json=document,
        chat_template=keys.text("tokenizer.chat_template", MAX_TEMPLATE_BYTES) or "",
        bos_token_id=bos,
        eos_token_ids=_end_tokens(file, keys, vocab, types),
        pad_token_id=_token_id(file, keys, "tokenizer.ggml.padding_token_id", len(tokens)),
        add_bos_token=add_bos,
        model_name=spec.name[:MAX_MODEL_NAME_BYTES],
        text_end_token_ids=_text_end(file, keys, len(tokens)),
    )


def _checked_model(file: GgufFile, keys: GgufMetadata) -> str:
    """Return what kind of tokenizer it is."""
    model = keys.require_text("tokenizer.ggml.model")
    if model not in (BYTE_LEVEL, SENTENCE_PIECE, MERGED_PIECES):
        raise UnsupportedModelError(
            file.path,
            f"tokenizer {printable(model)} is not supported; supported are {BYTE_LEVEL} "
            f"(byte-level BPE), {SENTENCE_PIECE} (SentencePiece's BPE) and {MERGED_PIECES} "
            "(the same by merges)",
        )
    refused = ["remove_extra_whitespaces"]
    if model != SENTENCE_PIECE:
        refused.append("add_space_prefix")
    for key in refused:
        if keys.boolean(f"tokenizer.ggml.{key}"):
            raise UnsupportedModelError(file.path, f"tokenizer.ggml.{key} = true is not supported")
    if model != BYTE_LEVEL and keys.has("tokenizer.ggml.precompiled_charsmap"):
        raise UnsupportedModelError(
            file.path, "tokenizer.ggml.precompiled_charsmap is not supported"
        )
    return model


def _word_split(file: GgufFile, keys: GgufMetadata) -> WordSplit:
    """Return how a byte-level tokenizer cuts words."""
    kind = keys.require_text("tokenizer.ggml.pre")
    split = WORD_SPLITS.get(kind)
    if split is None:
        raise UnsupportedModelError(
            file.path,
            f"pre-tokenizer {printable(kind)} is not supported; supported are "
            f"{', '.join(sorted(WORD_SPLITS))}",
        )
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


def _text_end(file: GgufFile, keys: GgufMetadata, num_tokens: int) -> tuple[int, ...]:
    """Return what encoding puts behind a text."""
    if not keys.boolean("tokenizer.ggml.add_eos_token"):
        return ()
    token = _token_id(file, keys, END_KEYS[0], num_tokens)
    if token is None:
        raise ModelFileError(
            file.path, f"tokenizer.ggml.add_eos_token is set, but {END_KEYS[0]} is not"
        )
    return (token,)


def _end_tokens(
    file: GgufFile, keys: GgufMetadata, vocab: dict[str, int], types: list[int]
) -> tuple[int, ...]:
    """Return every token that ends a generation: those the file names, then the well-known ones."""
    named = [_token_id(file, keys, key, len(vocab)) for key in END_KEYS]
    tokens: tuple[str, ...] = END_TOKENS
    no_end = None
    if all(token in vocab for token in OF_CHANNELS):
        tokens, no_end = (*OF_CHANNELS, *END_TOKENS), vocab.get(MESSAGE_END)
    known = [vocab[token] for token in tokens if token in vocab]
    ends = [token for token in named if token is not None]
    # Converters call tokens that were added for chat user-defined ones.
    ends += [token for token in known if types[token] in (CONTROL, USER_DEFINED)]
    return tuple(token for token in dict.fromkeys(ends) if token != no_end)


def _of_byte_level(
    split: WordSplit, vocab: dict[str, int], types: list[int], merges: list[str]
) -> bytes:
    """Return the bytes of a tokenizer.json."""
    decoder: Json = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    return tokenizer_json(
        vocab,
        types,
        normalizer=split.normalizer,
        pre_tokenizer=split.pre_tokenizer,
        decoder=decoder,
        bpe={"ignore_merges": split.ignore_merges, "merges": merges},
    )


def _of_sentence_pieces(
    file: GgufFile, keys: GgufMetadata, vocab: dict[str, int], types: list[int]
) -> bytes:
    """Return the bytes of a tokenizer.json. Merges in the file are of no account, scores are."""
    scores = keys.numbers("tokenizer.ggml.scores", max_count=len(vocab))
    if scores is None:
        raise ModelFileError(file.path, "key tokenizer.ggml.scores is missing")
    if len(scores) != len(vocab):
        raise ModelFileError(
            file.path, f"{len(vocab)} tokens, but tokenizer.ggml.scores has {len(scores)}"
        )
    adds_space = keys.boolean("tokenizer.ggml.add_space_prefix")
    return sentence_pieces_json(
        file.path, vocab, types, scores.tolist(), adds_space=adds_space is not False
    )
