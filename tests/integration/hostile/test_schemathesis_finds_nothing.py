"""schemathesis asks a real deployment for everything `/openapi.json` allows, and what it does not.

A process of its own, as somebody would start it. The one thing it is told is the model's name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.hostile.neighbour import Ports, neighbour

pytestmark = pytest.mark.model

HOOKS = Path(__file__).with_name("schemathesis_hooks.py")
ALL_EVENTS = 1_000_000
"""It leaves a stream after a few events otherwise."""

REFUSED = [400, 401, 404, 405, 413, 415]
"""What says no; a body of too many items may be too large before they are counted."""

NOT_CHECKED = "positive_data_acceptance"
"""It knows no rule that joins fields; `schemathesis_hooks.py` has a check that does."""


def document_with_model(ports: Ports) -> dict:
    """`/openapi.json`, where the only model is the one that is loaded."""
    document = ports.get_json("/openapi.json")
    for schema in document["components"]["schemas"].values():
        if "additionalProperties" in schema and "model" in schema["properties"]:
            field = schema["properties"]["model"]
            field["enum"] = [ports.model, *([None] if "anyOf" in field else [])]
    path = document["paths"]["/v1/models/{model}"]["get"]
    path["parameters"][0]["schema"]["enum"] = [ports.model]
    return document


def run_schemathesis(ports: Ports, directory: Path, *flags: str) -> dict:
    """Its report; `directory`: for its files."""
    schema, report = directory / "openapi.json", directory / "report.json"
    schema.write_text(json.dumps(document_with_model(ports)))
    settings = (
        f'hooks = "{HOOKS}"\nmax-stream-events = {ALL_EVENTS}\n'
        f"[checks]\nnegative_data_rejection.expected-statuses = {REFUSED}\n"
    )
    (directory / "schemathesis.toml").write_text(settings)
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli",
            f"--config-file={directory / 'schemathesis.toml'}", "run", str(schema),
            f"--url={ports.url}", f"--exclude-checks={NOT_CHECKED}", "--continue-on-failure",
            "--generation-database=none", "--request-timeout=60", "--no-color",
            "--suppress-health-check=all", f"--report-json-path={report}", *flags,
        ],
        capture_output=True, encoding="utf-8", check=False, cwd=directory,
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert (found["failures"], found["errors"]) == ([], []), done.stdout
    assert found["complete"], done.stdout
    assert done.returncode == 0, done.stdout
    assert found["operations"]["tested"] == found["operations"]["total"]
    return found


@pytest.mark.slow
def test_schemathesis_finds_nothing_and_its_neighbour_notices_nothing(ports, tmp_path):
    """Every boundary of every field, right and wrong; data drawn by chance are slow to make."""
    with neighbour(ports):
        found = run_schemathesis(
            ports, tmp_path, "--phases=examples,coverage,stateful", "--seed=6", "--workers=4"
        )
    assert found["test_cases"]["generated"] > 1500


@pytest.mark.slow
def test_schemathesis_finds_nothing_in_thousands_of_examples(ports, tmp_path):
    with neighbour(ports):
        found = run_schemathesis(ports, tmp_path, "--max-examples=500", "--workers=4")
    assert found["test_cases"]["generated"] > 4000
