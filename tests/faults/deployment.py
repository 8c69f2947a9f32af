"""Real planes, each a process that a test may kill, stop and start again while clients read.

What a deployment has started, and nothing else, it ends in `close`, whatever became of it. What it
uses at rest can be compared with what it used at another time.
"""

from __future__ import annotations

import contextlib
import operator
import os
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from hetero_infer.config import EngineConfig
from hetero_infer.local_planes import (
    control_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import PlaneProcess
from planes.address import Address
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc
from protos.hetero.inference.v1 import inference_pb2 as pb
from protos.hetero.inference.v1 import inference_pb2_grpc
from tests.faults.cuttable_proxy import CuttableProxy
from tests.waiting import PATIENCE_S, happens, wait_until

RPC_TIMEOUT_S = 30.0
NUM_LOG_LINES = 200
MIB = 1 << 20

RECONNECTS_SOON = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has of the machine."""

    num_descriptors: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        proc = Path("/proc") / str(pid)
        resident_pages = int((proc / "statm").read_text().split()[1])
        return cls(
            sum(1 for _ in (proc / "fd").iterdir()), resident_pages * os.sysconf("SC_PAGE_SIZE")
        )


class ComputePlane:
    """One compute plane in whichever process it is now, behind a proxy if connections are cut.

    `address` is where the control plane looks for it. A proxy is there while the plane is: the
    place of a plane that was killed is as deserted as it would be without one.
    """

    def __init__(
        self, config: EngineConfig, directory: Path, name: str, log: deque[str], *, cuttable: bool
    ) -> None:
        self._config = config
        self._log = log
        self._own_address = Address(path=str(directory / f"{name}.sock"))
        self._cuttable = cuttable
        self.address = (
            Address(path=str(directory / f"{name}-proxy.sock")) if cuttable else self._own_address
        )
        self.proxy: CuttableProxy | None = None
        self.process: PlaneProcess | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start it, and return when it serves."""
        self.process = start_compute_plane(self._config, self._own_address, self._log.append)
        self.process.wait_ready(PATIENCE_S)
        if self._cuttable:
            assert self._own_address.path is not None
            self.proxy = CuttableProxy(self.address, Path(self._own_address.path))

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def terminate(self) -> None:
        """SIGTERM; it must end in order."""
        assert self.process is not None
        self.process.process.terminate()
        status = self.process.process.wait(PATIENCE_S)
        self._reap()
        assert status == 0

    def stop(self) -> None:
        """SIGSTOP: it is there, and does nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def describe(self) -> compute_pb2.DescribeResponse:
        """Ask it directly."""
        with grpc.insecure_channel(self._own_address.target) as channel:
            stub = compute_pb2_grpc.ComputeServiceStub(channel)
            return stub.Describe(compute_pb2.DescribeRequest(), timeout=RPC_TIMEOUT_S)

    def close(self) -> None:
        if self.process is not None and self.process.is_running:
            self.kill()

    def _reap(self) -> None:
        process, self.process = self.process, None
        assert process is not None
        process.stop()
        if self.proxy is not None:
            assert self.address.path is not None
            self.proxy.close()
            Path(self.address.path).unlink()
            self.proxy = None


class Deployment:
    """A control plane before one or several compute planes. `log`: the last lines of all."""

    def __init__(
        self,
        directory: Path,
        config: EngineConfig,
        *control_flags: str,
        num_compute: int = 1,
        cuttable: bool = False,
    ) -> None:
        self._config = config
        self._control_flags = (*control_flags, f"--listen={control_socket(directory)}")
        self.address = control_socket(directory)
        self.log: deque[str] = deque(maxlen=NUM_LOG_LINES)
        self.compute = [
            ComputePlane(config, directory, f"compute{k}", self.log, cuttable=cuttable)
            for k in range(num_compute)
        ]
        self.control: PlaneProcess | None = None
        self._channel = grpc.insecure_channel(self.address.target, RECONNECTS_SOON)
        self._admin = inference_pb2_grpc.AdminServiceStub(self._channel)

    def launch_control(self) -> None:
        """Start it without waiting; it is ready once the compute planes are."""
        names = ",".join(str(plane.address) for plane in self.compute)
        self.control = start_control_plane(
            self._config, names, *self._control_flags, on_output=self.log.append
        )

    def start_control(self) -> None:
        """Start it, and return when it serves."""
        self.launch_control()
        self.wait_control()

    def wait_control(self) -> None:
        """Wait until the one that was launched serves."""
        assert self.control is not None
        self.control.wait_ready(PATIENCE_S)

    def kill_control(self) -> None:
        """SIGKILL."""
        control, self.control = self.control, None
        assert control is not None
        os.kill(control.pid, signal.SIGKILL)
        control.stop()

    def start(self) -> None:
        """Start everything."""
        for plane in self.compute:
            plane.start()
        self.start_control()

    def close(self) -> None:
        """End every process that still runs."""
        self._channel.close()
        if self.control is not None:
            self.kill_control()
        for plane in self.compute:
            plane.close()

    @property
    def metrics(self) -> pb.GetMetricsResponse:
        return self._admin.GetMetrics(
            pb.GetMetricsRequest(), timeout=RPC_TIMEOUT_S, wait_for_ready=True
        )

    @property
    def memory(self) -> pb.GetMemoryStatsResponse:
        return self._admin.GetMemoryStats(
            pb.GetMemoryStatsRequest(), timeout=RPC_TIMEOUT_S, wait_for_ready=True
        )

    def stop_until_lost(self, index: int = 0, within_s: float = PATIENCE_S) -> bool:
        """Stop a compute plane until the control plane has given it up, and wake it; did it?

        It cannot give up one that it has not opened yet, or not again.
        """
        before = self.metrics.num_plane_losses
        self.compute[index].stop()
        try:
            return happens(lambda: self.metrics.num_plane_losses > before, within_s)
        finally:
            self.compute[index].wake()

    def usage(self) -> list[Usage]:
        """What each process has once nothing is under way: the control plane's first."""
        self._wait_idle()
        assert self.control is not None
        return [Usage.of(pid) for pid in (self.control.pid, *(one.pid for one in self.compute))]

    def _wait_idle(self) -> None:
        def is_idle() -> bool:
            metrics, memory = self.metrics, self.memory
            is_left = metrics.active_sequences or metrics.waiting_requests or memory.num_sequences
            return not (is_left or memory.used_blocks or memory.used_host_blocks)

        wait_until(is_idle, "no block is used")

    def check_at_rest(self, before: list[Usage], allowance_bytes: int) -> list[int]:
        """Check that no block is used and no process has more than before; growths in bytes.

        Memory may have grown by the allowance: allocators keep some, each run another bit of it.
        Of descriptors there may be fewer: a server closes its end of a connection when it has seen
        that the client closed, which may be after they were counted before.
        """
        self._wait_idle()
        metrics = self.metrics
        ended = metrics.completed_requests + metrics.failed_requests + metrics.cancelled_requests
        assert (metrics.failed_requests, ended) == (0, metrics.total_requests)
        descriptors = [one.num_descriptors for one in before]

        def has_no_more() -> bool:
            now = [one.num_descriptors for one in self.usage()]
            return all(map(operator.le, now, descriptors))

        wait_until(has_no_more, f"no more descriptors than before: {descriptors}")
        growths = [
            after.resident_bytes - then.resident_bytes
            for after, then in zip(self.usage(), before, strict=True)
        ]
        assert max(growths) < allowance_bytes, growths
        return growths

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add to a failure what the planes have said."""
        try:
            yield
        except BaseException as error:
            error.add_note("the planes said:\n" + "\n".join(self.log))
            raise


@contextlib.contextmanager
def deployed(
    config: EngineConfig, *control_flags: str, num_compute: int = 1, cuttable: bool = False
) -> Iterator[Deployment]:
    """Start a deployment, and end it."""
    with private_directory() as directory:
        made = Deployment(
            directory, config, *control_flags, num_compute=num_compute, cuttable=cuttable
        )
        try:
            made.start()
            yield made
        finally:
            made.close()
