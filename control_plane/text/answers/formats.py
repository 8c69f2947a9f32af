"""The formats of answers that are known, by the names that settings give them.

Apart from how a chat template shows them: command lines want names, and no template engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from control_plane.core.tool_calls import THINK, ThoughtMarks
from control_plane.text.answers.call_readers import HermesReader, Llama3JsonReader
from control_plane.text.answers.gemma4_reader import Gemma4Reader
from control_plane.text.answers.glm_reader import GlmReader
from control_plane.text.answers.harmony_reader import HarmonyReader
from control_plane.text.answers.list_readers import GraniteReader, MistralReader
from control_plane.text.answers.parts_reader import PartsReader
from control_plane.text.answers.pythonic_readers import Lfm2Reader, Olmo3Reader
from control_plane.text.answers.qwen3_coder_reader import (
    MiniMaxReader,
    Qwen3CoderReader,
    SeedOssReader,
)
from control_plane.text.answers.section_readers import (
    DeepSeekV3Reader,
    DeepSeekV31Reader,
    KimiReader,
)

AUTO: Final = "auto"
NONE: Final = "none"

CALL_READERS: Final[Mapping[str, type[PartsReader]]] = {
    reader.FORMAT: reader
    for reader in (
        *(HermesReader, Llama3JsonReader, MistralReader, GraniteReader, Qwen3CoderReader),
        *(SeedOssReader, MiniMaxReader, GlmReader, DeepSeekV3Reader, DeepSeekV31Reader, KimiReader),
        *(Lfm2Reader, Olmo3Reader, Gemma4Reader, HarmonyReader),
    )
}
TOOL_CALL_PARSERS: Final = (AUTO, NONE, *CALL_READERS)
_MISTRAL_THINK: Final = ThoughtMarks("[THINK]", "[/THINK]")
THOUGHT_MARKS: Final[Mapping[str, ThoughtMarks]] = {
    "think": THINK,
    "deepseek_r1": THINK,
    "qwen3": THINK,
    "mistral": _MISTRAL_THINK,
    "seed_oss": ThoughtMarks("<seed:think>", "</seed:think>"),
    "gemma4": ThoughtMarks("<|channel>", "<channel|>", label="thought", recur=True),
}
"""Of reasoning. `deepseek_r1` and `qwen3` are other names of `think`, those of vLLM."""
HARMONY: Final = HarmonyReader.FORMAT
"""In which reasoning stands in messages of its own, without marks."""
REASONING_PARSERS: Final = (AUTO, NONE, *THOUGHT_MARKS, HARMONY)
