"""Recorded on real processes, replayed on others: the embedded model, three compute planes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.structured_outputs import StructuredOutputs
from hetero_infer import InferenceEngine
from hetero_infer.cli import main
from hetero_infer.config import EngineConfig, child_environment
from hetero_infer.local_planes import compute_socket, private_directory, start_compute_plane
from planes.address import Address
from protos.hetero.compute.v1 import compute_pb2
from tests.devices import STAND_IN, Target
from tests.hetero_infer.replay.replay_bench import read, write

pytestmark = [pytest.mark.model, pytest.mark.wide]

PROMPT = "The three laws of motion are these: a body at rest stays at rest, and"


@pytest.fixture(scope="module")
def recording(target, tmp_path_factory) -> Path:
    """What a whole program wrote, control plane and compute plane processes of their own."""
    path = tmp_path_factory.mktemp("recordings") / "run"
    sampling = ["--max-tokens", "40", "--ignore-eos", "--n", "3", "--temperature", "0.8"]
    flags = [*sampling, "--seed", "5", "--quiet", "--record", str(path), *target.flags]
    if not target.keeps_bits:
        flags.append("--num-threads=1")  # the same batch has the same bits on as many threads
    subprocess.run(
        [sys.executable, "-m", "hetero_infer", "--input", PROMPT, *flags],
        env=child_environment(),
        check=True,
        capture_output=True,
        timeout=120,
    )
    return path


@contextlib.contextmanager
def plane(config: EngineConfig) -> Iterator[Address]:
    with private_directory() as directory:
        address = compute_socket(directory)
        with start_compute_plane(config, address) as process:
            process.wait_ready()
            yield address


@pytest.fixture(scope="module")
def like_plane(target) -> Iterator[Address]:
    with plane(target.config(num_threads=1)) as address:
        yield address


def unlike(target: Target) -> dict[str, str]:
    """Settings of other numerics than a plane has by itself."""
    if target.keeps_bits:
        return {"kv_cache_dtype": "float32"}
    return {"dtype": "bfloat16" if target == STAND_IN else "float32"}


def replay(capsys, file: Path, address: Address, *options: str) -> tuple[int, str]:
    status = main(["replay", str(file), "--compute", str(address), *options])
    return status, capsys.readouterr().out


def test_a_plane_of_the_same_numerics_repeats_every_bit(recording, like_plane, capsys):
    status, text = replay(capsys, recording, like_plane)
    assert status == 0, text
    assert "120 tokens, 120 log-probabilities" in text
    assert "equal to the bit" in text
    assert text.endswith("No difference.\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("Row, row, row your boat gently down the stream. " * 4, {}),
        # What a draft model guessed is in the batches: the other plane has none.
        (
            "The capital of France is",
            {"draft_model": "default", "draft_p_min": 0.0, "prompt_lookup_min": 64},
        ),
    ],
    ids=["prompt lookup", "a draft model"],
)
def test_a_recording_with_drafts_is_repeated_too(
    target, like_plane, capsys, tmp_path, prompt, options
):
    config = target.config(
        record=str(tmp_path / "run"), speculative_tokens=7, num_threads=1, **options
    )
    params = GenerationParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with InferenceEngine(config) as engine:
        engine.submit_request(prompt, params)
        assert engine.run()[0].success
        num_kept = engine.get_metrics().num_kept_drafts
    assert num_kept > 20
    status, text = replay(capsys, tmp_path / "run", like_plane)
    assert status == 0, text
    assert "60 tokens, 60 log-probabilities" in text
    assert text.endswith("No difference.\n")


@pytest.mark.slow
def test_a_recording_with_constraints_is_repeated_too(target, like_plane, capsys, tmp_path):
    config = target.config(record=str(tmp_path / "run"), num_threads=1)
    form = StructuredOutputs(json={"type": "array", "items": {"type": "integer"}, "minItems": 8})
    params = GenerationParams(max_tokens=30, temperature=0.9, seed=3, structured_outputs=form)
    with InferenceEngine(config) as engine:
        number = engine.submit_request("Numbers: ", params)
        engine.submit_request("Once upon", GenerationParams(max_tokens=30, seed=3, ignore_eos=True))
        texts = {result.request_id: result.output_text for result in engine.run()}
    assert texts[number].startswith("[")
    batches = [m for m in read(tmp_path / "run") if isinstance(m, compute_pb2.ExecutionBatch)]
    constraints = [entry for batch in batches for entry in batch.constraints]
    assert len(constraints) > 10
    assert any(entry.num_drafts for entry in constraints)
    status, text = replay(capsys, tmp_path / "run", like_plane)
    assert status == 0, text
    assert text.endswith("No difference.\n")


def test_a_wrong_block_is_found_and_named(recording, like_plane, capsys, tmp_path):
    messages = read(recording)
    batches = [m for m in messages if isinstance(m, compute_pb2.ExecutionBatch)]
    used = {block for batch in batches for block in batch.new_block_ids}
    batch = next(b for b in batches if b.new_block_ids and not b.starts)
    right, batch.new_block_ids[0] = batch.new_block_ids[0], max(used) + 1
    row = next(row for row, count in enumerate(batch.new_block_counts) if count)
    planted = tmp_path / "planted"
    planted.write_bytes(write(messages))
    status, text = replay(capsys, planted, like_plane, "--json")
    found = json.loads(text)["differences"]
    assert status == 1
    assert {item["block"] for item in found} == {right}
    assert found[0]["slot"] == batch.slots[row]
    assert f"positions {batch.positions[row]} to " in found[0]["note"]


def test_a_plane_of_other_numerics_is_led_along_and_differs_by_no_more(target, recording, capsys):
    with plane(target.config(**unlike(target), log_level="error")) as address:
        status, text = replay(capsys, recording, address, "--json")
    report = json.loads(text)
    assert status == 0, text
    assert not report["rules"]["is_exact"]
    assert 0.0 < report["largest_gap"] < 1.0
    assert report["num_steps"] >= 40
