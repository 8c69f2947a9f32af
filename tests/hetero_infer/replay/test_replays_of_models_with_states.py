from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from compute_plane.executor.simulated import SimulatedExecutor
from hetero_infer.replay.comparison import rules_for
from planes.errors import ConfigError
from tests.compute_plane.rpc.plane_harness import Harness, WatchedExecutor
from tests.hetero_infer.replay.replay_bench import read, record, replay, tamper, with_tokens

NUM_SLOTS = 8
NUM_STATES = 12


class StatefulHarness(Harness):
    """A plane whose sequences have states."""

    def _build(self, name: str, context: ExecutorContext) -> BuiltExecutor:
        built = super()._build(name, context)
        SimulatedExecutor.__init__(
            self.executor,
            num_blocks=context.num_blocks,
            block_size=context.block_size,
            num_states=NUM_STATES,
        )
        assert isinstance(self.executor, WatchedExecutor)
        return BuiltExecutor(
            built.name,
            built.executor,
            built.numerics_id,
            num_slots=NUM_SLOTS,
            num_states=NUM_STATES,
        )


@pytest.fixture(scope="module")
def planes() -> Iterator[tuple[Harness, Harness]]:
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        harnesses = StatefulHarness(Path(a)), StatefulHarness(Path(b))
        yield harnesses
        for harness in harnesses:
            harness.close()


def test_another_token_is_reported_once_and_its_state_goes_on(planes, tmp_path):
    record(planes[0], tmp_path / "run")
    assert any(getattr(message, "state_copies", ()) for message in read(tmp_path / "run"))
    report = replay(planes[1], tmp_path / "run")
    assert (report.num_differences, report.num_sessions) == (0, 1)

    def draw_another(number, _, output):
        return with_tokens(output, 1, 33) if number == 4 else output

    undo = tamper(planes[1], draw_another)
    report = replay(planes[1], tmp_path / "run", finds_all=True)
    undo()
    (found,) = report.differences
    assert (found.what, found.step, found.row) == ("token", 4, 1)
    assert found.replayed.startswith("33 ")


def test_a_plane_with_fewer_states_is_refused(planes):
    recorded, replaying = planes[0].describe(), planes[1].describe()
    replaying.num_states -= 1
    with pytest.raises(ConfigError, match=r"states: recorded with 12, .* only 11"):
        rules_for(recorded, replaying)
