"""Commands as users run them, against one server with the simulated executor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hetero_infer.commands.server import own_server
from hetero_infer.config import EngineConfig, child_environment

COMMAND = [sys.executable, "-P", "-m", "hetero_infer"]
PATIENCE_S = 120.0
MAX_MODEL_LEN = 1024
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ mood }}"
)


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="session")
def server(template):
    config = EngineConfig(executor="simulated", max_model_len=MAX_MODEL_LEN)
    with own_server(config, lambda _: None, f"--chat-template={template}") as server:
        yield server.address


@pytest.fixture
def environ(tmp_path):
    return {**child_environment(), "TMPDIR": str(tmp_path), "TERM": "dumb", "HOME": os.devnull}


@pytest.fixture
def run(environ):
    def run(*argv, stdin=""):
        return subprocess.run(
            [*COMMAND, *map(str, argv)],
            env=environ,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            timeout=PATIENCE_S,
            check=False,
        )

    return run
