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
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_O200K = _CASED_WORDS % (_ENDINGS, _ENDINGS, r"\p{N}{1,3}")
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters of two cases, as of one year's Unicode: DeepSeek's pattern lists them."""
_OF_CHINA_ON = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
"""DeepSeek's range of what is written without spaces, far wider than that."""
_CHINESE_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _OF_CHINA_ON,
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OF_CHINA_ON)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _CHINESE_JAPANESE,
    r'[!"#$%&'
    r"'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CHINESE_JAPANESE}",
    _CASED_WORDS % (_ENDINGS, _ENDINGS, r"\p{N}"),
)
_KIMI = (
    r"\p{Han}+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+{_ENDINGS}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Kimi's models have no tokenizer.json: it is the pattern of their tokenizer's Python."""


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


_DIGITS: Json = {"type": "Digits", "individual_digits": True}


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


def _split(*patterns: str, digits_apart: bool = False) -> Json:
    """Cut by patterns, each what the one ahead has left, then spell bytes.

    `digits_apart`: and then each digit off.
    """
    cuts: list[Json] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    if digits_apart:
        cuts.append(_DIGITS)
    return _sequence(*cuts, _byte_level(use_regex=False))


_DIGITS_THEN_GPT2 = WordSplit(_sequence(_DIGITS, _byte_level(use_regex=True)))
_GPT2_SPLIT = WordSplit(_byte_level(use_regex=True))
_LLAMA3_SPLIT = WordSplit(_split(_LLAMA3), ignore_merges=True, adds_bos=True)
_LLAMA3_WORDS = WordSplit(_split(_LLAMA3))
_O200K_SPLIT = WordSplit(_split(_O200K))
_DEEPSEEK_V3_SPLIT = WordSplit(_split(*_DEEPSEEK_V3))
_QWEN2_SPLIT = WordSplit(_split(_QWEN2), normalizer={"type": "NFC"})

WORD_SPLITS = {
    "gpt-2": _GPT2_SPLIT,
    "exaone4": _GPT2_SPLIT,
    "gigachat": _GPT2_SPLIT,
    "olmo": _GPT2_SPLIT,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "falcon-h1": _LLAMA3_SPLIT,
    "pixtral": _LLAMA3_SPLIT,
    "lfm2": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_WORDS,
    "dbrx": _LLAMA3_WORDS,
    "glm4": _LLAMA3_WORDS,
    "chatglm-bpe": _LLAMA3_WORDS,
    "gpt-4o": _O200K_SPLIT,
    "kanana2": _O200K_SPLIT,
    "minimax-m2": _O200K_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "solar-open": WordSplit(_split(_QWEN2)),
    "exaone-moe": WordSplit(_split(_EXAONE_MOE)),
    "qwen35": WordSplit(_split(_QWEN35), normalizer={"type": "NFC"}),
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "deepseek-llm": WordSplit(_split(*_DEEPSEEK_LLM, digits_apart=True)),
    "deepseek-coder": WordSplit(_split(*_DEEPSEEK_CODER, digits_apart=True)),
    "deepseek-v3": _DEEPSEEK_V3_SPLIT,
    "joyai-llm": _DEEPSEEK_V3_SPLIT,
    "kimi-k2": WordSplit(_split(_KIMI)),
    "youtu": WordSplit(_split(*_YOUTU), ignore_merges=True),
    "seed-coder": WordSplit(_split(_SEED_CODER)),
    "tekken": WordSplit(_split(_TEKKEN), ignore_merges=True, adds_bos=True),
}
