"""Measure other CPU engines and this one in turns: `python -m bench.peers install`, then `run`.

Exit code 0: everything was measured; 1: a peer failed; 2: something is missing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import models, results
from bench.peers.cases import CASES, CASES_TO_NAME, Case, Line
from bench.peers.contention import QuietRule
from bench.peers.environments import DEFAULT_DIRECTORY, ENVIRONMENTS, install, is_installed
from bench.peers.shapes import SHAPES
from bench.peers.turns import RunOptions, run_line
from hetero_infer.bench.provenance import describe_origin, now, usable_cpus
from hetero_infer.bench.report import finite
from planes.errors import ConfigError, EngineError

SCHEMA = 1
LOG_NAME = "peers.log"
CASE_NAMES = [case.name for case in (*CASES, *CASES_TO_NAME)]
SHAPE_NAMES = [shape.name for shape in SHAPES]
ENVIRONMENT_NAMES = [environment.name for environment in ENVIRONMENTS]
PEER_NAMES = [name for name in ENVIRONMENT_NAMES if name != "ovexport"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and return the exit code."""
    options = parse(arguments)
    # Otherwise what was started would be left behind, at work.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if options.command == "install":
            install(options.directory, options.peers, options.pip, options.jobs)
            models.make(options.directory, options.peers)
            models.make_shapes(options.directory, [s for s in SHAPES if s.name in options.shapes])
            return 0
        return _run(options)
    except EngineError as error:
        print(f"bench.peers: {error.message}", file=sys.stderr)
        return 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    setup = commands.add_parser("install", help="make the environments and the model files")
    setup.add_argument(
        "--pip", type=shlex.split, default=[], metavar="OPTIONS", help="options for pip install"
    )
    setup.add_argument("--jobs", type=_positive, default=usable_cpus(), help="of the compiler")
    setup.add_argument(
        "--shapes", type=_list_of(SHAPE_NAMES), default=[], metavar="NAMES",
        help=f"random weights besides, of {','.join(SHAPE_NAMES)}; a gigabyte a format",
    )  # fmt: skip
    run = commands.add_parser("run", help="measure, write one table and JSON")
    run.add_argument(
        "--cases", type=_list_of(CASE_NAMES), default=[case.name for case in CASES],
        metavar="NAMES", help=f"of {','.join(CASE_NAMES)}; of shapes and at depth only if named",
    )  # fmt: skip
    run.add_argument(
        "--only", default="", metavar="TEXT", help="lines whose peer or weights have it"
    )
    run.add_argument("--threads", type=_positive, default=usable_cpus(), help="of every engine")
    run.add_argument("--repeat", type=_positive, default=3, help="rounds; figures are medians")
    run.add_argument("--seed", type=int, default=0, help="of the drawn prompts")
    run.add_argument(
        "--others", type=float, default=0.05, metavar="CORES", help="others may use so much of one"
    )
    run.add_argument("--tries", type=_positive, default=4, help="for a quiet repetition")
    run.add_argument("--output", type=Path, default=Path("bench-results"), help="directory")
    for command, names in ((setup, ENVIRONMENT_NAMES), (run, PEER_NAMES)):
        command.add_argument(
            "--directory", type=Path, default=DEFAULT_DIRECTORY, help="of the environments"
        )
        command.add_argument(
            "--peers", type=_list_of(names), default=names, metavar="NAMES",
            help=f"some of {','.join(names)}",
        )  # fmt: skip
    return parser.parse_args(arguments)


def chosen_lines(options: argparse.Namespace) -> list[tuple[Case, Line]]:
    """Return what is to be measured. Raises ConfigError if that is nothing, or not installed."""
    lines = [
        (case, line)
        for case in (*CASES, *CASES_TO_NAME)
        if case.name in options.cases
        for line in case.lines
        if line.peer.environment in options.peers
        and options.only.lower() in f"{line.peer.name} {line.peer.weights}".lower()
    ]
    if not lines:
        raise ConfigError("no line is left of the chosen cases and peers", field="only")
    needed = {line.peer.environment for _, line in lines}
    missing = [f"environment {n}" for n in needed if not is_installed(options.directory, n)]
    files = {model for _, line in lines for model in (line.peer.model, line.own_model)}
    missing += [
        f"model {name}" for name in files if not models.model_path(options.directory, name).exists()
    ]
    if missing:
        raise ConfigError(
            f"{options.directory} lacks {', '.join(sorted(missing))}; "
            "`python -m bench.peers install` makes them",
            field="directory",
        )
    return lines


def _run(options: argparse.Namespace) -> int:
    lines = chosen_lines(options)
    options.output.mkdir(parents=True, exist_ok=True)
    origin = describe_origin(shlex.join(["python", "-m", "bench.peers", *sys.argv[1:]]))
    done: list[results.LineResult] = []
    with (options.output / LOG_NAME).open("w", encoding="utf-8") as log:
        told = RunOptions(
            directory=options.directory,
            threads=options.threads,
            repeat=options.repeat,
            seed=options.seed,
            quiet=QuietRule(options.others, options.tries),
            log=log,
        )
        for case, line in lines:
            print(f"{case.name}: {line.peer.name}, {line.peer.weights}", file=sys.stderr)
            done.append(run_line(case, line, told))
            _write(options, origin, done)  # what is done is kept if the next one ends it all
    print(results.to_markdown(done), end="")
    return 1 if any(result.fault is not None for result in done) else 0


def _write(
    options: argparse.Namespace, origin: dict[str, Any], done: Sequence[results.LineResult]
) -> None:
    whole = {
        "benchmark": "peers",
        "schema": SCHEMA,
        **origin,
        "ended": now(),
        "settings": {
            name: getattr(options, name)
            for name in ("threads", "repeat", "seed", "others", "tries")
        },
        **results.to_object(done),
    }
    text = json.dumps(finite(whole), ensure_ascii=False, indent=1, allow_nan=False)
    (options.output / "peers.json").write_text(text + "\n", encoding="utf-8")
    (options.output / "peers.md").write_text(results.to_markdown(done), encoding="utf-8")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _list_of(names: Sequence[str]) -> Any:  # noqa: ANN401 - a parser for argparse
    def parse_names(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
        return chosen

    return parse_names


if __name__ == "__main__":
    sys.exit(main())
