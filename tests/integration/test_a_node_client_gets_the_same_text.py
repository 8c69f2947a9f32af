"""A client in another language, made from nothing but our .proto files."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client import Client, Delta
from tests.integration.conftest import Deployment

HERE = Path(__file__).parent / "node"
NODE, NPM = shutil.which("node"), shutil.which("npm")

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(NODE is None or NPM is None, reason="node and npm are not installed"),
]


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    assert NPM is not None
    subprocess.run([NPM, "ci", "--silent"], cwd=HERE, check=True, timeout=240)


@pytest.mark.parametrize("mode", ["unary", "stream"])
def test_node_gets_the_text_that_python_gets(deployment: Deployment, mode: str) -> None:
    prompt = "The capital of France is 巴黎 🗼"
    request = {"text": prompt, "sampling": {"max_tokens": 16, "temperature": 0}}
    assert NODE is not None
    done = subprocess.run(
        [NODE, "generate.js", deployment.control.target, mode, json.dumps(request)],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    with Client(deployment.control) as client:
        params = GenerationParams(max_tokens=16, temperature=0.0)
        events = list(client.stream(prompt, params))
    deltas = [event for event in events if isinstance(event, Delta)]
    assert answer["text"] == "".join(delta.text for delta in deltas)
    assert answer["token_ids"] == [token for delta in deltas for token in delta.token_ids]
    assert answer["completion_tokens"] == len(answer["token_ids"])
