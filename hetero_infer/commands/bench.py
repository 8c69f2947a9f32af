"""`hetero-infer bench NAME`: which benchmarks there are, and how one is run from its flags.

Imported with the command line, so it stays light; a benchmark is imported when it runs.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_infer.bench.settings import (
    AccuracySettings,
    InProcessSettings,
    KernelSettings,
    LatencySettings,
    LinkSettings,
    LoadSettings,
    MemorySettings,
    NeighbourSettings,
    OutputSettings,
    StartSettings,
    ThroughputSettings,
)
from hetero_infer.commands.client_options import refuse_engine_flags
from hetero_infer.commands.options import ask_for_command, options_of, with_options
from hetero_infer.config import EngineConfig, Settings
from planes.errors import ValidationError
from planes.settings import Layers, Setting, resolve, settings_of

if TYPE_CHECKING:
    from hetero_infer.bench.report import Draw, Result

PROGRAM = "hetero-infer"

BUSY = 0.05
"""Share of the processors that others may use before a result is doubtful."""

Action = Callable[[], int]

ENGINE = [item.name for item in settings_of(EngineConfig)]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark: `run` of the module `hetero_infer.bench.NAME`, drawn by `plots.draw_NAME`.

    `is_timed`: whether its figures are times, which others on the machine make longer. `varies`:
    settings of the engine that it tries itself, so that nobody else can give them.
    """

    name: str
    settings: type[OutputSettings]
    help: str
    is_timed: bool = True
    varies: frozenset[str] = frozenset()

    @property
    def has_engine(self) -> bool:
        """Whether it starts planes, and takes their settings."""
        return not issubclass(self.settings, InProcessSettings)


BENCHMARKS = (
    Benchmark(
        "throughput",
        ThroughputSettings,
        "Measure tokens a second of N streams at once, through gRPC, and who takes the processors.",
    ),
    Benchmark(
        "latency",
        LatencySettings,
        "Measure the wait for the first token, between tokens, and beside a long prompt.",
    ),
    Benchmark(
        "neighbour", NeighbourSettings, "Measure what another process that never rests costs."
    ),
    Benchmark("start", StartSettings, "Measure from the start of a process to its first token."),
    Benchmark(
        "link",
        LinkSettings,
        "Measure the link of the planes: idle time, delays, bytes, one or two steps under way.",
        varies=frozenset({"pipeline_depth"}),
    ),
    Benchmark(
        "memory",
        MemorySettings,
        "Compare static, dynamic and paged memory on one trace; measure what both planes hold.",
    ),
    Benchmark(
        "kernels", KernelSettings, "Measure the machine's roofs, then each kernel beside its roof."
    ),
    Benchmark(
        "accuracy",
        AccuracySettings,
        "Measure what each format loses: perplexity and KL of the logits against float32.",
        is_timed=False,
    ),
)


@dataclass(frozen=True, slots=True)
class RootCall:
    """What stands before `bench` on the command line: all its arguments, and the root's flags."""

    arguments: Sequence[str]
    flags: Mapping[str, object]


bench_app = typer.Typer(
    help="Measure speed, waits, starts, memory, kernels, accuracy; results with their provenance.",
    callback=ask_for_command,
    invoke_without_command=True,
)

CONFIG_FILE = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="JSON file of the engine's settings"),
    ],
)


def _heading(item: Setting) -> str:
    if any(item.name == other.name for other in settings_of(OutputSettings)):
        return "Output"
    return "Engine" if item.name in ENGINE else "Benchmark"


ENGINE_OPTIONS = options_of(EngineConfig, lambda _: "Engine")


def _register(benchmark: Benchmark) -> None:
    """Make a command of a benchmark."""
    options = options_of(benchmark.settings, _heading)
    if benchmark.has_engine:
        given = [option for option in ENGINE_OPTIONS if option.name not in benchmark.varies]
        options = [CONFIG_FILE, *options, *given]

    @bench_app.command(name=benchmark.name, help=benchmark.help)
    @with_options(options)
    def command(context: typer.Context, **flags: object) -> Action:
        return lambda: _act(benchmark, context.obj, flags)


for _benchmark in BENCHMARKS:
    _register(_benchmark)


def _act(benchmark: Benchmark, root: RootCall, flags: Mapping[str, object]) -> int:
    """Run a benchmark, print its tables, write its files. Raises EngineError."""
    for flag, value in root.flags.items():
        if value is not None:
            raise ValidationError(
                f"--{flag.replace('_', '-')} belongs behind `bench {benchmark.name}`", field=flag
            )
    from hetero_infer.bench.provenance import CpuWatch, describe_origin
    from hetero_infer.bench.report import Destination, to_object, write

    settings = resolve(benchmark.settings, Layers(flags=flags))
    settings.validate()
    destination = Destination.of(benchmark.name, settings)
    origin = describe_origin(shlex.join([PROGRAM, *root.arguments]))
    watch = CpuWatch()
    result, told = _run(benchmark, settings, flags)
    # A server that runs already is one of the others.
    others = None if flags.get("target") else watch.share_of_others()
    whole = to_object(benchmark.name, result, origin=origin, settings=told, share_of_others=others)
    write(result, whole, destination, _draw_of(benchmark))
    if benchmark.is_timed and others is not None and others > BUSY:
        sys.stderr.write(
            f"{PROGRAM}: warning: other processes used {100 * others:.0f} % of the processors "
            "meanwhile: these are figures of a busy machine\n"
        )
    return 0


def _run(
    benchmark: Benchmark, settings: OutputSettings, flags: Mapping[str, object]
) -> tuple[Result, dict[str, Any]]:
    """Return the result, and what the benchmark was told, for JSON.

    With a target, the engine's settings are not known here.
    """
    told: dict[str, Any] = {"benchmark": dataclasses.asdict(settings)}
    if isinstance(settings, InProcessSettings):
        _choose_instructions(settings)
        return _module(benchmark.name).run(settings), told
    has_target = isinstance(settings, LoadSettings) and settings.target is not None
    if has_target:
        refuse_engine_flags(flags)
    engine = _engine(flags)
    if not has_target:
        told["engine"] = dataclasses.asdict(engine)
        for name in benchmark.varies:
            del told["engine"][name]
    return _module(benchmark.name).run(engine, settings), told


def _choose_instructions(settings: InProcessSettings) -> None:
    """Say where compiled kernels are kept and what they are compiled for, before any is there."""
    from compute_plane.config import ComputePlaneConfig
    from compute_plane.cpu.kernel_cache import prepare_kernel_cache
    from kernels.cpu.instruction_set import select_instruction_set

    select_instruction_set(settings.instruction_set)
    config = ComputePlaneConfig(kernel_cache=settings.kernel_cache)
    prepare_kernel_cache(config.kernel_cache_root)


def _engine(flags: Mapping[str, object]) -> EngineConfig:
    """Resolve the engine's configuration; name what its file says in vain."""
    settings = Settings(flags)
    for line in settings.in_vain():
        sys.stderr.write(f"{PROGRAM}: warning: {line}\n")
    return settings.resolve(EngineConfig)


def _module(name: str) -> Any:  # noqa: ANN401 - a module
    return importlib.import_module(f"hetero_infer.bench.{name}")


def _draw_of(benchmark: Benchmark) -> Draw:
    draw: Draw = getattr(_module("plots"), f"draw_{benchmark.name}")
    return draw
