"""How `llama-bench` is asked for what a case measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.peers.runners.run_llamacpp_bench import load
from bench.peers.runners.runner import Job

PROGRAM = f"""#!{sys.executable}
import json, pathlib, sys
if "--version" not in sys.argv:
    pathlib.Path(__file__).with_name("asked").write_text(json.dumps(sys.argv[1:]))
print(json.dumps([{{"avg_ns": 2e9}}]))
"""


def asked(directory: Path, kind: str, prompt: int, output: int, **settings: str) -> list[str]:
    program = directory / "llama-bench"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    engine = load(Job(kind, "a.gguf", 2, {"directory": str(directory), **settings}))
    counted = output if kind == "decode" else prompt
    assert engine.measure([[1] * prompt], output) == (counted, 2.0)
    words: list[str] = json.loads((directory / "asked").read_text())
    return words


@pytest.mark.parametrize(
    ("kind", "prompt", "output", "wanted"),
    [
        ("decode", 1, 64, "-p 0 -n 64 -d 0"),
        ("decode", 4033, 64, "-p 0 -n 64 -d 4032"),
        ("prefill", 512, 1, "-p 512 -n 0"),
    ],
)
def test_tokens_are_decoded_behind_all_of_the_prompt_but_its_last(
    tmp_path: Path, kind: str, prompt: int, output: int, wanted: str
) -> None:
    words = asked(tmp_path, kind, prompt, output)
    assert " ".join(words).endswith(wanted)
    assert words[words.index("-fa") + 1] == "on"


def test_flash_attention_is_what_the_case_says(tmp_path: Path) -> None:
    words = asked(tmp_path, "decode", 1, 64, **{"-fa": "off"})
    assert words[words.index("-fa") + 1] == "off"
