"""Buffers of the CPU engine are as large as what whole models write into them.

Buffers of a table lie beside each other in an arena, so what is written behind one would only spoil
another. Here each has bytes behind it that nobody may change, and steps are as large as they can
be: of tokens, of rows whose logits are wanted, of items in which threads share contexts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute_plane.cpu import model_table, step_headers
from compute_plane.cpu.executor import CpuExecutor
from compute_plane.cpu.logits_records import LOGITS_ROWS
from compute_plane.cpu.packed_adapters import pack_adapters
from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.cpu.pieces import PIECE_TOKENS
from compute_plane.cpu.product_records import ProductRecords
from compute_plane.cpu.row_buffers import RowBuffers
from compute_plane.cpu.step_table import StepTable
from compute_plane.cpu.token_records import TokenRecords
from compute_plane.executor.interface import EmbeddingPart, EmbeddingWant
from compute_plane.memory.huge_pages import HugePageArena, UInt8Array
from compute_plane.memory.state_pool import make_states
from compute_plane.model.latents import Latents
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import TensorFormat
from kernels.cpu.attention_plan import USUAL_SLOTS, AttentionShape
from kernels.cpu.latent_operands import HEAD_CALL_BYTES
from tests.compute_plane.executor.tiny_adapters import tiny_adapter
from tests.compute_plane.executor.tiny_llama import (
    pool_for,
    tiny_spec,
    with_convolutions,
    with_delta_net,
    with_latents,
    with_mamba2,
    with_single_layers,
    with_states_beside,
)
from tests.compute_plane.executor.tiny_sources import ArraySource
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import NUM_STATES, BatchDriver, DrivenSequence

GUARD_BYTES = 1 << 17
GUARD = 0xA5
BLOCK_SIZE = 16
NUM_BLOCKS = 256
MAX_TOKENS = 2 * PIECE_TOKENS
LONG_ROWS = 8
LONGEST = USUAL_SLOTS // LONG_ROWS * 1024
"""Tokens of each of some rows, which leave as many partials together as there is room for."""

SPEC = tiny_spec(quantisable=True)
OF_LATENTS = with_latents(SPEC)
SHARED = Mixture(
    8, 3, scores="sigmoid", corrects_choice=True, weight_scale=1.5, shared_size=192,
    dense_layers=1, dense_size=224, num_groups=4, groups_per_token=2,
)  # fmt: skip


def latents(of: Latents, mixture: Mixture | None = None) -> ModelSpec:
    return replace(
        OF_LATENTS, latents=of, rotary_dim=of.turning, head_dim=of.row_size, mixture=mixture
    )


MODELS = {
    "llama": SPEC,
    "adapters": replace(SPEC, name="adapters"),
    "gemma3": replace(
        SPEC, architecture="gemma3", window=64, layers_with_window=frozenset([0]),
        local_rope_theta=500.0, layers_with_local_rope=frozenset([0]),
    ),
    "mixtral": replace(SPEC, architecture="mixtral", mixture=Mixture(7, 3)),
    "qwen2moe": replace(
        SPEC, architecture="qwen2moe", mixture=Mixture(7, 3, shared_size=96, gates_shared=True)
    ),
    "qwen35": with_delta_net(SPEC),
    "lfm2": with_convolutions(SPEC),
    "granite4": with_mamba2(SPEC),
    "falcon": with_states_beside(SPEC),
    "nemotron": with_single_layers(SPEC),
    "nemotron, experts": replace(
        with_single_layers(SPEC),
        mixture=Mixture(5, 2, scores="sigmoid", corrects_choice=True, shared_size=64),
    ),
    # Queries are made of more elements than all else that products read, a key than a latent.
    "latents of wide queries": latents(Latents(32, 16, 64, 32, 640, 0.2)),
    "latents and experts": latents(Latents(96, 32, 32, 64, 0, 0.2), SHARED),
}  # fmt: skip
ROWS = {
    "float32": ("float32", {}, "int8"),
    "int8": ("auto", {"": TensorFormat.Q8_0}, "bfloat16"),
    "bfloat16": ("bfloat16", {}, "float32"),
}
"""By the rows that products read (of bfloat16 where a processor has such products): the weights'
type, and the pool's. Attention on a pool of int8 needs most scratch memory, products of float32
rows least."""


class GuardedArena(HugePageArena):
    """Has bytes behind each array."""

    def __init__(self, purpose: str) -> None:
        super().__init__(purpose)
        self.guards: list[UInt8Array] = []

    def take(self, num_bytes: int) -> UInt8Array:
        whole = super().take(num_bytes + GUARD_BYTES)
        whole[num_bytes:] = GUARD
        self.guards.append(whole[num_bytes:])
        return whole[:num_bytes]

    def changed(self) -> list[int]:
        """Return behind which arrays something was written."""
        return [number for number, guard in enumerate(self.guards) if (guard != GUARD).any()]


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[GuardedArena]:
    made: list[GuardedArena] = []

    def guarded(purpose: str) -> GuardedArena:
        made.append(GuardedArena(purpose))
        return made[-1]

    monkeypatch.setattr(model_table, "HugePageArena", guarded)
    return made


def executor_of(spec: ModelSpec, rows: str, num_threads: int = 2) -> CpuExecutor:
    dtype, formats, kv_dtype = ROWS[rows]
    weights = pack_weights(spec, ArraySource(spec, tiny_weights(spec), formats), dtype)
    adapters = None
    if spec.name == "adapters":
        drawn = [tiny_adapter(spec, 1, rank=60), tiny_adapter(spec, 2, rank=3)]
        adapters = pack_adapters(drawn, weights.parts, dtype)
    return CpuExecutor(
        spec,
        weights,
        pool_for(spec, NUM_BLOCKS, BLOCK_SIZE, kv_dtype),
        num_threads=num_threads,
        max_tokens=MAX_TOKENS,
        states=make_states(spec, NUM_STATES),
        adapters=adapters,
    )


def run_largest_steps(executor: CpuExecutor) -> None:
    """Run prompts, a step of generated tokens, and tokens behind long contexts."""
    driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    random, num_adapters = np.random.default_rng(0), executor._shape.num_adapters

    def prompts(count: int) -> list[DrivenSequence]:
        tokens = random.integers(0, SPEC.vocab_size, (count, MAX_TOKENS // count))
        return [
            DrivenSequence(row, adapter=number % 3 if num_adapters else 0)
            for number, row in enumerate(tokens.tolist(), 1)
        ]

    many, one = prompts(LOGITS_ROWS), prompts(1)
    batch = driver.batch(many)
    wants = [EmbeddingWant(row, EmbeddingPart.LAST) for row in range(len(many))]
    driver.commit(many, batch, executor.execute(replace(batch, embeddings=wants)))
    driver.generate(one, 1)
    driver.generate(many, 1)
    copies = LONGEST // MAX_TOKENS
    [row] = one
    blocks = row.blocks[: MAX_TOKENS // BLOCK_SIZE]
    ends = [driver.free.pop() for _ in range(LONG_ROWS)]
    for end in ends:
        executor._pool.copy_block(blocks[-1], end)
    behind = [
        DrivenSequence(
            row.tokens[:MAX_TOKENS] * copies, num_computed=LONGEST - 1,
            blocks=[*(blocks * copies)[:-1], end], adapter=row.adapter,
        )
        for end in ends
    ]  # fmt: skip
    driver.generate(behind, 1)


def test_long_contexts_leave_as_many_partials_as_there_is_room_for() -> None:
    shape = AttentionShape(1, BLOCK_SIZE, 1, 1)
    [segments] = shape.num_segments(np.array([LONGEST - 1], np.int32))
    assert segments * LONG_ROWS == USUAL_SLOTS


@pytest.mark.spread(14)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_written_behind_a_buffer(
    arenas: list[GuardedArena], model: str, rows: str
) -> None:
    with executor_of(MODELS[model], rows) as executor:
        assert executor._attention.num_slots == USUAL_SLOTS
        [arena] = arenas
        assert len(arena.guards) > 20
        run_largest_steps(executor)
    assert arena.changed() == []


@pytest.mark.spread(10)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_written_behind_the_scratch_memory_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, model: str, rows: str
) -> None:
    """Of one worker: that of a second would lie behind it."""
    arena = GuardedArena("scratch memory")
    monkeypatch.setattr(step_headers, "huge_page_array", lambda size, **_: arena.take(size))
    monkeypatch.setattr(step_headers, "SCRATCH_ALIGNMENT", arena.ALIGNMENT)
    with executor_of(MODELS[model], rows, num_threads=1) as executor:
        assert len(arena.guards) == 1
        run_largest_steps(executor)
    assert arena.changed() == []


def test_a_worker_has_room_for_the_call_of_a_head_behind_what_its_product_takes() -> None:
    """Otherwise a product writes over its own record."""
    table, rows = StepTable(), RowBuffers(HugePageArena("a test"), 1, 32)
    products, heads = (ProductRecords(table, rows, of_prompt=False) for _ in range(2))
    heads.scratch_bytes = products.scratch_bytes + 1000
    records = TokenRecords(products, None, heads)
    assert records.scratch_bytes >= heads.scratch_bytes + HEAD_CALL_BYTES
