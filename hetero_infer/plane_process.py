"""A plane as a child process: started, awaited, ended, and never left behind.

Three pipes tie the child to its parent. Through the ready pipe the plane says `READY ADDRESS` once
it serves, or `FAILED REASON` (and its end of file says that it died). The lifeline is never
written: however the parent ends, the kernel closes it and the plane leaves (`planes.ready`). The
third carries the child's stderr and stdout, unless they are passed through.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

from planes.address import Address, parse_address
from planes.errors import ConfigError, ExecutionError

START_TIMEOUT_S = 600.0
"""A first start compiles kernels and may fetch a model; a dead child is noticed at once anyway."""

LOOK_S = 0.5
"""How often it is looked whether those that serve already still do, while another one is awaited:
nothing tells of their end."""

STOP_GRACE_S = 10.0
"""How long a plane with nothing in flight gets between SIGTERM and SIGKILL."""

TAIL_LINES = 50
MAX_READY_BYTES = 4096


class PlaneStartError(ExecutionError):
    """A plane process could not be made, ended, or stayed silent, before it served.

    `exit_status` is that of the process, negative for a signal, None if it was still running or
    never ran.
    `output` holds its last lines; if they were passed through, what it said of why, if anything.
    """

    reason = "PLANE_NOT_STARTED"

    def __init__(
        self, message: str, *, exit_status: int | None = None, output: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.output = tuple(output)

    def __str__(self) -> str:
        """Say it with the plane's last line, which is mostly the reason; `message` is without."""
        return ": ".join((self.message, *self.output[-1:]))


class PlaneProcess:
    """One plane, running as `python -m MODULE FLAGS…` in a process group of its own.

    `module`: `compute_plane` or `control_plane`. `environ`: the child's whole environment.
    `on_output`: called with each line the child prints, on a thread of this object; lines printed
    before the plane is ready are held back until then, so that a failed start can show them in its
    error instead. None passes the child's output through to this process's stderr.
    `readable`: says of a line how it is shown if it is one of the child's log; log lines are shown
    at once, and in no error. None: it is no log line.

    The group of its own keeps a terminal's Ctrl-C from the child: the parent decides who ends when.

    Raises PlaneStartError if the machine has no process, descriptor or thread left for it.
    """

    def __init__(
        self,
        module: str,
        flags: Sequence[str],
        *,
        environ: Mapping[str, str],
        on_output: Callable[[str], None] | None = None,
        readable: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self.name = module.replace("_", " ")
        self.address: Address | None = None
        self.http_address: Address | None = None
        self._on_output = on_output
        self._readable = readable
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._held: list[str] | None = []
        self._output_lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._why: str | None = None
        self._said = bytearray()
        self._ready_read: int | None
        self._lifeline_write: int | None
        try:
            output_read = self._launch(module, flags, environ)
        except OSError as error:
            raise PlaneStartError(
                f"the {self.name} could not be started: {error.strerror}"
            ) from None
        if output_read is not None:
            self._start_reader(output_read)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the child has not ended yet."""
        return self.process.poll() is None

    @property
    def has_served(self) -> bool:
        """Whether the child said that it serves; of one not waited for, known once it `stop`s."""
        return self.address is not None

    @property
    def output_tail(self) -> tuple[str, ...]:
        """The last lines the child printed, without its log; empty if they are passed through."""
        with self._output_lock:
            return tuple(self._tail)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Address:
        """Return where the plane serves, once it does. Raises PlaneStartError."""
        wait_all_ready([self], timeout_s)
        assert self.address is not None  # set by the line above, or it raised
        return self.address

    def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """End the child: SIGTERM, after `grace_s` SIGKILL; return its exit status.

        Harmless when the child has ended by itself, and when called again.
        """
        if self.process.poll() is None:
            self.process.terminate()
        try:
            status = self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._release()
        return status

    def kill(self) -> None:
        """End the child at once."""
        self.stop(grace_s=0.0)

    def describe_end(self) -> str:
        """Say how the child, which has ended, did so, and why where it said that."""
        how = f"the {self.name} {describe_exit(self.stop())}"
        return how if self._why is None else f"{how}: {self._why}"

    def _launch(self, module: str, flags: Sequence[str], environ: Mapping[str, str]) -> int | None:
        """Make pipes and process; the end at which its output is read. Raises OSError."""
        with contextlib.ExitStack() as child_ends, contextlib.ExitStack() as own_ends:
            self._ready_read, ready_write = _pipe(own_ends, child_ends)
            lifeline_read, self._lifeline_write = _pipe(child_ends, own_ends)
            output: int = sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
            output_read: int | None = None
            if self._on_output is not None:
                output_read, output = _pipe(own_ends, child_ends)
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # what lies in the working directory must not shadow the packages
                    "-m",
                    module,
                    *flags,
                    f"--ready-fd={ready_write}",
                    f"--lifeline-fd={lifeline_read}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environ),
                pass_fds=(ready_write, lifeline_read),
                process_group=0,
            )
            own_ends.pop_all()  # from here on `stop` closes them
        return output_read

    def _start_reader(self, output_read: int) -> None:
        """Have the child's output read. Raises PlaneStartError, and then the child has ended."""
        reader = threading.Thread(
            target=self._read_output, args=(output_read,), name=f"{self.name}-output", daemon=True
        )
        try:
            reader.start()
        except RuntimeError as error:
            os.close(output_read)
            raise self._fail(f"the {self.name} could not be started: {error}") from None
        self._reader = reader

    def _release(self) -> None:
        """Close this end of the pipes and let the reader finish."""
        if self._lifeline_write is not None:
            os.close(self._lifeline_write)
            self._lifeline_write = None
        self._read_rest()
        self._close_ready()
        if self._reader is not None:
            # A process that the plane left behind may hold the pipe open; it is not waited for.
            self._reader.join(STOP_GRACE_S)
            self._reader = None

    def _close_ready(self) -> None:
        if self._ready_read is not None:
            os.close(self._ready_read)
            self._ready_read = None

    def _read_output(self, output_read: int) -> None:
        """Take the child's lines until it ends."""
        with os.fdopen(output_read, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                text = line.rstrip("\n")
                shown = self._readable(text)
                with self._output_lock:
                    if shown is not None and self._on_output is not None:
                        self._on_output(shown)
                        continue
                    self._tail.append(text)
                    if self._held is not None:
                        self._held.append(text)
                    elif self._on_output is not None:
                        self._on_output(text)

    def show_output(self) -> None:
        """Show what was held back, and from now on every line."""
        with self._output_lock:
            held, self._held = self._held or [], None
            if self._on_output is not None:
                for line in held:
                    self._on_output(line)

    def _serves(self) -> None:
        self._close_ready()
        self.show_output()

    def _fail(self, message: str) -> PlaneStartError:
        """End the child and say why it did not start; its output goes into the error."""
        status = None if self.is_running else self.process.returncode
        self.kill()
        output = self.output_tail or (() if self._why is None else (self._why,))
        return PlaneStartError(message, exit_status=status, output=output)

    def _read_rest(self) -> None:
        """Take what the ready pipe still holds: nobody may have waited for the child."""
        if self._ready_read is not None:
            os.set_blocking(self._ready_read, False)
            with contextlib.suppress(BlockingIOError):
                self._said += os.read(self._ready_read, MAX_READY_BYTES)
            self._understand()

    def _understand(self) -> bytes | None:
        """Take in what the child said through the ready pipe; the line, None: there is none yet."""
        line, newline, _ = bytes(self._said).partition(b"\n")
        if not newline:
            return None
        word, _, rest = line.decode("utf-8", errors="replace").partition(" ")
        if word == "FAILED":
            self._why = rest
        elif word == "READY":
            address, tab, http_address = rest.partition("\t")
            with contextlib.suppress(ConfigError):
                self.http_address = parse_address(http_address) if tab else None
                self.address = parse_address(address)
        return line

    def _read_ready(self) -> bool:
        """Read what the ready pipe holds; True once the plane serves. Raises PlaneStartError."""
        assert self._ready_read is not None  # open until `_serves` or `stop`
        chunk = os.read(self._ready_read, MAX_READY_BYTES)
        self._said += chunk
        line = self._understand()
        if self.address is not None:
            return True
        if line is not None and self._why is None:
            raise self._fail(f"the {self.name} said {line!r} instead of READY ADDRESS")
        if line is None and chunk and len(self._said) < MAX_READY_BYTES:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_GRACE_S)  # it said so, or closed the pipe: it is ending
        raise self._fail(f"the {self.name} {describe_exit(self.process.returncode)}")

    def __enter__(self) -> PlaneProcess:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def wait_all_ready(planes: Iterable[PlaneProcess], timeout_s: float = START_TIMEOUT_S) -> None:
    """Return when every plane serves; the first that cannot raises PlaneStartError.

    So does one that serves and ends while another one is waited for, which may need it. The others
    are left running: they belong to the caller.
    """
    deadline = time.monotonic() + timeout_s
    serving: list[PlaneProcess] = []
    with selectors.DefaultSelector() as selector:
        for plane in planes:
            if plane._ready_read is not None:
                selector.register(plane._ready_read, selectors.EVENT_READ, plane)
        while selector.get_map():
            for plane in serving:
                if not plane.is_running:
                    raise plane._fail(f"the {plane.name} {describe_exit(plane.process.returncode)}")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                plane = next(iter(selector.get_map().values())).data
                raise plane._fail(f"the {plane.name} did not serve within {timeout_s:g} s")
            for key, _ in selector.select(min(remaining, LOOK_S)):
                plane = key.data
                if plane._read_ready():
                    selector.unregister(key.fd)
                    plane._serves()
                    serving.append(plane)


def describe_exit(status: int | None) -> str:
    """Say how a process ended, in words for a log line."""
    if status is None:
        return "closed its ready pipe without serving"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
        return f"was ended by signal {-status}"
    return f"ended with status {status}"


def _pipe(read_owner: contextlib.ExitStack, write_owner: contextlib.ExitStack) -> tuple[int, int]:
    """Make a pipe; each owner closes its end."""
    read, write = os.pipe()
    read_owner.callback(os.close, read)
    write_owner.callback(os.close, write)
    return read, write
