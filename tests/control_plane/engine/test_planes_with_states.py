"""What follows from a compute plane's states (`DescribeResponse.num_states`), and their copies."""

from __future__ import annotations

import pytest

from control_plane.config import SchedulingLimits
from control_plane.core.batch import StateCopy, StepBatch
from control_plane.core.errors import RequestNeverFitsError
from control_plane.core.generation_params import GenerationParams
from control_plane.engine.convert import batch_to_proto
from control_plane.errors import PlaneMismatchError
from protos.hetero.compute.v1 import compute_pb2


def test_the_scheduler_keeps_states_behind_those_of_the_slots_it_uses(drive, fake_plane):
    assert len(drive().connected.limits.kept_states) == 0
    fake_plane.num_states = fake_plane.max_slots + 6
    limits = drive(limits=SchedulingLimits(max_num_seqs=2)).connected.limits
    assert limits.num_slots == 2
    assert limits.kept_states == range(2, fake_plane.max_slots + 6)


def test_such_a_plane_drafts_nothing_and_swaps_nothing(drive, fake_plane):
    fake_plane.num_states = fake_plane.max_slots
    limits = drive(limits=SchedulingLimits(speculative_tokens=3)).connected.limits
    assert (limits.speculative_tokens, limits.grammar_drafts, limits.num_host_blocks) == (0, 0, 0)


def test_a_plane_with_fewer_states_than_slots_is_refused(drive, fake_plane):
    fake_plane.num_states = fake_plane.max_slots - 1
    with pytest.raises(PlaneMismatchError, match=r"num_states 63, it must be 0 or at least .*64"):
        drive()


@pytest.mark.parametrize(("before", "after"), [(70, 69), (70, 0), (0, 70)])
def test_a_plane_that_comes_back_without_the_states_it_had_is_refused(
    drive, fake_plane, before, after
):
    fake_plane.num_states = before
    driver = drive()
    driver.submit("abc", 20)
    driver.loop.step()
    fake_plane.kill()
    fake_plane.num_states = after
    fake_plane.start()
    with pytest.raises(PlaneMismatchError, match=f"another num_states: {after}, it was {before}"):
        driver.run()


def test_a_plane_that_comes_back_with_more_states_goes_on(drive, fake_plane, expected):
    fake_plane.num_states = 70
    driver = drive()
    fake_plane.kill()
    fake_plane.num_states = 99
    fake_plane.start()
    request_id = driver.submit("abc", 20)
    driver.run()
    assert driver.text(request_id) == expected("abc", 20)


def test_beams_are_taken_in_that_fit_without_sharing_a_prompt(drive, fake_plane):
    fake_plane.features = (*fake_plane.features, "logprobs")
    params = GenerationParams(beam_width=3, max_tokens=2)
    prompt = [1] * (fake_plane.num_blocks // 2 * 4)
    drive().connected.make_admission().make_request(prompt, params, arrival_time=0.0)
    fake_plane.num_states = fake_plane.max_slots
    with pytest.raises(RequestNeverFitsError, match="with 3 beams needs"):
        drive().connected.make_admission().make_request(prompt, params, arrival_time=0.0)


def test_copies_of_states_are_sent_in_their_order():
    batch = StepBatch(1, state_copies=(StateCopy(3, 5), StateCopy(5, 0)))
    sent = batch_to_proto(batch, session=1, epoch=2, acked_step=0)
    assert list(sent.state_copies) == [
        compute_pb2.StateCopy(source=3, destination=5),
        compute_pb2.StateCopy(source=5, destination=0),
    ]


def test_states_that_are_kept_and_found_are_counted(drive, fake_plane):
    fake_plane.num_states = fake_plane.max_slots + 6
    driver = drive()
    asked = "a text of some length " * 8  # a state is kept of a prompt of 128 tokens or more
    for _ in range(2):
        driver.submit(asked, 4)
        driver.run()
    metrics = driver.loop.metrics
    assert metrics.num_state_hits == 1
    assert metrics.num_kept_states >= 1
