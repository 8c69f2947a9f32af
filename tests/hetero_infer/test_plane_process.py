from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from queue import SimpleQueue

import pytest

from hetero_infer.child_log import readable
from hetero_infer.config import child_environment
from hetero_infer.local_planes import compute_socket, control_socket, private_directory
from hetero_infer.plane_process import PlaneProcess, PlaneStartError, wait_all_ready
from planes.address import MAX_UNIX_PATH_BYTES, Address

PATIENCE_S = 120.0

ARGUMENTS = """
import argparse, os, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--ready-fd", type=int)
parser.add_argument("--lifeline-fd", type=int)
options = parser.parse_args()
def ready(text="READY 127.0.0.1:5\\n"):
    os.write(options.ready_fd, text.encode())
    os.close(options.ready_fd)
def live():
    os.read(options.lifeline_fd, 1)
"""


@pytest.fixture
def plane(tmp_path):
    """Start a plane whose program is the given source."""
    started = []

    def start(source: str, on_output=None, **options) -> PlaneProcess:
        name = f"plane_number_{len(started)}"
        (tmp_path / f"{name}.py").write_text(ARGUMENTS + textwrap.dedent(source))
        process = PlaneProcess(
            name, [], environ=child_environment(str(tmp_path)), on_output=on_output, **options
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.stop()


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_machine_that_has_no_process_left_says_so_and_nothing_stays_open(plane, monkeypatch):
    def no_memory(*_args, **_options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("hetero_infer.plane_process.subprocess.Popen", no_memory)
    before = open_descriptors()
    with pytest.raises(
        PlaneStartError, match=r"^the plane number 0 could not be started: Cannot al"
    ):
        plane("live()", print)
    assert open_descriptors() == before


def test_a_machine_that_has_no_thread_left_says_so_and_nothing_stays_open(plane, monkeypatch):
    made = []
    popen = subprocess.Popen

    def remember(*args, **options):
        made.append(popen(*args, **options))
        return made[-1]

    def no_thread(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("hetero_infer.plane_process.subprocess.Popen", remember)
    monkeypatch.setattr("threading.Thread.start", no_thread)
    before = open_descriptors()
    with pytest.raises(PlaneStartError, match="could not be started: can't start new thread"):
        plane("live()", print)
    assert open_descriptors() == before
    assert made[0].returncode is not None


def test_a_plane_that_is_ready_has_an_address_and_ends_with_its_lifeline(plane):
    process = plane("ready()\nlive()\nsys.exit(7)", on_output=print)
    assert process.wait_ready(PATIENCE_S) == Address(host="127.0.0.1", port=5)
    assert process.is_running
    assert os.getpgid(process.pid) == process.pid  # out of reach of a terminal's Ctrl-C
    os.close(process._lifeline_write)
    process._lifeline_write = None
    assert process.process.wait(PATIENCE_S) == 7


def test_stopping_is_graceful_gives_the_status_and_may_be_repeated(plane):
    process = plane("""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        ready()
        live()
    """)
    process.wait_ready(PATIENCE_S)
    assert process.stop(PATIENCE_S) == 3
    assert process.stop() == 3
    assert not process.is_running


def test_a_plane_that_ignores_the_request_to_stop_is_killed(plane):
    process = plane("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready()
        live()
    """)
    process.wait_ready(PATIENCE_S)
    assert process.stop(grace_s=0.05) == -signal.SIGKILL


def test_a_plane_that_dies_first_says_its_last_words_in_the_error(plane):
    shown = []
    process = plane("print('one', flush=True); sys.exit('the last words')", on_output=shown.append)
    with pytest.raises(PlaneStartError, match="the plane number 0 ended with status 1") as caught:
        process.wait_ready(PATIENCE_S)
    assert caught.value.exit_status == 1
    assert caught.value.output == ("one", "the last words")
    assert shown == []


FAILED = """
    ready("FAILED there is no such device\\n")
    print("the last words", flush=True)
    sys.exit(2)
"""


def test_why_a_plane_cannot_serve_is_known_where_its_output_is_passed_through(plane):
    process = plane(FAILED)
    with pytest.raises(PlaneStartError) as caught:
        process.wait_ready(PATIENCE_S)
    assert caught.value.exit_status == 2
    assert str(caught.value) == "the plane number 0 ended with status 2: there is no such device"
    assert not process.has_served


def test_the_last_words_of_a_plane_that_cannot_serve_are_its_reason_where_they_are_read(plane):
    with pytest.raises(PlaneStartError) as caught:
        plane(FAILED, on_output=print).wait_ready(PATIENCE_S)
    assert caught.value.output == ("the last words",)


@pytest.mark.parametrize(
    ("source", "has_served", "how"),
    [
        ("ready()", True, "ended with status 0"),
        ("ready()\nos.kill(os.getpid(), signal.SIGKILL)", True, "was ended by SIGKILL"),
        ("pass", False, "ended with status 0"),
        ("ready('READY 127.0')", False, "ended with status 0"),  # cut short
        (FAILED, False, "ended with status 2: there is no such device"),
    ],
)
def test_how_a_plane_ended_that_nobody_waited_for_is_known(plane, source, has_served, how):
    process = plane(source)
    process.process.wait(PATIENCE_S)
    assert process.describe_end() == f"the plane number 0 {how}"
    assert process.has_served is has_served


def test_a_plane_that_is_killed_before_it_serves_is_named_with_its_signal(plane):
    process = plane("os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(PlaneStartError, match="was ended by SIGKILL"):
        process.wait_ready(PATIENCE_S)


def test_a_plane_that_stays_silent_is_ended_after_the_timeout(plane):
    process = plane("live()")
    with pytest.raises(PlaneStartError, match=r"did not serve within 0\.2 s") as caught:
        process.wait_ready(0.2)
    assert caught.value.exit_status is None
    assert not process.is_running


@pytest.mark.parametrize("line", ["HELLO 127.0.0.1:5\\n", "READY\\n"])
def test_a_plane_that_says_something_else_is_not_ready(plane, line):
    process = plane(f'ready("{line}")\nlive()')
    with pytest.raises(PlaneStartError, match=r"said b'.*' instead of READY ADDRESS"):
        process.wait_ready(PATIENCE_S)


def test_what_a_plane_prints_is_held_back_until_it_serves_and_then_shown(plane):
    shown = []
    process = plane(
        """
        print("loading", flush=True)
        print("a warning", file=sys.stderr, flush=True)
        ready()
        live()
        print("serving\\xff", flush=True)
        """,
        on_output=shown.append,
    )
    process.wait_ready(PATIENCE_S)
    os.close(process._lifeline_write)
    process._lifeline_write = None
    process.process.wait(PATIENCE_S)
    process.stop()
    assert shown == ["loading", "a warning", "serving\xff"]
    assert process.output_tail == tuple(shown)


def test_log_lines_are_shown_at_once_and_stand_in_no_error(plane):
    shown = SimpleQueue()
    log = '{"event": "compiling", "plane": "compute", "level": "warning", "kernel": "k"}'
    process = plane(
        f"""
        print({log!r}, flush=True)
        print("the reason", flush=True)
        live()
        sys.exit(1)
        """,
        on_output=shown.put,
        readable=readable,
    )
    # Not yet ready, and shown all the same.
    assert shown.get(timeout=PATIENCE_S) == "hetero-infer: compute plane: compiling (kernel: k)"
    os.close(process._lifeline_write)
    process._lifeline_write = None
    with pytest.raises(PlaneStartError) as caught:
        process.wait_ready(PATIENCE_S)
    assert caught.value.output == ("the reason",)


def test_the_first_of_several_planes_that_fails_is_the_one_reported(plane):
    planes = [plane("ready()\nlive()"), plane("sys.exit(4)")]
    with pytest.raises(PlaneStartError, match="plane number 1 ended with status 4"):
        wait_all_ready(planes, PATIENCE_S)
    assert planes[0].is_running


def test_a_plane_that_serves_and_ends_is_noticed_while_another_one_is_awaited(plane):
    planes = [plane("ready()\nsys.exit(5)"), plane("live()")]
    with pytest.raises(PlaneStartError, match="plane number 0 ended with status 5"):
        wait_all_ready(planes, PATIENCE_S)
    assert planes[1].is_running


def test_no_descriptor_is_left_behind(plane):
    plane("ready()\nlive()", on_output=print).stop()
    before = open_descriptors()
    for source in ("ready()\nlive()", "sys.exit(1)"):
        process = plane(source, on_output=print)
        with contextlib.suppress(PlaneStartError):
            process.wait_ready(PATIENCE_S)
        process.stop()
    assert open_descriptors() == before


PARENT = """
import sys, time
from hetero_infer.config import child_environment
from hetero_infer.plane_process import PlaneProcess
plane = PlaneProcess("orphan", [], environ=child_environment(sys.argv[1]))
plane.wait_ready()
print("up", flush=True)
time.sleep(600)
"""


def test_a_plane_ends_when_its_parent_is_killed(tmp_path):
    (tmp_path / "orphan.py").write_text(ARGUMENTS + "ready()\nlive()\nprint('parent gone')")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        # The plane holds the other end of this pipe: the end of file says that it has ended.
        assert parent.communicate(timeout=PATIENCE_S)[1] == "parent gone\n"


def test_the_private_directory_is_private_and_goes_away_with_its_sockets():
    with private_directory() as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        for address in (compute_socket(directory), control_socket(directory)):
            Path(address.path).touch()
    assert not directory.exists()


def test_a_deep_directory_for_temporary_files_does_not_make_socket_paths_too_long(
    tmp_path, monkeypatch
):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with private_directory() as directory:
        assert len(compute_socket(directory).path) <= MAX_UNIX_PATH_BYTES
    assert list(deep.iterdir()) == []
