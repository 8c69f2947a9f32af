"""Rows computed with adapters on the CPU engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from compute_plane.cpu.adapter_runs import adapter_runs
from compute_plane.cpu.executor import CpuExecutor
from compute_plane.cpu.packed_adapters import pack_adapters
from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.cpu.pieces import PIECE_TOKENS, PieceKind
from compute_plane.memory.state_pool import make_states
from compute_plane.model import layout
from compute_plane.model.adapter import ROLES, Adapter
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorFormat
from planes.errors import ConfigError, ValidationError
from tests.compute_plane.executor.tiny_adapters import MergedSource, tiny_adapter
from tests.compute_plane.executor.tiny_llama import (
    pool_for,
    tiny_executor,
    tiny_spec,
    with_gemma4,
    with_states_beside,
)
from tests.compute_plane.executor.tiny_sources import ArraySource
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import NUM_STATES, BatchDriver, DrivenSequence

SPEC = tiny_spec(quantisable=True)
WEIGHTS = tiny_weights(SPEC)
ADAPTERS = (
    tiny_adapter(SPEC, 1),
    tiny_adapter(SPEC, 2, rank=20, roles=(layout.QUERY, layout.VALUE)),
    tiny_adapter(SPEC, 3, rank=1, roles=(layout.KEY, layout.UP, layout.DOWN)),
)
NUM_BLOCKS, BLOCK_SIZE = 120, 16
Q8_0, Q4_1 = TensorFormat.Q8_0, TensorFormat.Q4_1


def executor_of(
    adapters: Sequence[Adapter] = ADAPTERS, spec: ModelSpec = SPEC, dtype: str = "auto",
    formats: dict[str, TensorFormat] | None = None, num_threads: int = 2,
) -> CpuExecutor:  # fmt: skip
    return tiny_executor(
        spec, tiny_weights(spec), pool_for(spec, NUM_BLOCKS, BLOCK_SIZE), dtype=dtype,
        formats=formats, num_threads=num_threads, keep_logits=True, adapters=adapters,
    )  # fmt: skip


def merged_executor(
    adapter: Adapter, spec: ModelSpec, dtype: str, formats: dict[str, TensorFormat] | None
) -> CpuExecutor:
    source = ArraySource(spec, tiny_weights(spec), formats)
    packed = pack_weights(spec, MergedSource(source, adapter), dtype)
    return CpuExecutor(
        spec, packed, pool_for(spec, NUM_BLOCKS, BLOCK_SIZE), num_threads=2, keep_logits=True,
        states=make_states(spec, NUM_STATES),
    )  # fmt: skip


def logits_of(
    executor: CpuExecutor, rows: Sequence[tuple[int, int]], chunk: int | None = None
) -> list[np.ndarray]:
    """Return the logits behind prompts, and behind three tokens that follow each, row by row.

    `rows`: the length of each prompt, and its adapter.
    """
    driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    sequences = [
        DrivenSequence([3 + (7 * i + length) % 80 for i in range(length)], adapter=adapter)
        for length, adapter in rows
    ]
    found: list[list[np.ndarray]] = [[] for _ in rows]
    for token in (5, 6, 7, None):
        while any(s.num_computed < len(s.tokens) for s in sequences):
            running = [s for s in sequences if s.num_computed < len(s.tokens)]
            batch = driver.batch(running, chunk)
            output = executor.execute(batch)
            assert output.logits is not None
            for row, logits in zip(batch.sampled_rows.tolist(), output.logits, strict=True):
                found[sequences.index(running[row])].append(logits.copy())
            for sequence, end in zip(running, batch.seq_lens.tolist(), strict=True):
                sequence.num_computed = end
        for sequence in sequences:
            sequence.tokens += [] if token is None else [token]
    return [np.array(of_row) for of_row in found]


@pytest.mark.parametrize(
    ("dtype", "formats", "tolerance"),
    [
        ("float32", None, 2e-5),
        ("auto", None, 2e-2),  # the adapter's matrices are rounded to bfloat16
        ("bfloat16", {"": Q8_0}, 5e-2),
    ],
)
@pytest.mark.parametrize("number", range(len(ADAPTERS)))
def test_a_row_is_what_a_model_with_the_adapter_merged_in_says(
    number: int, dtype: str, formats: dict[str, TensorFormat] | None, tolerance: float
) -> None:
    with executor_of(dtype=dtype, formats=formats) as executor:
        [found] = logits_of(executor, [(40, number + 1)])
        [plain] = logits_of(executor, [(40, 0)])
    with merged_executor(ADAPTERS[number], SPEC, dtype, formats) as executor:
        [wanted] = logits_of(executor, [(40, 0)])
    spread = wanted.std()
    assert np.abs(found - wanted).max() < tolerance * 4 * spread
    assert np.abs(plain - wanted).max() > spread / 4  # it matters


@pytest.mark.parametrize(
    "spec",
    [
        tiny_spec(quantisable=True, architecture="qwen2"),
        tiny_spec(quantisable=True, architecture="gemma3"),
        tiny_spec(quantisable=True, architecture="exaone4"),
        with_gemma4(SPEC),
        with_states_beside(SPEC),
    ],
    ids=lambda spec: spec.architecture,
)
def test_models_with_norms_biases_and_states_around_their_products_take_them_too(
    spec: ModelSpec,
) -> None:
    adapter = tiny_adapter(spec, 4, size=0.05)
    with executor_of([adapter], spec, "float32") as executor:
        [found] = logits_of(executor, [(40, 1)])
    with merged_executor(adapter, spec, "float32", None) as executor:
        [wanted] = logits_of(executor, [(40, 0)])
    assert np.abs(found - wanted).max() < 2e-4 * wanted.std()


@pytest.mark.parametrize("formats", [None, {"": Q8_0}, {"": Q4_1, "k_proj": Q8_0}])
def test_rows_are_the_same_bits_alone_and_in_any_company(
    formats: dict[str, TensorFormat] | None,
) -> None:
    rows = [(40, 1), (3, 0), (70, 2), (1, 1), (33, 3), (20, 0), (90, 1), (1, 2)]
    with executor_of(formats=formats) as executor:
        alone = [logits_of(executor, [row])[0] for row in rows]
        together = logits_of(executor, rows)
        in_chunks = logits_of(executor, rows, chunk=13)
    with executor_of(formats=formats, num_threads=1) as executor:
        by_one_thread = logits_of(executor, rows[::-1])[::-1]
    for found in (together, in_chunks, by_one_thread):
        for of_row, wanted in zip(found, alone, strict=True):
            np.testing.assert_array_equal(of_row, wanted)


@pytest.mark.parametrize("formats", [None, {"": Q8_0}, {"": TensorFormat.BF16}])
@pytest.mark.parametrize("adapters", [ADAPTERS, ADAPTERS[1:2]])
def test_rows_without_one_are_what_a_model_without_adapters_says(
    formats: dict[str, TensorFormat] | None, adapters: Sequence[Adapter]
) -> None:
    with executor_of((), formats=formats) as executor:
        wanted = logits_of(executor, [(40, 0), (1, 0)])
    with executor_of(adapters, formats=formats) as executor:
        beside_none = logits_of(executor, [(40, 0), (1, 0)])
        [one, _, other] = logits_of(executor, [(40, 0), (60, 1), (1, 0)])
    np.testing.assert_array_equal(beside_none, wanted)
    np.testing.assert_array_equal([one, other], wanted)


def test_pieces_without_any_go_through_the_records_of_a_plane_without() -> None:
    def records(executor: CpuExecutor, kind: PieceKind) -> int:
        layers = executor._model.layers_of_kinds[kind]
        return sum(len(layer.write) + len(layer.read) for layer in layers)

    formats = {"": TensorFormat.BF16}
    with executor_of((), formats=formats) as without, executor_of(formats=formats) as having:
        for kind in (PieceKind.GENERATED, PieceKind.PROMPT):
            assert records(having, kind) == records(without, kind)
            adapted = PieceKind.of(is_prompt=kind is PieceKind.PROMPT, is_adapted=True)
            # One for each of q·k·v, o, gate·up and down; products may no longer gate their sums.
            more = records(having, adapted) - records(having, kind) - 4 * SPEC.num_layers
            assert more in (0, SPEC.num_layers)


def test_ranks_of_any_size_stand_beside_each_other() -> None:
    """Also those whose `down` no two threads make, and more than a tile has columns."""
    adapters = [
        tiny_adapter(SPEC, 5, rank=1018, size=0.005),  # 1018 to 1024
        tiny_adapter(SPEC, 6, rank=1, roles=(layout.DOWN,)),
        tiny_adapter(SPEC, 7, rank=200, roles=(layout.QUERY, layout.OUTPUT), size=0.02),
    ]
    rows = [(70, 1), (3, 2), (20, 3), (9, 0)]
    with executor_of(adapters, dtype="float32") as executor:
        alone = [logits_of(executor, [row])[0] for row in rows]
        together = logits_of(executor, rows)
    for found, wanted in zip(together, alone, strict=True):
        np.testing.assert_array_equal(found, wanted)
    for number, adapter in enumerate(adapters):
        with merged_executor(adapter, SPEC, "float32", None) as executor:
            [wanted] = logits_of(executor, [(rows[number][0], 0)])
        assert np.abs(together[number] - wanted).max() < 1e-4 * wanted.std()


def test_pieces_and_runs_do_not_show() -> None:
    long = PIECE_TOKENS + 200
    with executor_of() as executor:
        found = logits_of(executor, [(3, 2), (long, 1), (5, 3)])
        [wanted] = logits_of(executor, [(long, 1)], chunk=50)
    np.testing.assert_array_equal(found[1], wanted)


def test_runs_are_of_one_adapter_and_bounded() -> None:
    found = adapter_runs(np.array([0, 0, 2, 2, 1, 0] + [3] * 130, dtype=np.int32))
    assert found.tolist() == [[1, 2, 2], [0, 4, 1], [2, 6, 64], [2, 70, 64], [2, 134, 2]]
    assert adapter_runs(np.zeros(4, np.int32)).shape == (0, 3)


def test_an_adapter_that_there_is_not_is_refused_in_any_step() -> None:
    with executor_of() as executor:
        driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        row = DrivenSequence([1, 2, 3], adapter=len(ADAPTERS) + 1)
        with pytest.raises(ValidationError, match="must be in 0 to 3, got 4"):
            executor.execute(driver.batch([row]))


def test_matrices_in_an_order_of_their_own_take_none() -> None:
    orders = {"down": 1}
    packed = pack_weights(SPEC, ArraySource(SPEC, WEIGHTS, {"": Q8_0}, orders))
    for role in (layout.GATE, layout.UP, layout.DOWN):
        with pytest.raises(ConfigError, match=f"changes .*{role}.weight.*act-order"):
            pack_adapters([tiny_adapter(SPEC, 1, roles=(role,))], packed.parts, "auto")
    pack_adapters([tiny_adapter(SPEC, 1, roles=(layout.QUERY,))], packed.parts, "auto")
    assert {layout.GATE, layout.UP, layout.DOWN} < set(ROLES)
