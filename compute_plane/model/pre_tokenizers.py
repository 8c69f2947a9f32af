"""How text is cut into words before byte-level BPE, by the name GGUF files give each way.

A GGUF file only names the way (`tokenizer.ggml.pre`); what it means is the `pre_tokenizer` of the
tokenizer.json that the model was published with, stated here. Each was checked against the
patterns of llama.cpp.

`smollm`: every digit is a word of its own, cut off *first*; the GPT-2 pattern then runs on what
lies between. So in "a  12" the two spaces form one word. Running the GPT-2 pattern alone, as some
readers of GGUF files do, attaches the last space to the digits and gives other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

Json = dict[str, object]

_CL100K_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _CL100K_WORDS % r"\p{N}{1,3}"
_SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K_WORDS % r"\p{N}"
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED_WORDS % ("", "", r"\p{N}")
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = _CASED_WORDS % (_ENDINGS, _ENDINGS, r"\p{N}{1,3}")


@dataclass(frozen=True, slots=True)
class WordSplit:
    """One way of cutting.

    `normalizer`, `pre_tokenizer`: as in a tokenizer.json. `ignore_merges`: a word that is a token
    is taken whole, whatever the merges say. `adds_bos`: prompts start with BOS unless the file says
    otherwise.
    """

    pre_tokenizer: Json
    normalizer: Json | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _byte_level(*, use_regex: bool) -> Json:
    """Spell each byte as one printable character; `use_regex` cuts by the GPT-2 pattern first."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> Json:
    """Cut by a pattern, then spell bytes."""
    cut: Json = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return _sequence(cut, _byte_level(use_regex=False))


_DIGITS_THEN_GPT2 = WordSplit(
    _sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
)
_GPT2_SPLIT = WordSplit(_byte_level(use_regex=True))
_LLAMA3_SPLIT = WordSplit(_split(_LLAMA3), ignore_merges=True, adds_bos=True)
_LLAMA3_WORDS = WordSplit(_split(_LLAMA3))
_QWEN2_SPLIT = WordSplit(_split(_QWEN2), normalizer={"type": "NFC"})

WORD_SPLITS = {
    "gpt-2": _GPT2_SPLIT,
    "exaone4": _GPT2_SPLIT,
    "olmo": _GPT2_SPLIT,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "pixtral": _LLAMA3_SPLIT,
    "lfm2": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_WORDS,
    "dbrx": _LLAMA3_WORDS,
    "glm4": _LLAMA3_WORDS,
    "chatglm-bpe": _LLAMA3_WORDS,
    "gpt-4o": WordSplit(_split(_O200K)),
    "qwen2": _QWEN2_SPLIT,
    "qwen35": WordSplit(_split(_QWEN35), normalizer={"type": "NFC"}),
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "seed-coder": WordSplit(_split(_SEED_CODER)),
    "tekken": WordSplit(_split(_TEKKEN), ignore_merges=True, adds_bos=True),
}
