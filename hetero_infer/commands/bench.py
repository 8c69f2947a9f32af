"""`hetero-infer bench NAME`: which benchmarks there are, and how one is run from its flags.

Imported with the command line, so it stays light; a benchmark is imported when it runs.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from hetero_infer.bench.settings import (
    AccuracySettings,
    InProcessSettings,
    KernelSettings,
    LatencySettings,
    LoadSettings,
    MemorySettings,
    OutputSettings,
    ThroughputSettings,
)
from hetero_infer.commands.options import options_of, with_options
from hetero_infer.config import EngineConfig, Settings
from planes.errors import ValidationError
from planes.settings import Layers, Setting, resolve, settings_of

if TYPE_CHECKING:
    from hetero_infer.bench.report import Draw, Result

PROGRAM = "hetero-infer"

BUSY = 0.05
"""Share of the processors that others may use before a result is doubtful."""

Action = Callable[[], int]
Runner = Callable[[Mapping[str, object]], "tuple[Result, dict[str, Any]]"]
"""Runs a benchmark on its flags; the result, and what it was told, for JSON."""

SettingsT = TypeVar("SettingsT", bound=OutputSettings)

ENGINE = [item.name for item in settings_of(EngineConfig)]

ConfigFile = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="JSON file of the engine's settings")
]


@dataclass(frozen=True, slots=True)
class RootCall:
    """What stands before `bench` on the command line: all its arguments, and the root's flags."""

    arguments: Sequence[str]
    flags: Mapping[str, object]


bench_app = typer.Typer(
    help="Measure speed, latency, memory, kernels, accuracy; results with their provenance.",
    no_args_is_help=False,
)


def _heading(item: Setting) -> str:
    if any(item.name == other.name for other in settings_of(OutputSettings)):
        return "Output"
    return "Engine" if item.name in ENGINE else "Benchmark"


ENGINE_OPTIONS = options_of(EngineConfig, lambda _: "Engine")


def _benchmark_options(cls: type) -> list[Any]:
    return options_of(cls, _heading)


@bench_app.command(name="throughput")
@with_options([*_benchmark_options(ThroughputSettings), *ENGINE_OPTIONS])
def throughput_command(
    context: typer.Context, *, config: ConfigFile = None, **flags: object
) -> Action:
    """Measure tokens a second of N streams at once, through gRPC."""

    def run(given: Mapping[str, object]) -> tuple[Result, dict[str, Any]]:
        engine, settings = _load_settings(ThroughputSettings, given)
        from hetero_infer.bench import throughput

        return throughput.run(engine, settings), _told(engine, settings)

    return _action(context, "throughput", ThroughputSettings, {**flags, "config": config}, run)


@bench_app.command(name="latency")
@with_options([*_benchmark_options(LatencySettings), *ENGINE_OPTIONS])
def latency_command(
    context: typer.Context, *, config: ConfigFile = None, **flags: object
) -> Action:
    """Measure the wait for the first token, between tokens, and beside a long prompt."""

    def run(given: Mapping[str, object]) -> tuple[Result, dict[str, Any]]:
        engine, settings = _load_settings(LatencySettings, given)
        from hetero_infer.bench import latency

        return latency.run(engine, settings), _told(engine, settings)

    return _action(context, "latency", LatencySettings, {**flags, "config": config}, run)


@bench_app.command(name="memory")
@with_options([*_benchmark_options(MemorySettings), *ENGINE_OPTIONS])
def memory_command(context: typer.Context, *, config: ConfigFile = None, **flags: object) -> Action:
    """Compare static, dynamic and paged memory on one trace; measure what both planes hold."""

    def run(given: Mapping[str, object]) -> tuple[Result, dict[str, Any]]:
        engine = _engine(given)
        settings = resolve(MemorySettings, Layers(flags=given))
        from hetero_infer.bench import memory

        return memory.run(engine, settings), _told(engine, settings)

    return _action(context, "memory", MemorySettings, {**flags, "config": config}, run)


@bench_app.command(name="kernels")
@with_options(_benchmark_options(KernelSettings))
def kernels_command(context: typer.Context, **flags: object) -> Action:
    """Measure the machine's roofs, then each kernel beside its roofline."""

    def run(given: Mapping[str, object]) -> tuple[Result, dict[str, Any]]:
        settings = resolve(KernelSettings, Layers(flags=given))
        _choose_instructions(settings)
        from hetero_infer.bench import kernels

        return kernels.run(settings), _told(None, settings)

    return _action(context, "kernels", KernelSettings, flags, run)


@bench_app.command(name="accuracy")
@with_options(_benchmark_options(AccuracySettings))
def accuracy_command(context: typer.Context, **flags: object) -> Action:
    """Measure what each format loses: perplexity and KL of the logits against float32."""

    def run(given: Mapping[str, object]) -> tuple[Result, dict[str, Any]]:
        settings = resolve(AccuracySettings, Layers(flags=given))
        _ = settings.pairs  # what is wrong with them is said before anything is compiled
        _choose_instructions(settings)
        from hetero_infer.bench import accuracy

        return accuracy.run(settings), _told(None, settings)

    return _action(context, "accuracy", AccuracySettings, flags, run, is_timed=False)


def _choose_instructions(settings: InProcessSettings) -> None:
    """Say where compiled kernels are kept and what they are compiled for, before any is there."""
    from compute_plane.config import ComputePlaneConfig
    from compute_plane.executor.kernel_cache import prepare_kernel_cache
    from kernels.cpu.instruction_set import select_instruction_set

    select_instruction_set(settings.instruction_set)
    config = ComputePlaneConfig(kernel_cache=settings.kernel_cache)
    prepare_kernel_cache(config.kernel_cache_root)


def _engine(flags: Mapping[str, object]) -> EngineConfig:
    """Resolve the engine's configuration; name what its file says in vain."""
    settings = Settings(flags)
    for key in settings.unknown_keys:
        name = settings.layers.file_name
        sys.stderr.write(f"{PROGRAM}: warning: {name}: unknown key {key!r} is ignored\n")
    return settings.resolve(EngineConfig)


def _load_settings(
    cls: type[SettingsT], flags: Mapping[str, object]
) -> tuple[EngineConfig, SettingsT]:
    """Resolve both configurations. Raises ValidationError for an engine's flag with --target."""
    settings = resolve(cls, Layers(flags=flags))
    if isinstance(settings, LoadSettings) and settings.target is not None:
        for name in ENGINE:
            if flags.get(name) is not None:
                spelling = f"--{name.replace('_', '-')}"
                raise ValidationError(
                    f"{spelling} means nothing with --target: that server has its own", field=name
                )
    return _engine(flags), settings


def _told(engine: EngineConfig | None, settings: OutputSettings) -> dict[str, Any]:
    """Return settings for JSON; with a target, the engine's are not known here."""
    told = {"benchmark": dataclasses.asdict(settings)}
    if engine is not None and getattr(settings, "target", None) is None:
        told["engine"] = dataclasses.asdict(engine)
    return told


def _action(
    context: typer.Context,
    name: str,
    cls: type[OutputSettings],
    flags: Mapping[str, object],
    run: Runner,
    *,
    is_timed: bool = True,
) -> Action:
    """Return what runs a benchmark, prints its tables and writes its files.

    `is_timed`: whether its figures are times, which others on the machine make longer.
    """
    root: RootCall = context.obj

    def act() -> int:
        for flag, value in root.flags.items():
            if value is not None:
                raise ValidationError(
                    f"--{flag.replace('_', '-')} belongs behind `bench {name}`", field=flag
                )
        from hetero_infer.bench.provenance import CpuWatch, describe_origin
        from hetero_infer.bench.report import Destination, to_object, write

        destination = Destination.of(name, resolve(cls, Layers(flags=flags)))
        origin = describe_origin(shlex.join([PROGRAM, *root.arguments]))
        watch = CpuWatch()
        result, told = run(flags)
        # A server that runs already is one of the others.
        others = None if flags.get("target") else watch.share_of_others()
        whole = to_object(name, result, origin=origin, settings=told, share_of_others=others)
        write(result, whole, destination, _draw_of(name))
        if is_timed and others is not None and others > BUSY:
            sys.stderr.write(
                f"{PROGRAM}: warning: other processes used {100 * others:.0f} % of the processors "
                "meanwhile: these are figures of a busy machine\n"
            )
        return 0

    return act


def _draw_of(name: str) -> Draw:
    from hetero_infer.bench import plots

    return {
        "throughput": plots.draw_throughput,
        "latency": plots.draw_latency,
        "memory": plots.draw_memory,
        "kernels": plots.draw_kernels,
        "accuracy": plots.draw_accuracy,
    }[name]
