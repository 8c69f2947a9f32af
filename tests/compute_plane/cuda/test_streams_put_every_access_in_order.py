"""What steps do on two streams and on the host never meets in memory without an order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from compute_plane.cuda import build, cuda_driver
from compute_plane.cuda.cuda_driver import CudaDriver, CudaEvent
from compute_plane.cuda.drivers import Event
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.staging import Berth, StagingRing
from compute_plane.executor.interface import BlockCopy, CopyKind, ExecutionBatch, Penalties
from tests.compute_plane.cuda.cut_executors import BLOCK_SIZE, NUM_BLOCKS, cut_executor
from tests.compute_plane.cuda.played_cuda import World, played_cuda, played_device
from tests.compute_plane.cuda.test_samples_stay_on_the_device import ahead, in_turn, two_steps
from tests.compute_plane.cuda.test_the_pool_fills_what_steps_leave import context
from tests.compute_plane.cuda.torch_executors import torch_executor
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32

T = TypeVar("T")


@pytest.fixture
def world() -> Iterator[World]:
    with played_cuda() as played:
        yield played


def executor_on(world: World, *graphs: int, driver: type[CudaDriver] = CudaDriver) -> CudaExecutor:
    _, operations = played_device(world)
    device = driver(torch.device("cpu"))
    with device.computing():  # where the pool is filled with NaN
        executor = torch_executor(
            driver=device,
            operations=operations,
            num_host_blocks=8,  # type: ignore[arg-type]
        )
    for size in graphs:
        executor.capture_decode_graph(size)
    return executor


@pytest.mark.parametrize("graphs", [(), (8,)], ids=["eager", "graphs"])
def test_steps_launched_ahead_are_in_order_and_give_the_tokens_of_steps_in_turn(
    world: World, graphs: tuple[int, ...]
) -> None:
    found = ahead(executor_on(world, *graphs))
    assert world.races == []
    with world.paused():
        expected = in_turn(torch_executor())
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def all_kinds_of_steps(executor: CudaExecutor) -> None:
    """Two under way all the time: swaps, copies, growing buffers, digests, a launch that fails."""
    driver, rows = two_steps(executor)
    under_way = []
    copies = [
        [],
        [BlockCopy(0, 100), BlockCopy(1, 2, CopyKind.SWAP_OUT)],
        [BlockCopy(2, 101, CopyKind.SWAP_IN), BlockCopy(101, 102)],
        [BlockCopy(0, 2, CopyKind.SWAP_OUT), BlockCopy(2, 103, CopyKind.SWAP_IN)],
    ]
    for number in range(8):
        if len(under_way) == 2:
            under_way.pop(0).answer()
        batch = replace(driver.batch(rows), copies=copies[number % 4])
        if number:
            batch = replace(batch, input_sources=int32([0, 1]))
        if number == 6:
            batch = replace(batch, digest_blocks=[0, 100])
        under_way.append(executor.launch(batch))
        for row in rows:
            row.num_computed = len(row.tokens)
            row.tokens.append(0)
    for step in under_way:
        step.answer()
    # Inputs beyond the first size of a buffer, while the step before is under way.
    small = driver.batch([DrivenSequence([1])])
    large = with_much_asked(driver.batch([DrivenSequence([1] * 90) for _ in range(5)]))
    first = executor.launch(small)
    second = executor.launch(large)
    first.answer()
    third = executor.launch(small)
    second.answer()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("keep", "keep_in_order"):  # its results are on their way
            patch.setattr(executor._last, name, fail)
        with pytest.raises(RuntimeError, match="ill"):
            executor.launch(small)
    executor.launch(small).answer()
    third.answer()


def with_much_asked(batch: ExecutionBatch) -> ExecutionBatch:
    """Long histories go out, log-probabilities of every token come back."""
    penalties = Penalties(1.0, 0.5, 0.0, int32([0] * 20_000), 1)
    lens = batch.query_lens.tolist()
    return replace(
        batch,
        sampling=[row._replace(penalties=penalties) for row in batch.sampling],
        prompt_logprob_rows=range(len(lens)),
        prompt_logprob_targets=[int32([1] * length) for length in lens],
        prompt_num_logprobs=[20] * len(lens),
    )


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("the device is ill")


@pytest.mark.parametrize("graphs", [(), (2,)], ids=["eager", "graphs"])
def test_swaps_copies_larger_buffers_digests_and_failures_are_in_order(
    world: World, graphs: tuple[int, ...]
) -> None:
    all_kinds_of_steps(executor_on(world, *graphs))
    assert world.races == []


def test_the_largest_step_the_pools_and_the_graphs_are_made_in_order(
    world: World, tmp_path: Path
) -> None:
    driver, operations = played_device(world)
    wants = context(tmp_path, max_slots=4)
    assert wants.model is not None
    plan = build.planned_weights(wants, wants.model, driver.device)
    made = build.build_on(wants, wants.model, plan, driver, operations).executor
    assert isinstance(made, CudaExecutor)
    assert made.graphs.captured == (1, 2, 4)
    sequences = BatchDriver(made, num_blocks=20, block_size=4)
    sequences.generate([DrivenSequence([1, 2, 3]) for _ in range(3)], 3)
    assert world.races == []


def test_rows_on_their_way_to_layers_on_the_host_are_in_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, operations = played_device(world)
    with driver.computing():
        made = cut_executor(driver=driver, num_host_blocks=4, operations=operations)
    sequences = BatchDriver(made, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    rows = [DrivenSequence([1] * length) for length in (3, 60, 9)]
    for copies in ([], [BlockCopy(0, 1, CopyKind.SWAP_OUT)], [BlockCopy(1, 5, CopyKind.SWAP_IN)]):
        made.execute(replace(sequences.batch(rows), copies=copies, digest_blocks=[0]))
    with monkeypatch.context() as patch:
        patch.setattr(made._driver, "download", fail)
        with pytest.raises(RuntimeError, match="ill"):
            made.execute(sequences.batch(rows))
    made.execute(sequences.batch(rows))
    made.close()
    assert world.races == []


class ReadsResultsAtOnce(CudaDriver):
    """The copy stream does not wait for the step."""

    def download(self, target: Tensor, source: Tensor, *, is_watched: bool = False) -> Event:
        with torch.cuda.stream(self._copy):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._copy)
        return CudaEvent(self._copy, is_watched=is_watched)


class LetsResultsGo(CudaDriver):
    """Results are given back while they are copied."""

    def download(self, target: Tensor, source: Tensor, *, is_watched: bool = False) -> Event:
        self._copy.wait_stream(self._compute)
        with torch.cuda.stream(self._copy):
            target.copy_(source, non_blocking=True)
        return CudaEvent(self._copy, is_watched=is_watched)


class WaitsForTheStepAlone(CudaDriver):
    """The event is that of the step, not of the copy behind it."""

    def download(self, target: Tensor, source: Tensor, *, is_watched: bool = False) -> Event:
        super().download(target, source, is_watched=is_watched)
        return CudaEvent(self._compute, is_watched=is_watched)


class CopiesBeside(CudaDriver):
    """Inputs and swaps go by the copy stream, and nobody waits for it."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._copy):
            target.copy_(source, non_blocking=True)


class CopiesPartsBeside(CudaDriver):
    """So do the inputs of steps that a graph holds."""

    def copy_part(
        self, target: Tensor, first: int, source: Tensor, begin: int, num_bytes: int
    ) -> None:
        copy = self._copy
        cuda_driver.copy_bytes(target, first, source, begin, num_bytes, copy)


class TakesMemoryElsewhere(CudaDriver):
    """Buffers belong to the stream that is current by chance."""

    def device_buffer(self, num_bytes: int) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "driver",
    [ReadsResultsAtOnce, LetsResultsGo, WaitsForTheStepAlone, CopiesBeside, TakesMemoryElsewhere],
)
def test_a_driver_that_forgets_to_wait_is_found_out(world: World, driver: type[CudaDriver]) -> None:
    all_kinds_of_steps(executor_on(world, driver=driver))
    assert world.races


def test_inputs_of_a_graph_that_nobody_waits_for_are_found_out(world: World) -> None:
    ahead(executor_on(world, 8, driver=CopiesPartsBeside))
    assert world.races


def unwaited(self: Berth) -> dict[str, object]:
    assert self._layout is not None
    try:
        return dict(self._layout.arrays(self._results[: self._layout.num_bytes]))
    finally:
        self.free()


def first_berth(self: StagingRing) -> Berth:
    self._berths[0].free()
    return self._berths[0]


@pytest.mark.parametrize(
    ("owner", "name", "careless"),
    [
        (Berth, "collect", unwaited),
        (StagingRing, "take", first_berth),
        (CudaEvent, "wait", lambda _: None),
        (CudaDriver, "synchronize", lambda _: None),
    ],
)
def test_a_host_that_forgets_to_wait_is_found_out(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    owner: type[object],
    name: str,
    careless: Callable[..., object],
) -> None:
    monkeypatch.setattr(owner, name, careless)
    with contextlib.suppress(RuntimeError):  # a step whose results another one took
        all_kinds_of_steps(executor_on(world))
    assert world.races


def test_every_thread_that_speaks_to_the_device_has_it_for_its_current_one(world: World) -> None:
    """Else the runtime gives the thread a context on device 0, whatever the plane computes on."""
    executor = executor_on(world, 2)
    driver, rows = two_steps(executor)
    steps = [
        on_a_thread(lambda: executor.launch(driver.batch(rows))),
        on_a_thread(lambda: executor.launch(replace(driver.batch(rows), digest_blocks=[0]))),
    ]
    for step in steps:
        on_a_thread(step.wait)
        assert on_a_thread(step.answer).next_tokens.size == 2
    assert world.races == []


def on_a_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()
