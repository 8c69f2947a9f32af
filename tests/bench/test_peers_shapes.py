"""Models of random weights that engines are measured with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.peers import shapes
from bench.peers.__main__ import chosen_lines, parse
from bench.peers.cases import CASES_TO_NAME
from bench.peers.processes import RUNNERS
from bench.peers.runners.run_engine import OwnEngine
from bench.peers.runners.runner import Job
from bench.peers.shapes import SHAPES, Shape
from compute_plane.model.loader import load_model
from compute_plane.model.source import DEFAULT, locate_model

LAYER = (
    shapes.norms(64, "attn_norm", "ffn_norm")
    | shapes.norms(16, "attn_q_norm", "attn_k_norm")
    | shapes.attention(64, 4, 2, 16)
    | shapes.experts(64, 32, 8)
)
KEYS = {**shapes.heads_keys(4, 2, 16), **shapes.experts_keys(8, 2, 32)}
SMALL = Shape("small", "small", "qwen3moe", 64, KEYS, [LAYER] * 2)


@pytest.mark.wide
def test_a_file_of_random_weights_is_a_model_that_the_engine_generates_and_reads_prompts_with(
    tmp_path: Path,
) -> None:
    target = tmp_path / "small.gguf"
    wanted = {
        "architecture": SMALL.architecture, "keys": SMALL.all_keys(), "tensors": SMALL.tensors(),
    }  # fmt: skip
    tokenizer = str(locate_model(DEFAULT).path)
    subprocess.run(
        [sys.executable, str(RUNNERS / "make_shape.py"), tokenizer, str(target)],
        input=json.dumps(wanted), text=True, check=True,
    )  # fmt: skip
    spec = load_model(str(target)).spec
    assert (spec.architecture, spec.num_layers, spec.vocab_size) == ("qwen3moe", 2, 49152)
    assert spec.num_parameters == sum(int(np.prod(of)) for of in SMALL.tensors().values())
    for kind, tokens in (("decode", 3), ("prefill", 700)):
        engine = OwnEngine(Job(kind, str(target), 1, {"max_num_blocks": 64}))
        try:
            assert engine.measure([[100] * 700], 3)[0] == tokens
        finally:
            engine.close()


def test_shapes_are_measured_where_they_are_asked_for_only(tmp_path: Path) -> None:
    files = [shape.file_of(words) for shape in SHAPES for words in shape.formats]
    assert len(set(files)) == len(files)
    models = tmp_path / "models"
    models.mkdir()
    for name in files:
        (models / name).touch()
    programs = tmp_path / "llamacpp" / "build_amx" / "bin"
    programs.mkdir(parents=True)
    (programs / "llama-bench").touch()
    common = ["run", "--directory", str(tmp_path), "--peers", "llamacpp"]
    asked = parse([*common, "--cases", "shapes-prompt", "--only", "lfm2"])
    assert [line.own_model for case, line in chosen_lines(asked)] == [
        name for name in files if name.startswith("lfm2")
    ]
    assert not {case.name for case in CASES_TO_NAME} & set(parse(common).cases)
