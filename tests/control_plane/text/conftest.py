from __future__ import annotations

import pytest

TEXTS = [
    "Hello, world! The quick brown fox jumps over the lazy dog. " * 4,
    "def f(x):\n    return {'a': [1, 2, 3]}\n\n\tif x:  # code",
    "你好,世界!人工智能正在改变世界。日本語のテキストもあります。한국어",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 🏳️‍🌈 emoji",
    "မြန်မာဘာသာစကား ကမ္ဘာ",
    "naïve café — “quotes” … ½",
]


@pytest.fixture(scope="session")
def tokenizer_json():
    """A byte-level BPE whose merges cut characters of several scripts in the middle."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<plain added 你>", special=False)])
    return tokenizer.to_str().encode()


@pytest.fixture(scope="session")
def metaspace_json():
    """A tokenizer with byte fallback whose decoder is none that is read byte by byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz你,.!"]
    merges = [("▁", "a"), ("h", "e"), ("l", "l"), ("he", "ll")]
    pieces += [left + right for left, right in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer.to_str().encode()
