"""What a launch costs, whatever it launches, and what waking from a wait for the device costs.

A decode step is a chain of kernels of which each needs the one before. Their number times what a
kernel costs that does next to nothing is the least that a step takes beside reading its weights.
From capability 9.0 on a kernel may be launched while the one before still runs and wait inside for
its end (`kernels.cuda.instructions.early_launch`): what that saves is measured too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bench.gpu.device import as_graph, current_stream, milliseconds
from kernels.cuda.fitted_ptx import EARLY_LAUNCHES
from kernels.cuda.launch import LoadedKernel
from kernels.cuda.variant import Expectation

LAUNCHES: Final = 512
"""Kernels of a chain."""
REPEATS: Final = 9
WAITS: Final = 20
"""Waits for a device at work, of each kind."""
WORK_CYCLES: Final = 1_000_000
"""Of the device's clock; half a millisecond or more."""
# All threads wait before anything is read, and none may leave before: a kernel that ended without
# having waited would let the next one run beside the one before itself.
COUNT_PTX: Final = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry count(.param .u64 place)
{
    .reg .b64 %a;
    .reg .b32 %n, %t;
    .reg .pred %p;
    griddepcontrol.launch_dependents;
    griddepcontrol.wait;
    mov.u32 %t, %tid.x;
    setp.ne.u32 %p, %t, 0;
    @%p ret;
    ld.param.u64 %a, [place];
    cvta.to.global.u64 %a, %a;
    ld.global.u32 %n, [%a];
    add.u32 %n, %n, 1;
    st.global.u32 [%a], %n;
    ret;
}
"""


EXPECTATION: Final = Expectation(registers=32, begins_early=True)


@dataclass(frozen=True, slots=True)
class Counter:
    """The variant of `COUNT_PTX`: one thread adds one to the number that it is given."""

    name: str = "count"
    threads: int = 32
    arguments: tuple[str, ...] = ("int32*",)
    expectation: Expectation = EXPECTATION

    def kernel(self) -> Callable[..., None]:
        """It is written in PTX."""
        raise NotImplementedError


COUNTER: Final = Counter()


def launch_costs() -> dict[str, float]:
    """Return, in µs, what one of a chain of kernels costs, and a wait, on the CUDA device.

    `graph_us`, `stream_us`: kernels of torch's that add one to a number, in a graph and launched
    one by one. `counter_us`, `early_counter_us`: one that counts, in a graph, launched when the one
    before has ended and while it runs; where the device can. `spinning_wait_us`,
    `blocking_wait_us`: from the launch of half a millisecond's work to the return of either wait
    for it: their difference is what waking costs. Raises RuntimeError if a counter did not wait for
    the one before; DriverError.
    """
    import torch

    number = torch.zeros(1, device="cuda")

    def chain() -> None:
        for _ in range(LAUNCHES):
            number.add_(1)

    costs = {"graph_us": _us_of_one(as_graph(chain, "cuda")), "stream_us": _us_of_one(chain)}
    if torch.cuda.get_device_capability() >= EARLY_LAUNCHES:
        for name, is_early in (("counter_us", False), ("early_counter_us", True)):
            costs[name] = _us_of_counter(is_early)
    for name, blocks in (("spinning_wait_us", False), ("blocking_wait_us", True)):
        costs[name] = statistics.median(_wait_us(blocks) for _ in range(WAITS))
    return costs


def say_costs(costs: dict[str, float]) -> str:
    """Return them as a line."""
    early = ""
    if "counter_us" in costs:
        early = (
            f" ({costs['early_counter_us']:.2f} for {costs['counter_us']:.2f} if launched early)"
        )
    return (
        f"a kernel that does next to nothing: {costs['graph_us']:.2f} µs in a graph{early}, "
        f"{costs['stream_us']:.2f} launched; waiting for half a millisecond: "
        f"{costs['spinning_wait_us']:.0f} µs spinning, {costs['blocking_wait_us']:.0f} blocking"
    )


def _us_of_one(queue_chain: Callable[[], None]) -> float:
    return statistics.median(milliseconds(queue_chain, REPEATS)) * 1e3 / LAUNCHES


def _us_of_counter(is_early: bool) -> float:
    """Return what one of a chain of counters costs in a graph, if none was lost."""
    import torch

    counted = torch.zeros(1, dtype=torch.int32, device="cuda")
    counter = LoadedKernel(COUNTER, COUNT_PTX.encode(), begins_early=is_early)
    chains = 0

    def chain() -> None:
        nonlocal chains
        chains += 1
        for _ in range(LAUNCHES):
            counter.launch((1, 1, 1), current_stream("cuda"), counted.data_ptr())

    replay = as_graph(chain, "cuda")  # calls it twice, and what it captures does not run
    chains -= 1

    def counted_replay() -> None:
        nonlocal chains
        chains += 1
        replay()

    cost = _us_of_one(counted_replay)
    if (found := int(counted.item())) != chains * LAUNCHES:
        raise RuntimeError(f"{chains * LAUNCHES} kernels, each after the other, counted to {found}")
    return cost


def _wait_us(blocks: bool) -> float:
    """Return how long it takes until a wait for the device's work returns."""
    import torch

    done = torch.cuda.Event(blocking=blocks)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(WORK_CYCLES)  # torch's own tests measure so: nothing public does that
    done.record()
    done.synchronize()
    return (time.perf_counter() - began) * 1e6
