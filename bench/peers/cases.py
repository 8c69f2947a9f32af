"""What is measured: cases, and for each the engines that take turns with ours.

Settings of the peers are the fastest found for these cases among those their documentation names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.environments import llama_cpp_directory
from bench.peers.models import DEFAULT_MODEL
from bench.peers.shapes import SHAPES, Shape

EACH_CHANNEL = "18446744073709551615"
"""OpenVINO's group size for activations quantised with one scale a token."""

FLOAT_FROM_BF16: dict[str, Any] = {"dtype": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Peer:
    """One configuration of a peer.

    `environment`: of `environments`; `runner`: of `runners/run_*.py`; `model`: of `models`.
    """

    name: str
    weights: str
    environment: str
    runner: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """A peer and the model that ours runs beside it."""

    peer: Peer
    own_model: str = DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class Case:
    """`kind`: of `runners/runner.py`. `through_grpc`: ours is both planes, not just its engine."""

    name: str
    title: str
    kind: str
    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    through_grpc: bool
    lines: tuple[Line, ...]


def _llama(runner: str, weights: str, model: str, **settings: Any) -> Peer:  # noqa: ANN401 - its own
    return Peer("llama.cpp", weights, "llamacpp", runner, model, settings)


def _openvino(weights: str, model: str, **settings: Any) -> Peer:  # noqa: ANN401 - plugin's
    return Peer("OpenVINO", weights, "openvino", "openvino", model, settings)


SAME_FILE = (
    ("Q4_1", "q4_1.gguf"),
    ("Q4_0", "Q4_0.gguf"),
    ("Q4_0 throughout", "Q4_0pure.gguf"),
    ("Q8_0", "Q8_0.gguf"),
    ("BF16", "BF16.gguf"),
)

OV_INT4 = _openvino("int4 a channel", "ov_int4_ch")
OV_INT8 = _openvino("int8", "ov_int8_sym", DYNAMIC_QUANTIZATION_GROUP_SIZE=EACH_CHANNEL)
OV_FLOAT = _openvino("float32 run as bf16", "ov_f32")
OV_FILE = _openvino("Q4_1 file", "q4_1.gguf")

OPENVINO = tuple(Line(peer) for peer in (OV_INT4, OV_INT8, OV_FLOAT, OV_FILE))
"""Beside our fastest weights, whatever theirs are: what computes, not memory, is the limit."""

OPENVINO_ALIKE = (
    Line(OV_INT4, "Q4_0.gguf"),
    Line(OV_INT8, "Q8_0.gguf"),
    Line(OV_FLOAT, "BF16.gguf"),
    Line(OV_FILE),
)
"""Beside weights of ours that are as large: one stream is bound by reading them."""


def _of_shape(shape: Shape, words: Sequence[str], **settings: Any) -> Line:  # noqa: ANN401 - peer's
    model = shape.file_of(words)
    weights = f"{shape.title}, {words[-1]}"
    return Line(_llama("llamacpp_bench", weights, model, **settings), model)


OF_SHAPES = tuple(_of_shape(shape, words) for shape in SHAPES for words in shape.formats)
"""Models of random weights, the same file on both sides."""


def _at_depth(flash_attention: str) -> tuple[Line, ...]:
    settings = {"-fa": flash_attention}
    return (
        Line(_llama("llamacpp_bench", "Q4_1", DEFAULT_MODEL, **settings)),
        *(_of_shape(shape, shape.formats[0], **settings) for shape in SHAPES),
    )


CASES_TO_NAME = (
    Case(
        "shapes-decode",
        "random weights, one stream, decode 64, in the engine",
        "decode", 1, 1, 64, False, OF_SHAPES,
    ),
    Case(
        "shapes-prompt",
        "random weights, prompt of 512 tokens, in the engine",
        "prefill", 1, 512, 1, False, OF_SHAPES,
    ),
    Case(
        "depth-decode",
        "one stream, decode 64 behind 4032, in the engine",
        "decode", 1, 4033, 64, False, _at_depth("off"),
    ),
    Case(
        "depth-prompt",
        "prompt of 4032 tokens, in the engine",
        "prefill", 1, 4032, 1, False, _at_depth("on"),
    ),
)  # fmt: skip
"""These are measured where they are asked for. Behind long contexts `llama-bench` decodes up to six
times as fast without flash attention; prompts it computes faster with it."""

CASES = (
    Case(
        "engine",
        "one stream, decode 128, in the engine",
        "decode", 1, 1, 128, False,
        (
            *(
                Line(_llama("llamacpp_bench", weights, model), model)
                for weights, model in SAME_FILE
            ),
            *OPENVINO_ALIKE,
        ),
    ),
    Case(
        "stream",
        "one stream, decode 128 after 16, ours through gRPC, peer through its server",
        "decode", 1, 16, 128, True,
        tuple(
            Line(_llama("llamacpp_server", weights, model), model)
            for weights, model in SAME_FILE[:-1]
        ),
    ),
    Case(
        "prefill",
        "prefill of 1024 tokens, ours through gRPC, peer in process",
        "prefill", 1, 1024, 1, True,
        OPENVINO,
    ),
    Case(
        "batch",
        "32 × (128 + 128), output tokens, ours through gRPC, peer in process",
        "batch", 32, 128, 128, True,
        (
            *OPENVINO,
            Line(_llama("llamacpp_bench", "Q4_1", "q4_1.gguf")),
            Line(_llama("llamacpp_bench", "Q4_0", "Q4_0.gguf")),
            Line(Peer("vLLM", "bf16", "vllm", "vllm", "hf_bf16", FLOAT_FROM_BF16)),
            Line(
                Peer(
                    "transformers", "bf16", "transformers", "transformers", "hf_bf16",
                    FLOAT_FROM_BF16,
                )
            ),
        ),
    ),
)  # fmt: skip


def settings_of(peer: Peer, directory: Path) -> dict[str, Any]:
    """Return the settings a peer's runner is told; `directory`: of the environments."""
    if peer.environment == "llamacpp":
        return {**peer.settings, "directory": str(llama_cpp_directory(directory))}
    return peer.settings
