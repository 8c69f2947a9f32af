"""The front door with the embedded model: both ways in give the same text."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hetero_infer import EngineConfig, GenerationParams, InferenceEngine
from hetero_infer.config import child_environment

PROMPT = "你好,世界!"
MAX_TOKENS = 24
PATIENCE_S = 300.0


@pytest.mark.wide
@pytest.mark.model
def test_the_command_line_and_the_python_api_give_the_same_greedy_text():
    flags = ["--max-tokens", str(MAX_TOKENS), "--temperature", "0", "--json"]
    command = [sys.executable, "-P", "-m", "hetero_infer", "--input", PROMPT, *flags]
    result = subprocess.run(
        command, env=child_environment(), capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == 0, result.stderr.decode()
    answer = json.loads(result.stdout.decode("utf-8", errors="strict"))
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) > 0

    with InferenceEngine(EngineConfig()) as engine:
        prompts = [PROMPT, "Hello, world!", "def fibonacci(n):"]
        params = GenerationParams(max_tokens=MAX_TOKENS, temperature=0.0)
        ids = [engine.submit_request(prompt, params) for prompt in prompts]
        results = {result.request_id: result for result in engine.run()}
        assert all(results[request_id].success for request_id in ids)
        first = results[ids[0]]
        assert first.output_tokens == answer["token_ids"]
        assert first.output_text == answer["text"]
        assert engine.tokenizer.decode(first.output_tokens).startswith(first.output_text)
        assert engine.get_memory_stats().used_blocks == 0
