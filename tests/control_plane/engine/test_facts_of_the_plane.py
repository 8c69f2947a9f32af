"""What the compute plane says of itself, and what follows for the scheduler."""

from __future__ import annotations

import pytest
import structlog.testing

from control_plane.config import SchedulingLimits
from control_plane.core.generation_params import GenerationParams
from control_plane.core.interface import MOST_DRAFTS
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.plugins import CoreFactories
from control_plane.errors import LinkError, PlaneMismatchError
from planes.address import parse_address
from planes.errors import ValidationError


def test_the_scheduler_swaps_to_as_many_host_blocks_as_the_plane_has(drive, fake_plane):
    assert drive().connected.limits.num_host_blocks == 0
    fake_plane.num_host_blocks = 12
    driver = drive()
    assert driver.connected.limits.num_host_blocks == 12
    assert driver.loop.memory_stats.total_host_blocks == 12


def test_a_limit_that_somebody_asked_for_is_not_lowered_quietly(drive, fake_plane):
    fake_plane.context_length = 100
    with structlog.testing.capture_logs() as entries:
        drive()
        drive(limits=SchedulingLimits(max_model_len=4096))
        drive(limits=SchedulingLimits(max_model_len=100))
    told = [
        (entry["log_level"], entry["configured"], entry["effective"])
        for entry in entries
        if entry["event"] == "limit lowered to the compute plane's"
        and entry["name"] == "max_model_len"
    ]
    assert told == [("info", 2048, 100), ("warning", 4096, 100)]


def test_drafts_are_sent_to_planes_that_take_them_and_others_run_without(drive, fake_plane, capsys):
    limits = SchedulingLimits(speculative_tokens=3, prompt_lookup_min=2)
    driver = drive(limits=limits)
    assert driver.connected.limits.speculative_tokens == 0
    assert "speculative_tokens has no effect" in capsys.readouterr().out
    fake_plane.features = (*fake_plane.features, "drafts")
    found = drive(limits=limits).connected.limits
    assert (found.speculative_tokens, found.prompt_lookup_min) == (3, 2)
    assert "speculative_tokens" not in capsys.readouterr().out


def test_constraints_draft_for_planes_that_keep_to_them_behind_drafts(drive, fake_plane, capsys):
    features = fake_plane.features
    for more, most in (
        ((), 0),
        (("drafts",), 0),
        (("draft_constraints",), 0),
        (("drafts", "draft_constraints"), MOST_DRAFTS),
    ):
        fake_plane.features = (*features, *more)
        assert drive().connected.limits.grammar_drafts == most
    limits = SchedulingLimits(grammar_drafts=False)
    assert drive(limits=limits).connected.limits.grammar_drafts == 0
    assert "no effect" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limits", "block_size", "reason"),
    [
        ({"max_batch_size": 1}, 16, "max_batch_size 1 leaves no row for a draft"),
        ({"max_total_tokens": 1}, 16, "max_total_tokens 1 leaves no token for a draft"),
        ({}, 1, "block_size 1 leaves no room for one in a block"),
    ],
)
def test_what_leaves_no_room_for_drafts_is_said_in_one_line_if_drafts_were_asked_for(
    drive, fake_plane, monkeypatch, capsys, limits, block_size, reason
):
    fake_plane.features = (*fake_plane.features, "drafts")
    monkeypatch.setattr(f"{type(fake_plane).__module__}.BLOCK_SIZE", block_size)
    for num_tokens, said in ((0, 0), (3, 1)):
        driver = drive(limits=SchedulingLimits(speculative_tokens=num_tokens, **limits))
        driver.submit("ab ab ab ab ab", 20)
        driver.run()
        assert driver.loop.metrics.num_drafts == 0
        assert capsys.readouterr().out.count(f"has no effect: {reason}") == said


def test_a_setting_of_drafts_without_drafts_is_said_to_have_no_effect(drive, capsys):
    for limits, said in (({}, 0), ({"prompt_lookup_min": 2}, 1)):
        drive(limits=SchedulingLimits(**limits))
        assert capsys.readouterr().out.count("prompt_lookup_min has no effect without") == said


@pytest.mark.parametrize(
    ("knob", "value", "said"),
    [
        ("num_host_blocks", 5, "another num_host_blocks: 5, it was 0"),
        ("features", ("copies",), "features: copies, it was copies, sampled_slots"),
        ("tells_prompts_apart", True, "another tells_prompts_apart: True, it was False"),
    ],
)
def test_a_plane_that_comes_back_with_other_abilities_is_refused(
    drive, fake_plane, knob, value, said
):
    driver = drive()
    driver.submit("abc", 20)
    driver.loop.step()
    fake_plane.kill()
    setattr(fake_plane, knob, value)
    fake_plane.start()
    with pytest.raises(PlaneMismatchError, match=said):
        driver.run()


def test_a_plane_that_comes_back_with_a_larger_pool_goes_on_with_the_blocks_it_had(
    drive, fake_plane, expected
):
    driver = drive()
    had = fake_plane.num_blocks
    # The third is no smaller than the first was.
    for times, num_blocks in enumerate((had, had + 5, had), start=1):
        fake_plane.num_blocks = num_blocks
        if times > 1:
            fake_plane.start()
        request_id = driver.submit("abc", 20)
        driver.run()
        assert driver.text(request_id) == expected("abc", 20)
        assert driver.loop.memory_stats.total_blocks == had
        fake_plane.kill()
    fake_plane.num_blocks = had - 1
    fake_plane.start()
    driver.submit("abc", 20)
    with pytest.raises(PlaneMismatchError, match=f"another num_blocks: {had - 1}, it was {had}"):
        driver.run()


@pytest.mark.parametrize("tells_apart", [True, False])
def test_roles_matter_where_the_plane_tells_prompts_apart(drive, fake_plane, tells_apart):
    fake_plane.tells_prompts_apart = tells_apart
    asked = {}

    def make(num_blocks, block_size, **options):
        asked.update(options)
        return CoreFactories().kv_cache(num_blocks, block_size, **options)

    drive(factories=CoreFactories(kv_cache=make), limits=SchedulingLimits(prefix_cache=False))
    assert asked == {"prefix_cache": False, "roles_matter": tells_apart}


@pytest.mark.parametrize(
    ("features", "params", "said"),
    [
        (("sampled_slots",), GenerationParams(n=2), "n must be 1 .* lacks copies, got 2"),
        (("copies",), GenerationParams(beam_width=2), "beam_width .* lacks logprobs, got 2"),
        (
            ("copies", "sampled_slots"),
            GenerationParams(structured_outputs=StructuredOutputs(regex="a")),
            "structured_outputs must be unset .* lacks constraints",
        ),
    ],
)
def test_what_the_plane_cannot_do_is_refused_at_the_door(drive, fake_plane, features, params, said):
    fake_plane.features = features
    admission = drive().connected.make_admission()
    with pytest.raises(ValidationError, match=said):
        admission.make_request([1, 2], params, arrival_time=0.0)
    assert admission.make_request([1, 2], GenerationParams(), arrival_time=0.0).params.n == 1


def test_a_socket_that_does_not_exist_is_not_called(tmp_path):
    client = ComputeClient(parse_address(f"unix:{tmp_path}/compute.sock"), controller="test")
    called = []
    client._stub.Describe = called.append
    with pytest.raises(LinkError, match=r"there is no unix:.*compute\.sock"):
        client.describe()
    assert called == []
    client.shut_down()
