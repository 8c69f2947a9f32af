"""Models whose sequences have states, on torch's CPU device, beside attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.state_pool import state_floats
from compute_plane.executor.interface import BlockCopy, ExecutionBatch, StateCopy
from kernels.reference.delta_net import DeltaNetState, DeltaNetWeights, delta_net
from kernels.reference.mamba2 import Mamba2State, Mamba2Weights, mamba2
from planes.errors import ValidationError
from tests.compute_plane.cuda.recurrent_models import (
    BLOCK_SIZE,
    FALCON,
    GRANITE4,
    LFM2,
    MAMBA2,
    NUM_BLOCKS,
    PROMPTS,
    SIZES,
    SPEC,
    SPECS,
    driven,
    forward_of,
    logits_behind,
    sequences,
    shuffled,
)
from tests.compute_plane.cuda.torch_executors import RecordingDriver, tiny_model, torch_executor
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import NUM_STATES, DrivenSequence, int32

CHUNKS = {"whole": [], "in chunks": [2, 1, 5], "token by token": [1] * 11}
OUTPUT_TOLERANCE = 1e-4
"""Of logits up to 5; products of other numbers of rows are added in another order."""


def made(**changes: object) -> CudaExecutor:
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "keep_logits": True}
    return torch_executor(**{"spec": SPEC, **sizes, **changes})  # type: ignore[arg-type]


def states_of(executor: CudaExecutor) -> torch.Tensor:
    states = executor._pools.states
    assert states is not None
    return states.device


def check_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    np.testing.assert_allclose(found, expected, atol=OUTPUT_TOLERANCE)


@pytest.mark.spread(9)
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_logits_are_those_of_the_formulas_however_texts_are_cut(kind: str, chunks: str) -> None:
    spec = SPECS[kind]
    forward = forward_of(tiny_model(spec))
    expected = [forward.logits(list(text))[-1] for text in PROMPTS]
    check_close(logits_behind(made(spec=spec), PROMPTS, CHUNKS[chunks]), expected)
    assert np.abs(expected).max() > 2


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["Qwen3.5", "LFM2", "Granite 4 H", "Falcon-H1"])
def test_logits_are_those_of_the_cpu_engine(kind: str) -> None:
    spec = SPECS[kind]
    pool = pool_for(spec, NUM_BLOCKS, BLOCK_SIZE)
    engine = tiny_executor(spec, tiny_weights(spec), pool, keep_logits=True)
    expected = logits_behind(engine, PROMPTS, [3])
    check_close(logits_behind(made(spec=spec), PROMPTS, [3]), expected)
    engine.close()


@pytest.mark.parametrize("kind", ["Qwen3.5", "LFM2", "Granite 4 H", "Falcon-H1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_in_sixteen_bits_stay_near(dtype: torch.dtype, kind: str) -> None:
    exact = np.array(logits_behind(made(spec=SPECS[kind]), PROMPTS, [4]))
    found = np.array(logits_behind(made(spec=SPECS[kind], dtype=dtype), PROMPTS, [4]))
    assert np.abs(found - exact).max() < (0.25 if dtype is torch.bfloat16 else 0.03)


def test_gates_rounded_to_sixteen_bits_lose_no_more_than_their_rounded_inputs_have_lost() -> None:
    """So b and a may lie beside q, k, v and z, in one product."""
    random, inputs, tokens = np.random.default_rng(0), 512, 300

    def rounded(values: np.ndarray) -> np.ndarray:
        return torch.from_numpy(values).bfloat16().float().numpy()

    x, keys = (random.standard_normal((tokens, n), np.float32) for n in (inputs, 3 * 64))
    matrix = rounded(3 * random.standard_normal((inputs, 2), np.float32) / np.sqrt(inputs))
    for rate, bias in ((-1, -5), (-0.02, 0), (-4, -4)):
        one = np.ones(1, np.float32)
        weights = DeltaNetWeights(
            random.standard_normal((2 * 64 + 64, 4), np.float32), rate * one, bias * one,
            np.ones(64, np.float32), 1e-6, num_key_heads=1,
        )  # fmt: skip
        projected = np.concatenate([keys, np.ones((tokens, 64), np.float32)], axis=1)

        def heads(gates: np.ndarray, of: DeltaNetWeights, rows: np.ndarray) -> np.ndarray:
            return delta_net(rows, gates, of, DeltaNetState.empty(of))

        exact, by_inputs, by_outputs = (
            heads(gates, weights, projected)
            for gates in (x @ matrix, rounded(x) @ matrix, rounded(x @ matrix))
        )
        lost = [np.sqrt(np.mean((found - exact) ** 2)) for found in (by_inputs, by_outputs)]
        assert lost[1] < 1.2 * lost[0] < 0.005 * np.sqrt(np.mean(exact**2))


def test_steps_of_mamba2_rounded_to_sixteen_bits_lose_as_much_as_all_else_that_is_rounded() -> None:
    """At most: so d may lie beside x, b, c and z, in one product."""
    random, inputs, tokens = np.random.default_rng(0), 512, 300
    heads, channels = 4, 4 * 32 + 2 * 64

    def rounded(values: np.ndarray) -> np.ndarray:
        return torch.from_numpy(values).bfloat16().float().numpy()

    x, rows = (random.standard_normal((tokens, n), np.float32) for n in (inputs, channels))
    for rate, bias, scale in ((-1, -5, 3), (-0.02, 0, 3), (-16, -7, 3), (-8, -4, 8)):
        matrix = scale * random.standard_normal((inputs, heads), np.float32) / np.sqrt(inputs)
        matrix, one = rounded(matrix.astype(np.float32)), np.ones(heads, np.float32)
        weights = Mamba2Weights(
            random.standard_normal((channels, 4), np.float32) / 2, np.zeros(channels, np.float32),
            rate * one, bias * one, one, np.ones(4 * 32, np.float32), 1e-5,
        )  # fmt: skip

        def out(own: np.ndarray, steps: np.ndarray, of: Mamba2Weights) -> np.ndarray:
            gated = np.concatenate([own, np.ones((tokens, 4 * 32), np.float32)], axis=1)
            return mamba2(gated, steps, of, Mamba2State.empty(of))

        exact = out(rows, x @ matrix, weights)
        steps = rounded(x) @ matrix
        lost = [
            np.sqrt(np.mean((out(rounded(rows), d, weights) - exact) ** 2))
            for d in (steps, rounded(steps))
        ]
        assert lost[1] < 2 * lost[0] < 0.012 * np.sqrt(np.mean(exact**2))


def test_keys_and_values_are_of_the_layers_that_attend_and_states_of_those_that_have_them() -> None:
    executor = made()
    assert executor._pools.device.shape[1] == 2
    assert states_of(executor).shape == (NUM_STATES, 2 * SIZES.state_floats)
    floats = 3 * SIZES.channels + SIZES.num_value_heads * SIZES.key_dim * SIZES.value_dim
    assert state_floats(SPEC) == 2 * floats
    executor = made(spec=LFM2)
    assert executor._pools.device.shape[1] == 2
    assert states_of(executor).shape == (NUM_STATES, 2 * 2 * LFM2.hidden_size)
    floats = 3 * MAMBA2.channels + MAMBA2.num_heads * MAMBA2.head_dim * MAMBA2.state_size
    assert states_of(made(spec=GRANITE4)).shape == (NUM_STATES, 2 * floats)
    executor = made(spec=FALCON)  # all layers have both
    assert executor._pools.device.shape[1] == FALCON.num_layers
    assert states_of(executor).shape == (NUM_STATES, state_floats(FALCON))


@pytest.mark.parametrize("kind", ["Qwen3.5", "LFM2", "Granite 4 H", "Falcon-H1"])
def test_company_and_the_order_of_rows_change_nothing(kind: str) -> None:
    """Three prompts, one of them a single token, beside a row that decodes."""
    found = []
    for order in (range(4), [2, 0, 3, 1], [3, 2, 1, 0]):
        executor = made(spec=SPECS[kind])
        driver, rows = driven(executor), sequences()
        first = driver.batch(rows[:1])
        driver.commit(rows[:1], first, executor.execute(first))
        batch = shuffled(driver.batch(rows), order)
        output = executor.execute(batch)
        assert output.logits is not None
        found.append((output.logits, states_of(executor)[[row.state for row in rows]]))
    for logits, states in found[1:]:
        np.testing.assert_allclose(logits, found[0][0], atol=OUTPUT_TOLERANCE)
        torch.testing.assert_close(states, found[0][1], atol=1e-5, rtol=1e-4)


def test_a_row_at_position_0_begins_with_an_empty_state_whatever_lies_there() -> None:
    executor = made()
    expected = logits_behind(executor, PROMPTS, [])
    driver = driven(executor)
    used = DrivenSequence(list(range(50, 60)), state=7)
    for tokens in ([60], list(range(50, 60))):  # the short way and the ordinary one
        executor.execute(driver.batch([used]))
        again = DrivenSequence([*PROMPTS[1], *tokens], state=7)
        fresh = DrivenSequence(again.tokens, state=8)
        states_of(executor)[8].fill_(torch.nan)
        outputs = [executor.execute(driver.batch([row])).logits for row in (again, fresh)]
        np.testing.assert_array_equal(outputs[0], outputs[1])
    check_close(logits_behind(executor, PROMPTS, []), expected)


def test_what_leaves_another_begins_with_a_copy_of_its_state() -> None:
    executor = made()
    forward = forward_of(tiny_model(SPEC))
    driver, prompt = driven(executor), list(range(3, 14))
    first = DrivenSequence(list(prompt), state=4)
    driver.commit([first], (batch := driver.batch([first])), executor.execute(batch))
    rows = [first, *(DrivenSequence(list(prompt), state=state) for state in (9, 11))]
    copies = []
    for token, row in zip((70, 71, 72), rows, strict=True):
        row.tokens[len(prompt) :] = [token]
        row.num_computed = len(prompt)
        if row is not first:
            row.blocks = [driver.free.pop() for _ in first.blocks]
            copies += [BlockCopy(*pair) for pair in zip(first.blocks, row.blocks, strict=True)]
    # One after the other: state 11 gets what 9 has got.
    batch = replace(
        driver.batch(rows), copies=copies, state_copies=[StateCopy(4, 9), StateCopy(9, 11)]
    )
    logits = executor.execute(batch).logits
    assert logits is not None
    check_close(list(logits), [forward.logits(row.tokens)[-1] for row in rows])


def test_a_state_that_is_kept_is_found_again() -> None:
    executor = made()
    driver, row = driven(executor), DrivenSequence(list(range(3, 14)), state=0)
    half = DrivenSequence(row.tokens[:8], state=0, blocks=row.blocks)
    driver.commit([half], (batch := driver.batch([half])), executor.execute(batch))
    row.num_computed = 8
    kept = replace(driver.batch([row]), state_copies=[StateCopy(0, 200)])
    expected = executor.execute(kept).logits
    row.num_computed, row.state = 8, 3
    again = replace(driver.batch([row]), state_copies=[StateCopy(200, 3)])
    np.testing.assert_array_equal(executor.execute(again).logits, expected)


def decoding(executor: CudaExecutor, num_rows: int = 3) -> ExecutionBatch:
    """Return a batch of rows that decode, once their prompts are there."""
    driver, rows = driven(executor), sequences(PROMPTS[:num_rows])
    batch = driver.batch(rows)
    driver.commit(rows, batch, executor.execute(batch))
    return driver.batch(rows)


WRONG: dict[str, tuple[str, Callable[[ExecutionBatch], ExecutionBatch]]] = {
    "none": ("states", lambda batch: replace(batch, states=int32([]))),
    "too few": ("states", lambda batch: replace(batch, states=batch.states[:-1])),
    "twice": ("states", lambda batch: replace(batch, states=int32([5, 6, 5]))),
    "negative": ("states", lambda batch: replace(batch, states=int32([5, -1, 7]))),
    "too large": ("states", lambda batch: replace(batch, states=int32([5, NUM_STATES, 7]))),
    "copied from nowhere": (
        "state_copies", lambda batch: replace(batch, state_copies=[StateCopy(NUM_STATES, 0)]),
    ),
    "copied to nowhere": (
        "state_copies", lambda batch: replace(batch, state_copies=[StateCopy(0, -1)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("has_graph", [False, True])
def test_rows_without_a_state_of_their_own_are_refused(wrong: str, has_graph: bool) -> None:
    executor = made(driver=RecordingDriver())
    if has_graph:
        executor.capture_decode_graph(4)
    field, change = WRONG[wrong]
    batch = decoding(executor)
    before = [tensor.clone() for tensor in (states_of(executor), executor._pools.device)]
    with pytest.raises(ValidationError) as info:
        executor.execute(change(batch))
    assert info.value.field == field
    for tensor, now in zip(before, (states_of(executor), executor._pools.device), strict=True):
        assert torch.equal(tensor.view(torch.int32), now.view(torch.int32))
    assert not executor.execute(batch).failed_rows
