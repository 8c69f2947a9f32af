"""GGUF files name the way in which words are cut: tokens are llama.cpp's, which made the names up.

Pairs are merged across words here, so that every border of a word shows. Gemma 4's tokenizer has no
words, only runs of newlines stand alone. Runs where llama.cpp's program `llama-debug` is found.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from compute_plane.model.loader import load_model
from compute_plane.model.pre_tokenizers import WORD_SPLITS
from compute_plane.model.sentence_pieces import BYTE_PIECES
from compute_plane.model.tokenizer_json import BYTE, CONTROL, NORMAL, USER_DEFINED
from tests.compute_plane.model.llama_cpp import NEEDS_PROGRAM, run

TEXTS = (
    "Hello world, it's 12345 o'clock!  The   end.\n\n\tdef f(x): return x**2 # ok\r\n  'Twas we'll",
    "naïve café straße 北京大学 привет мир ñandú … “quotes” — dash they'VE I'm don't DON'T can'T",
    "a1b22c333d4444 3.14159 1,000,000 x_y-z @user #tag $5 100% (a)[b]{c}<d>",
    "  leading and trailing   \n \n\nnew\n\n\n lines\t\ttabs  ",
    "😀👍🏽 ½ ² ٣٤٥ 一二三 カタカナ ひらがな한국어",
    "!!!??? ... --- *** ///\\\\ ```code``` a.b.c a/b/c\n/x\n  /y",
    "北京 大学。 中文，abc「カタ」 「quoted」 ㄅㄆ ﹏ 가나 abc가ㄱ",
    "ΑΒγδ ǅ ƻ ʔ Ἀ ℵ ℂ ａｂｃ １２ ！？",
)
CAMELS = "CamelCaseWord HTTPServer iPhone XMLHttpRequest"
CAPITALS, COMPOSED_TEXT = "ÉCOLE ÀÈ", "e\u0301 combining, e\u0300x"
BY_LETTERS = ("gpt-4o", "kanana2", "minimax-m2", "tekken")
"""llama.cpp takes capitals for what is not a to z, so that É alone is a word."""
ONE_CASE = ("kimi-k2", "youtu")
"""llama.cpp knows no capitals here, and where they begin a word these models do."""
NUMBERS_WHOLE = ("deepseek-llm",)
"""llama.cpp leaves numbers whole, of which this tokenizer has but the digits."""
COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen")
"""Tokenizers of these compose characters first, which llama.cpp leaves out."""
SPECIALS = ["<s>", "</s>", "<unk>"]

pytestmark = [pytest.mark.slow, NEEDS_PROGRAM]


@pytest.fixture(scope="module")
def vocabulary() -> tuple[list[str], list[str]]:
    """Return tokens and merges, of pairs that are frequent in the texts whatever they are of."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return trained(tokenizer, SPECIALS, sorted(pre_tokenizers.ByteLevel.alphabet()))


def trained(
    tokenizer: Tokenizer, specials: list[str], alphabet: list[str]
) -> tuple[list[str], list[str]]:
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=alphabet,
        special_tokens=specials,
        show_progress=False,
    )
    texts = [*TEXTS, CAMELS, CAPITALS, COMPOSED_TEXT] * 5
    pieces = [text[at : at + 40] for text in texts for at in range(0, len(text), 17)]
    tokenizer.train_from_iterator(pieces, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


def write(
    path: Path, kind: str, tokens: list[str], merges: list[str], types: list[int] | None = None
) -> Path:
    """Write a model of nothing but zeros whose words are cut in a way.

    `types`: of the tokens of one that has pieces, not words.
    """
    size = 32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(size)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(size)
    if types is None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(kind)
        types = [CONTROL] * len(SPECIALS) + [NORMAL] * (len(tokens) - len(SPECIALS))
    else:
        writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    vectors = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = dict.fromkeys(vectors, (size,)) | {f"blk.0.{m}": (size, size) for m in matrices}
    shapes |= dict.fromkeys(("token_embd", "output"), (len(tokens), size))
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def texts_for(kind: str) -> list[str]:
    """Return what llama.cpp cuts as the tokenizer of the model does."""
    texts = list(TEXTS)
    if kind not in ONE_CASE:
        texts.append(CAMELS)
    if kind not in BY_LETTERS:
        texts.append(CAPITALS)
    if kind not in (*BY_LETTERS, *COMPOSED, "kimi-k2"):
        texts.append(COMPOSED_TEXT)
    if kind in NUMBERS_WHOLE:
        texts = [re.sub(r"\d+", "7", text) for text in texts]
    return texts


@pytest.mark.parametrize("kind", WORD_SPLITS)
def test_tokens_of_texts_are_those_of_llama_cpp(
    tmp_path: Path, vocabulary: tuple[list[str], list[str]], kind: str
) -> None:
    path = write(tmp_path / "model.gguf", kind, *vocabulary)
    tokenizer = Tokenizer.from_str(load_model(str(path)).assets.tokenizer_json.decode())
    for text in texts_for(kind):
        _, expected = run(path, text, tmp_path)
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected


def test_tokens_of_pieces_joined_by_merges_are_those_of_llama_cpp(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    tokens, merges = trained(tokenizer, [*SPECIALS, *BYTE_PIECES], [])
    tokens = [token for token in tokens if token not in "½ℵ😀"]  # and so bytes
    known = set(tokens)
    merges = [m for m in merges if known.issuperset((*m.split(" "), m.replace(" ", "")))]
    types = [NORMAL] * len(tokens)
    types[: len(SPECIALS)] = [CONTROL, CONTROL, USER_DEFINED]
    types[len(SPECIALS) : len(SPECIALS) + 256] = [BYTE] * 256
    path = write(tmp_path / "model.gguf", "gemma4", tokens, merges, types)
    ours = Tokenizer.from_str(load_model(str(path)).assets.tokenizer_json.decode())
    for text in [*TEXTS, CAMELS, CAPITALS, COMPOSED_TEXT, "a<unk>  b\n\n\n<unk>"]:
        _, expected = run(path, text, tmp_path)
        assert [tokens.index("<s>"), *ours.encode(text).ids] == expected
