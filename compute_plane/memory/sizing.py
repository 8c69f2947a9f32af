"""How much memory the weights and the KV pools take, and how many blocks fit.

Weights, then the largest step, then the graphs of decode steps take their part of a device's
memory; the pool gets the rest of the share that all of it may have:

    │ others │ weights │ largest step │ graphs │ KV pool            │ left alone │
    └────────── used ─────────────────┘        │                    │
    └──────────────────────── utilization · total ──────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from planes.errors import ConfigError

MEMINFO: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/sys/fs/cgroup")
FILE_CACHES: Final = ("active_file", "inactive_file")
"""Lines of a control group's memory.stat that count pages the kernel takes back when it must."""

MIB: Final = 1024 * 1024

LEAST_TOKENS: Final = 2048
"""A pool that sizes itself holds one sequence of so many tokens at least, or of the model's length
if that is less: what a control plane takes by default (`max_model_len`)."""

SIZE_BITS: Final = 9
"""A pool that sizes itself has so many leading bits in its number of blocks, then zeros.

So a plane that is started again finds the same size although a little more or less is free: its
control plane goes on only where the pool is not smaller. It costs 0.4 % of the pool at most.
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a device, or of this machine: all there is, and what nobody holds."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        """What somebody holds."""
        return self.total_bytes - self.free_bytes


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """How many blocks a pool is to have.

    `wanted`: as told; None: as many as fit, but not more than `useful`: those of all slots, each at
    the model's length. `least`: of the sequence that a pool must hold if it sizes itself.
    """

    wanted: int | None
    useful: int
    least: int

    @classmethod
    def of(
        cls, wanted: int | None, *, block_size: int, context_length: int, max_slots: int
    ) -> BlockDemand:
        """Return the demand of a plane that remembers `max_slots` sequences."""
        useful = max_slots * -(-context_length // block_size)
        return cls(wanted, useful, -(-min(context_length, LEAST_TOKENS) // block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBudget:
    """What a KV pool may take: the share of all memory less what others have.

    `limit_bytes`: what everything on the device may take together. `used_bytes`: taken already,
    `aside_bytes`: still to be taken by something else. `words`: says all that in an error.
    """

    limit_bytes: int
    used_bytes: int
    aside_bytes: int
    words: str

    @property
    def pool_bytes(self) -> int:
        """What is left for the pool."""
        return max(0, self.limit_bytes - self.used_bytes - self.aside_bytes)


def choose_num_blocks(demand: BlockDemand, budget: PoolBudget, block_bytes: int) -> int:
    """Return the blocks of a pool. Raises ConfigError, naming `max_num_blocks`.

    As many as wanted, if they fit; else as many as fit, rounded down as `SIZE_BITS` says.
    """
    fits = budget.pool_bytes // block_bytes
    if demand.wanted is not None:
        _check_pool_fits(demand.wanted, block_bytes, budget.pool_bytes, budget.words)
        return demand.wanted
    if fits < demand.least:
        raise ConfigError(
            f"max_num_blocks: {fits} blocks of {block_bytes} bytes fit, one sequence of "
            f"{LEAST_TOKENS} tokens or of the model's length needs {demand.least}: {budget.words}",
            field="max_num_blocks",
        )
    return min(max(demand.least, _rounded(fits)), demand.useful)


def _rounded(num_blocks: int) -> int:
    grain = 1 << max(0, num_blocks.bit_length() - SIZE_BITS)
    return num_blocks - num_blocks % grain


def size_in_host_memory(
    demand: BlockDemand,
    swap_bytes: int,
    block_bytes: int,
    *,
    utilization: float,
    memory: Memory | None,
) -> tuple[int, int]:
    """Return the blocks of the KV pool and of the host pool where both lie in host memory.

    Raises ConfigError as `check_pools_fit` and `choose_num_blocks` do, and where as many blocks as
    fit are wanted of a system that does not say how much memory there is.
    """
    if demand.wanted is not None:
        available = None if memory is None else memory.free_bytes
        num_host_blocks = check_pools_fit(demand.wanted, swap_bytes, block_bytes, available)
        return demand.wanted, num_host_blocks
    if memory is None:
        raise ConfigError(
            "max_num_blocks: auto, but this system does not say how much memory there is; "
            "give a number",
            field="max_num_blocks",
        )
    budget = PoolBudget(
        limit_bytes=int(utilization * memory.total_bytes),
        used_bytes=memory.used_bytes,
        aside_bytes=swap_bytes,
        words=f"of {memory.total_bytes // MIB} MiB a share of {utilization:g} may be taken "
        f"(--gpu-memory-utilization), {memory.used_bytes // MIB} MiB are taken, "
        f"{swap_bytes // MIB} MiB are for swapped blocks (--swap-space)",
    )
    return choose_num_blocks(demand, budget, block_bytes), size_host_pool(swap_bytes, block_bytes)


def host_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Memory | None:
    """Return the memory this process may have, or None where the system does not say.

    That of the system or of the control group, whichever leaves less. File caches of the group
    count as free: the kernel drops them before it refuses memory.
    """
    candidates: list[Memory] = []
    lines = dict(line.partition(":")[::2] for line in _read(meminfo).splitlines())
    if "MemAvailable" in lines:
        available, total = (
            int(lines.get(name, lines["MemAvailable"]).split()[0]) * 1024
            for name in ("MemAvailable", "MemTotal")
        )
        candidates.append(Memory(total, available))
    limit, used = (_read(cgroup / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():  # "max": no limit
        stat = dict(line.split() for line in _read(cgroup / "memory.stat").splitlines())
        caches = sum(int(stat.get(name, 0)) for name in FILE_CACHES)
        held = max(0, int(used) - caches)
        candidates.append(Memory(int(limit), max(0, int(limit) - held)))
    return min(candidates, key=lambda memory: memory.free_bytes, default=None)


def available_memory_bytes() -> int | None:
    """Return the bytes this process may still take, or None where the system does not say."""
    memory = host_memory()
    return None if memory is None else memory.free_bytes


def check_weights_fit(num_bytes: int, available_bytes: int | None) -> None:
    """Raise ConfigError, naming `model`, if weights of so many bytes cannot fit into memory.

    The system would grant the memory and end the process when it is used. `available_bytes` None
    (unknown) passes.
    """
    if available_bytes is not None and num_bytes > available_bytes:
        raise ConfigError(
            f"model: its weights need {num_bytes // MIB} MiB, "
            f"but only {available_bytes // MIB} MiB are available",
            field="model",
        )


def check_pools_fit(
    num_blocks: int, swap_bytes: int, block_bytes: int, available_bytes: int | None
) -> int:
    """Return the blocks of the host pool; raise ConfigError if the pools cannot fit into memory.

    The error names `max_num_blocks` or `swap_space`. Pools are filled lazily, but what is promised
    to the control plane must be there when it is used. `available_bytes` None (unknown) passes.
    """
    if available_bytes is not None:
        _check_pool_fits(num_blocks, block_bytes, available_bytes)
        if num_blocks * block_bytes + swap_bytes > available_bytes:
            raise ConfigError(
                f"--swap-space needs {swap_bytes // MIB} MiB beside the KV pool's "
                f"{num_blocks * block_bytes // MIB} MiB, but only {available_bytes // MIB} MiB are "
                "available",
                field="swap_space",
            )
    return size_host_pool(swap_bytes, block_bytes)


def size_host_pool(swap_bytes: int, block_bytes: int) -> int:
    """Return the blocks of the host pool. Raises ConfigError where swapping is wanted and none is.

    The error names `swap_space`.
    """
    if not swap_bytes:
        return 0
    num_blocks = swap_bytes // block_bytes
    if not num_blocks:
        raise ConfigError(
            f"--swap-space is {swap_bytes} bytes, one block takes {block_bytes}: nothing could be "
            "swapped (0: preempted requests are computed anew)",
            field="swap_space",
        )
    return num_blocks


def _check_pool_fits(
    num_blocks: int, block_bytes: int, available_bytes: int, words: str = ""
) -> None:
    needed = num_blocks * block_bytes
    if needed <= available_bytes:
        return
    raise ConfigError(
        f"--max-num-blocks {num_blocks} needs {needed // MIB} MiB for the KV pool "
        f"({block_bytes} bytes a block), but only {available_bytes // MIB} MiB are available: "
        f"at most {available_bytes // block_bytes} blocks fit" + (f" ({words})" if words else ""),
        field="max_num_blocks",
    )


def _read(path: Path) -> str:
    """Return the text of a system file, empty where it does not exist or may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
