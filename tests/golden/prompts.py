"""The prompts of the golden runs: languages, scripts, code, and lengths from one token to 1501."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"
TEXT_FILE = DATA / "text.txt"
"""Self-written, about 2000 tokens: for the perplexity; the long prompt is its beginning."""

LONG_PROMPT_TOKENS = 1501  # the end of a character: the text gives the same tokens again

PROMPTS: dict[str, str] = {
    "greeting": "Hello, world!",
    "story": "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "fact": "The capital of France is",
    "list": "Three things every sailor should carry on a long voyage are:\n1.",
    "science": "Photosynthesis is the process by which plants",
    "dialogue": '"Did you lock the door?" asked Maria.\n\n"I thought you',
    "arithmetic": (
        "Question: A train travels 60 km in 45 minutes. How far does it go in 2 hours?\nAnswer:"
    ),
    "chat": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nGive me three tips for growing tomatoes.<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "python": 'def binary_search(values, target):\n    """Return the index of target',
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "sql": "SELECT customer.name, SUM(invoice.total)\nFROM customer\nJOIN invoice ON",
    "json": '{"name": "Ada", "languages": ["English", "French"], "born": 1815, "notes": "',
    "chinese": "你好,世界!今天天气很好,",
    "japanese": "昔々、あるところに、おじいさんと",
    "korean": "안녕하세요. 오늘은",
    "russian": "В начале было слово, и",
    "german": "Der schnelle braune Fuchs springt über",
    "emoji": "🎉🚀 Launch day! 🌍✨ We are so happy 😀",
    "spaces": "a\t\tb    c\n\n\n      d = [1,  2,   3]\n\t",
}

ECHOED: dict[str, str] = {
    "ended": (
        "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\nHi! How can I help you today?"
    ),
    "open": "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\nI am",
    **{name: PROMPTS[name] for name in ("fact", "python", "chinese", "russian", "emoji", "spaces")},
}
"""Prompts with special tokens, characters of several tokens, and one whose answer is over."""


def long_prompt_source() -> str:
    """Return the text whose first `LONG_PROMPT_TOKENS` tokens are the twentieth prompt."""
    return TEXT_FILE.read_text(encoding="utf-8")
