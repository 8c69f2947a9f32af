"""SentencePiece models: trained here, or put together piece by piece."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2

from compute_plane.model.sentence_pieces import BYTE_PIECES, sentence_pieces_json
from compute_plane.model.tokenizer_json import BYTE, CONTROL, NORMAL, UNKNOWN

TEXTS = [
    *["Hello, world! The quick brown fox jumps over the lazy dog."] * 8,
    *["def f(x):\n    return {'a': [1, 2, 3]}\n\n\tif x:  # code        "] * 4,
    *["In 2024 there were 365 days, 12 months and 007; 3.14159 == ----- =====."] * 4,
    *["你好,世界!人工智能正在改变世界。日本語のテキストもあります。", "naïve café — “quotes” … ½"]
    * 4,
    "👩‍👩‍👧‍👦 👍🏽 emoji of one sentence alone",
]
USER_DEFINED_SYMBOL = "<tool>"
CONTROL_SYMBOL = "[INST]"
FIRST_BYTE = 5
"""Id of <0x00> in a trained model: behind the usual three and the two symbols above."""


@dataclass(frozen=True)
class PieceModel:
    """One model: SentencePiece's own reading, and what a GGUF file has of it.

    `types`, `scores`: by token id.
    """

    theirs: SentencePieceProcessor
    tokens: list[str]
    types: list[int]
    scores: list[float]
    adds_space: bool

    def tokenizer_json(self) -> bytes:
        vocab = {token: index for index, token in enumerate(self.tokens)}
        return sentence_pieces_json(
            Path("m.gguf"), vocab, self.types, self.scores, adds_space=self.adds_space
        )


def _read(serialized: bytes) -> PieceModel:
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(serialized)
    return PieceModel(
        SentencePieceProcessor(model_proto=serialized),
        [piece.piece for piece in proto.pieces],
        [piece.type for piece in proto.pieces],
        [piece.score for piece in proto.pieces],
        proto.normalizer_spec.add_dummy_prefix,
    )


def trained(*, adds_space: bool = True, vocab_size: int = 600) -> PieceModel:
    """Train as Llama 2's and Mistral's tokenizers were; rare characters become bytes."""
    serialized = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=serialized,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=adds_space,
        user_defined_symbols=[USER_DEFINED_SYMBOL],
        control_symbols=[CONTROL_SYMBOL],
        num_threads=1,
        minloglevel=2,
    )
    return _read(serialized.getvalue())


def assembled(pieces: Iterable[tuple[str, float]]) -> PieceModel:
    """Put a model together of normal pieces and their scores, behind the usual 259."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.remove_extra_whitespaces = False
    usual = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    usual += [(piece, BYTE) for piece in BYTE_PIECES]
    for text, kind in usual:
        proto.pieces.add(piece=text, score=0, type=kind)
    for text, score in pieces:
        proto.pieces.add(piece=text, score=score, type=NORMAL)
    return _read(proto.SerializeToString())
