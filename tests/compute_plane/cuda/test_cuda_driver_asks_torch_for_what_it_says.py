"""The driver of a CUDA device, call by call, on a runtime that is played."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from compute_plane.cuda import cuda_driver
from compute_plane.cuda.cuda_driver import CudaEvent
from tests.compute_plane.cuda.played_cuda import Graph, World, played_cuda, played_device


@pytest.fixture
def world() -> Iterator[World]:
    with played_cuda() as played:
        yield played


def test_outside_of_computing_the_stream_is_the_one_from_before(world: World) -> None:
    driver, _ = played_device(world)
    before = torch.cuda.current_stream()
    with driver.computing():
        compute = torch.cuda.current_stream()
        assert compute is not before
        with driver.computing():
            pass
        assert torch.cuda.current_stream() is compute
    assert torch.cuda.current_stream() is before


def test_buffers_copies_and_replays_are_the_compute_stream_s_whoever_asks_for_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = played_device(world)
    buffer = driver.device_buffer(16)
    driver.copy(buffer, driver.host_buffer(16))
    with driver.computing():
        compute = torch.cuda.current_stream().name
    memory = world.memory(buffer)
    assert (memory.owner, memory.accesses[-1].who) == (compute, compute)
    replayed: list[str] = []
    monkeypatch.setattr(Graph, "replay", lambda _: replayed.append(world.current.name))
    driver.capture(lambda: None).replay()
    assert replayed == [compute]


def test_host_memory_from_a_size_on_is_pinned_where_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = played_device(world)
    monkeypatch.setattr(cuda_driver, "EXACT_BYTES", 1000)
    monkeypatch.setattr(driver._pinned, "take", lambda num_bytes: ["pinned", num_bytes])
    assert driver.host_buffer(1000) == ["pinned", 1000]
    assert len(driver.host_buffer(999)) == 999


def test_who_waits_for_a_step_sleeps_unless_he_watches_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime would look again and again, on a core that the planes need."""
    kinds: list[object] = []
    played = torch.cuda.Event
    monkeypatch.setattr(torch.cuda, "Event", lambda **named: (kinds.append(named), played())[1])
    CudaEvent(world.new_stream())
    CudaEvent(world.new_stream(), is_watched=True)
    assert kinds == [{"blocking": True}, {"blocking": False}]


def test_events_that_nobody_has_any_more_are_recorded_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = played_device(world)
    made: list[object] = []
    played = torch.cuda.Event
    monkeypatch.setattr(torch.cuda, "Event", lambda **named: (made.append(named), played())[1])
    target, source = driver.host_buffer(16), driver.device_buffer(16)
    first = driver.download(target, source)
    second = driver.download(target, source)
    assert len(made) == 2
    del first
    third = driver.download(target, source)
    assert len(made) == 2
    watched = driver.download(target, source, is_watched=True)
    assert made[2] == {"blocking": False}  # one that the device calls for would not do
    del second, third, watched


def test_what_is_read_for_the_host_is_kept_until_it_was_read(world: World) -> None:
    driver, _ = played_device(world)
    source = driver.device_buffer(16)
    kept = weakref.ref(source)
    event = driver.download(driver.host_buffer(16), source)
    del source
    assert kept() is not None
    event.wait()
    del event
    assert kept() is None
    assert world.races == []


def test_work_is_done_once_for_its_libraries_before_it_is_captured(world: World) -> None:
    driver, _ = played_device(world)
    with driver.computing():
        compute = torch.cuda.current_stream()
    done: list[tuple[bool, bool]] = []

    def work() -> None:
        with driver.computing():  # as a buffer is taken
            is_compute = torch.cuda.current_stream() is compute
            done.append((world.capturing is not None, is_compute))

    driver.capture(work)
    assert done == [(False, True), (True, False)]


def test_a_capture_that_fails_leaves_the_stream_as_it_was(world: World) -> None:
    driver, _ = played_device(world)

    def work() -> None:
        if world.capturing is not None:
            raise RuntimeError("out of memory")

    with driver.computing():
        compute = torch.cuda.current_stream()
        with pytest.raises(RuntimeError, match="out of memory"):
            driver.capture(work)
        assert torch.cuda.current_stream() is compute
    driver.capture(lambda: None)


def test_a_graph_is_captured_after_all_others_were_released(world: World) -> None:
    """torch gives memory up with the last graph in it, and captures no other one into it."""
    driver, _ = played_device(world)
    graphs = [driver.capture(lambda: None) for _ in range(2)]
    pool = driver._pool
    for graph in graphs:
        graph.release()
    assert pool.num_graphs == 0
    first = driver.capture(lambda: None)
    driver.capture(lambda: None)
    first.release()
    driver.capture(lambda: None)


def test_what_is_unused_is_released_once_nothing_is_under_way_in_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = played_device(world)
    calls: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
    driver.release_unused()
    assert calls == ["synchronize", "empty_cache"]
