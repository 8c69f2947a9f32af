"""From the start of a process to its first token, and of each plane to SERVING."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetero_infer.bench.figures import median
from hetero_infer.bench.load import load_client, run_client, subject_of
from hetero_infer.bench.report import Result, Table
from hetero_infer.bench.settings import StartSettings
from hetero_infer.config import EngineConfig, child_environment
from hetero_infer.local_planes import (
    compute_socket,
    control_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import START_TIMEOUT_S, PlaneProcess, describe_exit
from hetero_infer.wire_errors import error_from_rpc
from planes.address import Address
from planes.errors import ExecutionError
from planes.settings import to_flags

PROMPT = "The capital of France is"
NUM_TOKENS = 16
TAIL_BYTES = 2000
RPC_TIMEOUT_S = 10.0
NOT_YET_S = 0.005
"""Between two questions whether a plane serves."""


@dataclass(frozen=True, slots=True)
class CommandTimes:
    """Of one `hetero-infer --input TEXT`, in seconds from its start: first text, and its end."""

    first_text_s: float
    ended_s: float


def run(config: EngineConfig, settings: StartSettings) -> Result:
    """Measure; raises EngineError."""
    config.validate()
    cold = _cold(config) if settings.cold else None
    run_command(config)  # compiles what is missing, and brings all files into memory
    commands = [run_command(config) for _ in range(settings.repeat)]
    compute_s, control_s, model = _planes(config, settings.repeat)
    samples = {
        "first_text": [times.first_text_s for times in commands],
        "command": [times.ended_s for times in commands],
        "compute_plane_serving": compute_s,
        "control_plane_serving": control_s,
    }
    data = {
        "model": model,
        "tokens": NUM_TOKENS,
        "results": [
            {"what": what, "median_s": median(times), "samples_s": times}
            for what, times in samples.items()
        ],
        "cold": cold and dataclasses.asdict(cold),
    }
    return Result(subject_of(model), data, [table_of(data)])


def _cold(config: EngineConfig) -> CommandTimes:
    """Run the command once with a kernel cache of its own, which is empty."""
    with tempfile.TemporaryDirectory(prefix="hetero-") as directory:
        return run_command(dataclasses.replace(config, kernel_cache=directory))


def run_command(config: EngineConfig) -> CommandTimes:
    """Run `hetero-infer --input TEXT` as a user does and watch for what it prints.

    With `--quiet` there is nothing on its stdout but the text, token by token, so the first byte
    is the first text. Raises ExecutionError, with the end of what it said, if it fails.
    """
    flags = to_flags(config)
    command = [sys.executable, "-m", "hetero_infer", "--quiet", f"--input={PROMPT}"]
    generation = ["--temperature=0", "--ignore-eos", f"--max-tokens={NUM_TOKENS}"]
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        with subprocess.Popen(
            [*command, *generation, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=child_environment(),
        ) as process:
            try:
                assert process.stdout is not None  # it is a pipe
                text = os.read(process.stdout.fileno(), 1 << 16)
                first = time.perf_counter()
                while piece := os.read(process.stdout.fileno(), 1 << 16):
                    text += piece
                status = process.wait()
                ended = time.perf_counter()
            except BaseException:  # Ctrl-C too: planes must not outlive the measurement
                process.terminate()  # it takes its planes along
                raise
        if status != 0 or not text.strip():
            how = describe_exit(status)
            raise ExecutionError(f"`hetero-infer --input` {how}: {_tail(errors)}")
    return CommandTimes(first - began, ended - began)


def _tail(file: IO[bytes]) -> str:
    file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
    return file.read().decode("utf-8", errors="replace").strip() or "it said nothing"


def _planes(config: EngineConfig, repeat: int) -> tuple[list[float], list[float], dict[str, Any]]:
    """Start each plane again and again; seconds to SERVING of both, and what they run.

    Every control plane but the first finds a compute plane whose session was of one that was
    killed, which is the case that matters: nobody serves meanwhile.
    """
    with private_directory() as directory:
        compute, control = compute_socket(directory), control_socket(directory)
        compute_s: list[float] = []
        control_s: list[float] = []
        for _ in range(repeat - 1):
            with _started(lambda: start_compute_plane(config, compute), compute_s):
                pass
        with _started(lambda: start_compute_plane(config, compute), compute_s):
            for number in range(repeat + 1):
                with _started(
                    lambda: start_control_plane(config, compute, f"--listen={control}"), control_s
                ) as plane:
                    if number == repeat:
                        model = run_client(_model(control))
                        break
                    plane.process.kill()
                    plane.process.wait()
    return compute_s, control_s[1:], model


async def _model(control: Address) -> dict[str, Any]:
    async with load_client(control) as client:
        return client.model


@contextlib.contextmanager
def _started(start: Callable[[], PlaneProcess], seconds: list[float]) -> Iterator[PlaneProcess]:
    """Start a plane, and take the time until its health is SERVING; end it at the end."""
    began = time.perf_counter()
    with start() as plane:
        await_serving(plane.wait_ready())
        seconds.append(time.perf_counter() - began)
        yield plane


def await_serving(address: Address) -> None:
    """Return once the server there says SERVING. Raises EngineError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(address.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=RPC_TIMEOUT_S)
            except grpc.RpcError as error:
                raise error_from_rpc(error) from None
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(NOT_YET_S)
    raise ExecutionError(f"{address} did not serve within {START_TIMEOUT_S:g} s")


NAMES = {
    "first_text": "`hetero-infer --input TEXT` to its first text",
    "command": "the same to its end, {tokens} tokens",
    "compute_plane_serving": "compute plane to SERVING",
    "control_plane_serving": "control plane to SERVING, the one before killed",
}


def table_of(data: dict[str, Any]) -> Table:
    """Tell it to people."""
    rows = [
        [
            NAMES[result["what"]].format(tokens=data["tokens"]),
            *(f"{pick(result['samples_s']):.2f}" for pick in (median, min, max)),
        ]
        for result in data["results"]
    ]
    if data["cold"] is not None:
        first = data["cold"]["first_text_s"]
        rows.append(["with an empty kernel cache to its first text, once", f"{first:.2f}", "", ""])
    return Table(["from the start of", "median s", "least", "most"], rows)
