"""The control plane is killed in the middle of a stream; another one takes its place."""

from __future__ import annotations

import pytest

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client import Client, Delta, Finished, Started
from planes.address import parse_address


@pytest.mark.spread(1)
@pytest.mark.parametrize("stop", [(), ("never there",)])
def test_a_resuming_client_reads_the_text_it_would_have_read(
    launch, fake_plane, tmp_path, expected, stop
):
    listen = f"--listen=unix:{tmp_path}/control.sock"
    first = launch(listen)
    address = parse_address(first.ready())
    whole = expected("survivor", 120, 7)
    params = GenerationParams(max_tokens=120, seed=7, stop=(*stop, whole[100:104]))
    with Client(address) as client:
        stream = client.stream("survivor", params, resume=True)
        events = [next(stream) for _ in range(12)]
        fake_plane.may_run.clear()
        first.process.kill()
        first.process.wait()
        fake_plane.may_run.set()
        launch(listen).ready()
        events.extend(stream)
    deltas = [event for event in events if isinstance(event, Delta)]
    end = whole.index(whole[100:104])
    assert "".join(delta.text for delta in deltas) == whole[:end]
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert bytes(tokens).decode() == whole[:end]
    assert isinstance(events[0], Started)
    assert sum(isinstance(event, Started) for event in events) == 1
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.completion_tokens) == ("stop", end)
    assert finished.matched_stop == whole[100:104]
