"""What a plane says of session and step is held against what it must be, and given up otherwise."""

from __future__ import annotations

import grpc
import pytest

from control_plane.engine import compute_session
from control_plane.errors import FencedError, PlaneMismatchError
from protos.hetero.compute.v1 import compute_pb2


def change_open(driver, monkeypatch, answer):
    """Let `answer(request, ask)` be what the plane answers to Open; `ask(request)` asks it."""
    ask = driver.client._stub.Open

    def open_(request, *, timeout):
        return answer(request, lambda request: ask(request, timeout=timeout))

    monkeypatch.setattr(driver.client._stub, "Open", open_)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_id": 4},
        {"step_id": 6},
        {"session": 7},
        {"epoch": 1 << 40},  # fake planes count theirs
        {"refusal": compute_pb2.Refusal(reason="REFUSAL_REASON_STEP_GAP")},
        {"refusal": compute_pb2.Refusal(reason="REFUSAL_REASON_STALE_EPOCH")},
    ],
    ids=["late", "early", "earlier session", "other epoch", "gap", "stale epoch"],
)
def test_an_answer_that_is_not_to_the_next_batch_is_not_taken(drive, fake_plane, expected, wrong):
    run = fake_plane.run

    def answer(batch):
        right = run(batch)
        if batch.step_id != 5 or batch.session != 1:
            return right
        header = {"session": 1, "epoch": batch.epoch, "step_id": 5}
        return compute_pb2.ExecutionOutput(**{**header, "sampled_token_ids": [ord("?")], **wrong})

    fake_plane.run = answer
    driver = drive()
    request_id = driver.submit("abc", 20)
    driver.run()
    assert driver.text(request_id) == expected("abc", 20)
    assert driver.links == [True, False, True]


@pytest.mark.parametrize("wrong", [{"last_step": 0}, {"last_step": 99}, {"session": 7}], ids=str)
def test_a_session_that_is_resumed_elsewhere_than_it_broke_is_lost(
    drive, fake_plane, expected, monkeypatch, wrong
):
    driver = drive()
    request_id = driver.submit("abc", 20)
    driver.run_until(lambda: len(driver.tokens.get(request_id, ())) >= 3)

    def answer(request, ask):
        response = ask(request)
        if request.resume_session:
            for name, value in wrong.items():
                setattr(response, name, value)
        return response

    change_open(driver, monkeypatch, answer)
    fake_plane.break_stream()
    driver.run()
    assert driver.text(request_id) == expected("abc", 20)
    assert driver.links == [True, False, True]


def test_a_session_that_cannot_be_resumed_in_time_is_lost_before_its_step_is_overdue(
    drive, fake_plane, expected, monkeypatch
):
    driver = drive()
    request_id = driver.submit("abc", 20)
    driver.run_until(lambda: len(driver.tokens.get(request_id, ())) >= 3)
    num_asked = 0

    def answer(request, ask):
        nonlocal num_asked
        if not request.resume_session:
            return ask(request)
        num_asked += 1
        if num_asked == 3:
            monkeypatch.setattr(compute_session, "RESUME_WINDOW_S", 0.0)
        raise grpc.RpcError("nobody answers")

    change_open(driver, monkeypatch, answer)
    fake_plane.break_stream()
    driver.run()
    assert driver.text(request_id) == expected("abc", 20)
    assert driver.links == [True, False, True]
    assert (num_asked, driver.loop.metrics.num_stalls) == (3, 0)


def test_a_plane_replaced_while_it_was_opened_is_looked_at_once_more(
    drive, fake_plane, monkeypatch
):
    driver = drive()
    driver.submit("abc", 20)
    driver.loop.step()
    driver.lose_link()

    def answer(request, ask):
        monkeypatch.undo()
        fake_plane.epoch, fake_plane.model = fake_plane.epoch + 1000, "other"
        return ask(request)

    change_open(driver, monkeypatch, answer)
    driver.loop.step()
    assert driver.links == [True, False]
    with pytest.raises(PlaneMismatchError, match="another model: 'other', it was 'fake'"):
        driver.run()


def test_a_session_of_the_same_number_on_another_process_is_somebody_elses(
    drive, fake_plane, expected
):
    driver = drive()
    request_id = driver.submit("abc", 20)
    driver.run_until(lambda: len(driver.tokens.get(request_id, ())) >= 3)
    fake_plane.kill()
    fake_plane.start()
    fake_plane.session = 1
    driver.run()
    assert driver.text(request_id) == expected("abc", 20)
    assert fake_plane.take_overs == [False, False]


def test_a_session_that_was_asked_for_and_that_somebody_else_got_is_not_taken_over(
    drive, fake_plane, monkeypatch
):
    driver = drive()
    driver.submit("abc", 20)
    driver.loop.step()
    driver.lose_link()
    asked = []

    def answer(request, ask):
        asked.append(request.take_over)
        if len(asked) == 1:  # it never arrived
            fake_plane.other_session = 2
            raise grpc.RpcError("connection lost")
        # It is refused, with a reason.
        return ask(compute_pb2.OpenRequest(resume_session=99, resume_epoch=fake_plane.epoch))

    change_open(driver, monkeypatch, answer)
    with pytest.raises(FencedError):
        driver.run()
    assert asked == [True, False]
