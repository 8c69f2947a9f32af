"""lm-evaluation-harness over our HTTP port and on transformers, on the same float32 weights.

The harness is an extra of its own: with pandas, pyarrow, scipy and scikit-learn it takes 600 MB and
a minute, and needs no pin moved.

    pip install -c constraints.txt -e '.[test,lm-eval]'
    python -m pytest -m slow tests/integration/test_lm_eval_gives_the_same_numbers.py

Its tasks lie in `lm_eval_task`; they name their data from the root of the repository.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_infer.config import child_environment

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="needs lm-evaluation-harness: pip install -c constraints.txt -e '.[lm-eval]'",
    ),
]

ROOT = Path(__file__).parents[2]
TASKS = {"hetero_choices": 30, "hetero_words": 12, "hetero_passages": 8, "hetero_answers": 10}
PATIENCE_S = 1800.0
TOLERANCE = 1e-3

FROM_A_DIRECTORY = "tokenizer_backend=huggingface,tokenizer={directory}"
FROM_THE_SERVER = "num_concurrent=8"
"""The tokenizer is then the server's own, through `/tokenize` and `/tokenizer_info`."""


@dataclass(frozen=True)
class Evaluation:
    """What the harness has written: of each task its metrics, and of each sample its answers."""

    metrics: dict[str, dict[str, Any]]
    answers: dict[str, list[list[Any]]]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """The embedded model as transformers has it in float32, half a gigabyte."""
    with tempfile.TemporaryDirectory() as name:
        from tests.golden import record  # transformers takes a second, and this is a slow test

        path = record.model_path()
        record.load_model(path).save_pretrained(name)
        record.load_tokenizer(path).save_pretrained(name)
        yield Path(name)


def evaluate(output: Path, *flags: str) -> Evaluation:
    """Run the harness as people do."""
    command = [
        sys.executable, "-m", "lm_eval", *flags, "--tasks", ",".join(TASKS), "--log_samples",
        "--include_path", "tests/integration/lm_eval_task", "--output_path", str(output),
    ]  # fmt: skip
    environment = child_environment() | {"HF_HOME": str(output / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (results,) = output.glob("*/results_*.json")
    answers = {}
    for task in TASKS:
        (samples,) = output.glob(f"*/samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in samples.read_text("utf-8").splitlines()]
        rows.sort(key=lambda row: row["doc_id"])
        answers[task] = [[answer for (answer,) in row["resps"]] for row in rows]
    return Evaluation(json.loads(results.read_text("utf-8"))["results"], answers)


@pytest.fixture(scope="module")
def on_transformers(directory, tmp_path_factory) -> Evaluation:
    model = ("--model", "hf", "--model_args", f"pretrained={directory},dtype=float32")
    device = ("--device", "cpu", "--batch_size", "8")
    return evaluate(tmp_path_factory.mktemp("hf"), *model, *device)


@pytest.mark.parametrize("tokenizer", [FROM_A_DIRECTORY, FROM_THE_SERVER])
def test_the_harness_gives_the_same_numbers(
    exact_deployment, directory, on_transformers, tmp_path, tokenizer
):
    url = f"http://{exact_deployment.http}/v1"
    model = httpx.get(f"{url}/models").json()["data"][0]["id"]
    said = tokenizer.format(directory=directory)
    ours = evaluate(
        tmp_path, "--model", "local-completions", "--batch_size", "4",
        "--model_args", f"model={model},base_url={url}/completions,{said}",
    )  # fmt: skip
    theirs = on_transformers
    assert {task: len(rows) for task, rows in theirs.answers.items()} == TASKS

    for task in ("hetero_choices", "hetero_words"):
        pairs = list(zip(flat(ours, task), flat(theirs, task), strict=True))
        for (our_logprob, our_greedy), (their_logprob, their_greedy) in pairs:
            assert float(our_logprob) == pytest.approx(float(their_logprob), abs=TOLERANCE)
            assert our_greedy == their_greedy
        assert {greedy for _, (_, greedy) in pairs} == {"True", "False"}
    for our_sum, their_sum in zip(
        flat(ours, "hetero_passages"), flat(theirs, "hetero_passages"), strict=True
    ):
        assert float(our_sum) == pytest.approx(float(their_sum), rel=1e-4)
    assert ours.answers["hetero_answers"] == theirs.answers["hetero_answers"]

    for task, exactly, nearly in (
        ("hetero_choices", ["acc", "acc_norm"], []),
        ("hetero_words", ["acc"], ["perplexity"]),
        ("hetero_passages", [], ["word_perplexity", "byte_perplexity", "bits_per_byte"]),
        ("hetero_answers", ["exact_match"], []),
    ):
        for name in exactly:
            assert metric(ours, task, name) == metric(theirs, task, name)
        for name in nearly:
            expected = pytest.approx(metric(theirs, task, name), rel=TOLERANCE)
            assert metric(ours, task, name) == expected


def flat(evaluation: Evaluation, task: str) -> list[Any]:
    return [answer for answers in evaluation.answers[task] for answer in answers]


def metric(evaluation: Evaluation, task: str, name: str) -> float:
    return evaluation.metrics[task][f"{name},none"]
