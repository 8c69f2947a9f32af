"""What the black-box suites run a model on: `--device`, and `--executor` for the stand-in.

    --device cpu                     the CPU executor; so it is unless told otherwise
    --device cuda, --device cuda:1   the CUDA executor on a GPU
    --executor cuda --device cpu     the CUDA executor on torch's CPU device, with reference
                                     operations: slow, and it needs no GPU

A test that depends on it has the fixture `target`. Where what was asked for is not there, it is
skipped with the reason; a test without the fixture is the same on every device, and is skipped
unless `--device cpu` is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from compute_plane.config import ComputePlaneConfig
from compute_plane.device import choose_placement
from compute_plane.errors import DeviceUnavailableError
from compute_plane.executor.interface import GPUExecutor
from compute_plane.executor.registry import ExecutorContext, build_executor
from compute_plane.model.loader import LoadedModel
from hetero_infer.config import EngineConfig
from hetero_infer.replay.comparison import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE
from kernels.cpu.instruction_set import selected_instruction_set
from planes.errors import ConfigError

SUITES = ("integration", "faults", "golden", "properties")
"""The folders whose tests are the same for every device."""

NUM_BLOCKS = 1024
"""Of a pool, unless a test says otherwise: what it is on a CPU."""

NOT_OF_A_DEVICE = "the same on every device: runs with --device cpu"


@dataclass(frozen=True, slots=True)
class Target:
    """An executor on a device."""

    executor: str
    device: str

    @classmethod
    def chosen(cls, executor: str | None, device: str) -> Target:
        """Return what the command line means; without an executor, the device's own."""
        return cls(executor or ("cpu" if device == "cpu" else "cuda"), device)

    def missing(self) -> str | None:
        """Return why it cannot run here, in one line; None if it can."""
        try:
            choose_placement(ComputePlaneConfig(executor=self.executor, device=self.device))
        except ConfigError as error:
            return error.message
        return None

    @property
    def keeps_bits(self) -> bool:
        """Whether a sequence is promised the same bits in any company (DESIGN §6).

        Products of GEMM libraries may depend on how many rows a step has.
        """
        return self.executor == "cpu"

    def tolerance(self, dtype: str = "auto") -> float:
        """Return how far a log-probability may be from the reference's, in nats."""
        is_float32 = dtype == "float32" or (dtype == "auto" and self == STAND_IN)
        return FLOAT32_TOLERANCE if is_float32 else BFLOAT16_TOLERANCE

    def config(self, **settings: object) -> EngineConfig:
        """Return a configuration for it; on a GPU too, a pool that leaves room for another one."""
        named = {"executor": self.executor, "device": self.device, "max_num_blocks": NUM_BLOCKS}
        return EngineConfig(**(named | settings))  # type: ignore[arg-type]

    def block_size(self, wanted: int) -> int:
        """Return the smallest size of a block, of `wanted` tokens at least, that it can have."""
        if self.executor != "cuda" or self.device == "cpu":
            return wanted
        from kernels.cuda.attention_variant import BLOCK_SIZES

        return next(size for size in BLOCK_SIZES if size >= wanted)

    @property
    def flags(self) -> list[str]:
        """The same on a command line."""
        return [
            f"--executor={self.executor}", f"--device={self.device}",
            f"--max-num-blocks={NUM_BLOCKS}",
        ]  # fmt: skip

    @contextlib.contextmanager
    def running(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        dtype: str = "float32",
        kv_cache_dtype: str = "auto",
        keep_logits: bool = False,
    ) -> Iterator[GPUExecutor]:
        """Build the executor in this process; a number format it does not have is skipped."""
        context = ExecutorContext(
            spec=model.spec,
            model=model,
            block_size=block_size,
            num_blocks=num_blocks,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            instruction_set=selected_instruction_set().name,
            device=self.device,
            max_tokens=16384,
            num_threads=2,
            kernel_cache=ComputePlaneConfig().kernel_cache_root,
            keep_logits=keep_logits,
        )
        try:
            executor = build_executor(self.executor, context).executor
        except DeviceUnavailableError as error:
            if error.field not in ("dtype", "kv_cache_dtype"):
                raise
            pytest.skip(error.message)
        with executor if hasattr(executor, "__exit__") else contextlib.nullcontext():
            yield executor


STAND_IN = Target("cuda", "cpu")
"""The CUDA executor where there is no GPU."""


def add_options(parser: pytest.Parser) -> None:
    """Declare both options."""
    group = parser.getgroup("devices")
    group.addoption("--device", default="cpu", metavar="cpu|cuda|cuda:N", help="run models there")
    group.addoption("--executor", metavar="cpu|cuda", help="run them with it; default: by device")


def chosen(config: pytest.Config) -> Target:
    """Return what the command line asks for."""
    return Target.chosen(config.getoption("--executor"), config.getoption("--device"))


def skip_what_cannot_run(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests of the suites that need what is not there, or not what was asked for."""
    target = chosen(config)
    if target == Target("cpu", "cpu"):
        return
    reason = target.missing()
    folders = {Path(__file__).parent / name for name in SUITES}
    for item in items:
        if folders.isdisjoint(item.path.parents):
            continue
        depends = "target" in getattr(item, "fixturenames", ())
        if not depends or reason is not None:
            why = reason if depends and reason is not None else NOT_OF_A_DEVICE
            item.add_marker(pytest.mark.skip(reason=why))
