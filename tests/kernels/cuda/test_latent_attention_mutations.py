"""Proof that the tests of attention over latents notice: barriers, waits and sizes are broken."""

from __future__ import annotations

import pytest

from bench.gpu.cases.latent_attention import draw_decode, draw_prefill
from kernels.cuda import (
    attention_shared_float32,
    attention_shared_tile,
    latent_attention_tensor,
)
from kernels.cuda.latent_attention import LatentDecodeVariant, LatentPrefillVariant
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault

DECODE = LatentDecodeVariant("bfloat16", 2, 256, 32, 16)
FLOAT32 = LatentDecodeVariant("float32", 2, 256, 32, 16)
PREFILL = LatentPrefillVariant("bfloat16", 3, 256, 32, 16)
SOURCES = {
    "decode": Source(latent_attention_tensor, "make_tensor_latent_decode", DECODE),
    "prompts": Source(latent_attention_tensor, "make_tensor_latent_prefill", PREFILL),
    "float32": Source(attention_shared_float32, "make_float32_latent_decode", FLOAT32),
    "copies": Source(
        latent_attention_tensor, "make_tensor_latent_decode", DECODE, attention_shared_tile
    ),
}
DELETED = [(name, line) for name, source in SOURCES.items() for line in source.synchronisations()]


def case_of(name: str):
    """Several tiles and chunks, or a prompt behind others."""
    if name == "prompts":
        return draw_prefill(PREFILL, ((3, 50),))
    return draw_decode(FLOAT32 if name == "float32" else DECODE, (140,), splits=2)


def is_noticed(name: str, kernels) -> bool:
    case = case_of(name)
    try:
        return case.faults(simulate(case, kernels=kernels)) != []
    except Fault:
        return True


def test_there_are_so_many_barriers_commits_and_waits():
    counts = {name: len(source.synchronisations()) for name, source in SOURCES.items()}
    assert counts == {"decode": 4, "prompts": 3, "float32": 1, "copies": 1}


@pytest.mark.wide
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(("name", "line"), DELETED)
def test_a_deleted_barrier_commit_or_wait_is_noticed(name: str, line: int):
    assert is_noticed(name, SOURCES[name].without(line))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stage ^ 1, pool", "stage, pool"),
        ("next_tile = int32(next_chunk * chunk_tiles)", "next_tile = int32(next_chunk)"),
        ("entry = int32(first_entry + next_tile", "entry = int32(first_entry + tile"),
        ("* row_elements\n            load_query", "* row_elements + 8\n            load_query"),
        ("else int64(-1)", "else int64(0)"),
        (
            "tile = int32(next_chunk * chunk_tiles)\n            for",
            "tile = end_tile\n            for",
        ),
    ],
)
@pytest.mark.wide
@pytest.mark.usefixtures("short_chunks")
def test_a_step_that_goes_elsewhere_is_noticed(old: str, new: str):
    assert is_noticed("decode", SOURCES["decode"].with_replaced(old, new))
