"""The command `hetero-infer`.

Typer only reads the command line and picks what to do; doing it, and answering for it with one line
and an exit status, is `main`'s. Exit statuses: 0 done; 1 the engine failed; 2 the caller asked for
something that cannot be; 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, Any

import typer

from compute_plane.config import ComputePlaneConfig
from control_plane.config import ControlPlaneConfig
from hetero_infer.commands.client_options import (
    LOGPROBS,
    NOT_CHATTED,
    chat_options,
    complete_options,
    embed_options,
    message_of,
)
from hetero_infer.commands.command_line import UsageError, read_arguments
from hetero_infer.commands.headings import heading_of
from hetero_infer.commands.options import (
    merged,
    options_of,
    refuse_flags,
    refuse_root_flags,
    with_options,
)
from hetero_infer.commands.target import ChatSettings, CompleteSettings, EmbedSettings
from hetero_infer.config import EngineConfig, ServeConfig, Settings
from hetero_infer.generation_config import GenerationConfig
from hetero_infer.replay.settings import ReplaySettings
from hetero_infer.standard_output import WRITE_FAILURES, drop_output, flushed, let_all_text_out
from planes.errors import ConfigError, EngineError, ValidationError
from planes.errors import MemoryError as EngineMemoryError
from planes.settings import Layers, resolve, settings_of

PROGRAM = "hetero-infer"
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE

PLANES = ("control-plane", "compute-plane")

Action = Callable[[], int]

app = typer.Typer(
    name=PROGRAM,
    help="LLM inference with a CPU control plane and a compute plane that meet on a gRPC wire. "
    "Commands, each with its --help: serve, chat, complete, embed, health, replay, bench, token, "
    "control-plane, compute-plane.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _add_bench(commands: typer.Typer) -> None:
    from hetero_infer.commands.bench import bench_app

    commands.add_typer(bench_app, name="bench")


def _add_token(commands: typer.Typer) -> None:
    from hetero_infer.commands.token import token_app

    commands.add_typer(token_app, name="token")


def _add_health(commands: typer.Typer) -> None:
    from hetero_infer.commands.health import health_command

    commands.command(name="health")(health_command)


OTHERS = {"bench": _add_bench, "token": _add_token, "health": _add_health}
"""The commands that most starts have nothing to do with."""


GENERATION = {item.name for item in settings_of(GenerationConfig)}
SERVE_ONLY = {item.name for item in settings_of(ServeConfig)} - {
    item.name for item in settings_of(EngineConfig)
}
CLIENT = {item.name for item in (*settings_of(ChatSettings), *settings_of(CompleteSettings))}
COMPUTE_ONLY = {item.name for item in settings_of(ComputePlaneConfig)} - {
    item.name for item in settings_of(ControlPlaneConfig)
}

ENGINE_OPTIONS = options_of(ServeConfig, heading_of)
ALL_OPTIONS = [*options_of(GenerationConfig, heading_of), *ENGINE_OPTIONS]
REPLAY_OPTIONS = options_of(ReplaySettings, lambda _: "Replay")

ConfigFile = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="JSON file of settings")
]


def _switch(name: str, text: str) -> Any:  # noqa: ANN401 - what typer.Option returns
    return typer.Option(name, help=text, metavar="")


@app.callback(invoke_without_command=True)
@with_options(ALL_OPTIONS)
def root(  # noqa: D103 - its docstring would be the help text
    context: typer.Context,
    *,
    config: ConfigFile = None,
    json: Annotated[bool, _switch("--json", "print one JSON object and nothing else")] = False,
    quiet: Annotated[bool, _switch("--quiet", "print the text and nothing else")] = False,
    serve: Annotated[bool, _switch("--serve", "the same as the command `serve`")] = False,
    version: Annotated[bool, _switch("--version", "print the version")] = False,
    **flags: object,
) -> Action | None:
    if version:
        return _print_version
    flags["config"] = config
    if context.invoked_subcommand == "bench":
        from hetero_infer.commands.bench import RootCall

        switches = {"json": json, "quiet": quiet, "serve": serve}
        given = {**flags, **{name: True for name, value in switches.items() if value}}
        context.obj = RootCall(context.obj, given)
        return None
    if context.invoked_subcommand is not None:
        context.obj = flags
        return None
    if serve:
        return _serve_action(flags)
    return _generate_action(flags, as_json=json, is_quiet=quiet)


@app.command(name="serve")
@with_options(ENGINE_OPTIONS)
def serve_command(context: typer.Context, *, config: ConfigFile = None, **flags: object) -> Action:
    """Run both planes until SIGTERM."""
    return _serve_action(merged(context.obj, {**flags, "config": config}))


@app.command(name="chat")
@with_options(chat_options(heading_of))
def chat_command(context: typer.Context, *, config: ConfigFile = None, **flags: object) -> Action:
    """Talk to the model, in the terminal or one turn a line from a pipe; /help there says more."""

    def run() -> int:
        given = merged(context.obj, {**flags, "config": config})
        refuse_flags(
            given, {*SERVE_ONLY, *NOT_CHATTED, "input"} - CLIENT, "means nothing to `chat`"
        )
        from hetero_infer.commands.chat import chat

        return chat(_settings(given), resolve(ChatSettings, Layers(flags=given)), given)

    return run


@app.command(name="complete")
@with_options(complete_options(heading_of))
def complete_command(
    context: typer.Context,
    *,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="files with one prompt each; -: stdin"),
    ] = None,
    config: ConfigFile = None,
    **flags: object,
) -> Action:
    """Complete many prompts, so many at once; results as JSON Lines. Run again, it goes on."""

    def run() -> int:
        given = merged(context.obj, {**flags, "config": config})
        refuse_flags(given, {*SERVE_ONLY, "input"} - CLIENT, "means nothing to `complete`")
        from hetero_infer.commands.complete import complete

        target = resolve(CompleteSettings, Layers(flags=given))
        return complete(files or [], _settings(given), target, given)

    return run


@app.command(name="embed")
@with_options(embed_options(heading_of))
def embed_command(context: typer.Context, *, config: ConfigFile = None, **flags: object) -> Action:
    """Make embeddings of texts; results as JSON Lines."""

    def run() -> int:
        given = merged(context.obj, {**flags, "config": config})
        own = {item.name for item in settings_of(EmbedSettings)}
        refuse_flags(given, {*SERVE_ONLY, *GENERATION} - own, "means nothing to `embed`")
        from hetero_infer.commands.embed import embed

        return embed(_settings(given), resolve(EmbedSettings, Layers(flags=given)), given)

    return run


@app.command(name="replay")
@with_options(REPLAY_OPTIONS)
def replay_command(
    context: typer.Context,
    *,
    file: Annotated[str, typer.Argument(metavar="FILE", help="what --record wrote")],
    json: Annotated[bool, _switch("--json", "print one JSON object and nothing else")] = False,
    **flags: object,
) -> Action:
    """Run a recording against a compute plane and name the first difference."""

    def run() -> int:
        refuse_root_flags(context.obj, "replay")
        from hetero_infer.commands.replay import replay

        return replay(file, resolve(ReplaySettings, Layers(flags=flags)), as_json=json)

    return run


@app.command(name="control-plane")
def control_plane_command() -> Action:
    """Run a control plane: all arguments are its own, see its --help."""
    return _refuse_plane


@app.command(name="compute-plane")
def compute_plane_command() -> Action:
    """Run a compute plane: all arguments are its own, see its --help."""
    return _refuse_plane


def _refuse_plane() -> int:
    # `main` runs planes before anything is parsed, unless something stands in front of them.
    raise ValidationError(f"options must come after {' or '.join(PLANES)}")


def _print_version() -> int:
    from hetero_infer.version import version

    sys.stdout.write(f"{PROGRAM} {version()}\n")
    return 0


def _settings(flags: dict[str, object]) -> Settings:
    """Read the layers; name what the file says in vain."""
    settings = Settings(flags)
    for line in settings.in_vain():
        _say(f"warning: {line}")
    return settings


def _generate_action(flags: dict[str, object], *, as_json: bool, is_quiet: bool) -> Action:
    def run() -> int:
        refuse_flags(flags, SERVE_ONLY, "only means something to `serve`")
        if not as_json:
            refuse_flags(flags, LOGPROBS, "is told with --json only")
        from hetero_infer.commands.generate import generate

        return generate(_settings(flags), as_json=as_json, is_quiet=is_quiet)

    return run


def _serve_action(flags: dict[str, object]) -> Action:
    def run() -> int:
        refuse_flags(flags, GENERATION, "means nothing to `serve`: requests say it")
        from hetero_infer.commands.serve import serve

        config = _settings(flags).resolve(ServeConfig)
        if config.compute is not None:
            refuse_flags(
                flags, COMPUTE_ONLY, "means nothing with --compute: that plane has its own"
            )
        return serve(config)

    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in PLANES:
        return _run_plane(arguments[0], arguments[1:])
    if sys.stdout is None:  # closed by the caller, as `>&-` does
        _say("error: standard output is closed")
        return EXIT_FAILURE
    let_all_text_out()

    def read_and_do() -> int:
        action = read_arguments(app, OTHERS, arguments, program=PROGRAM)
        return action() if callable(action) else int(action or 0)

    return _run(read_and_do)


def _run_plane(name: str, arguments: list[str]) -> int:
    """Become a plane: everything from here on is its own affair."""
    main_module = importlib.import_module(f"{name.replace('-', '_')}.__main__")
    return int(main_module.main(arguments, prog=f"{PROGRAM} {name}"))


def _run(action: Action) -> int:
    """Do it; every failure that has a reason is one line on stderr."""
    before = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        return flushed(action())
    except UsageError as error:
        _say(f"error: {message_of(error)}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in WRITE_FAILURES:
            raise
        _say(f"error: cannot write: {error.strerror}")
        drop_output()
        return EXIT_FAILURE
    except EngineError as error:
        return _explain(error)
    finally:
        signal.signal(signal.SIGTERM, before)


def _explain(error: EngineError) -> int:
    """Print what went wrong and return the exit status."""
    output: Sequence[str] = getattr(error, "output", ())
    is_callers = isinstance(error, ConfigError | ValidationError | EngineMemoryError)
    is_callers = is_callers or getattr(error, "exit_status", None) == EXIT_USAGE
    if not is_callers:  # else the last line of a plane says it all
        for line in output[:-1]:
            _say(line)
    _say(f"error: {error.message}" + (f": {output[-1]}" if output else ""))
    return EXIT_USAGE if is_callers else EXIT_FAILURE


def _exit_on_signal(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(EXIT_TERMINATED)


def _say(line: str) -> None:
    sys.stderr.write(f"{PROGRAM}: {line}\n")
    sys.stderr.flush()
