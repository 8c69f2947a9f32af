from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import re
from functools import partial
from pathlib import Path

import pytest

from control_plane.config import ControlPlaneConfig
from control_plane.core.generation_params import GenerationParams
from control_plane.engine.loop import EngineLoop
from control_plane.metrics.families import MODEL, PLANE, PREFIX, SERVICE, VLLM_PREFIX, sample_names
from control_plane.metrics.instruments import Instruments
from control_plane.metrics.page import MetricsPage, Sources
from control_plane.metrics.request_meter import RequestMeter
from control_plane.metrics.visits import VisitMeter, note_error
from control_plane.telemetry import EngineMetrics
from planes.errors import ConfigError
from tests.control_plane.metrics.whole_plane import Page, whole_plane
from tests.waiting import until

FAMILIES = [*SERVICE.values(), *MODEL.values(), *PLANE.values()]

DASHBOARD = Path(__file__).parents[3] / "deploy/grafana/hetero-paged-infer.json"

VLLMS = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
    "prompt_tokens_total", "generation_tokens_total", "request_success_total",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "iteration_tokens_total", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
}  # fmt: skip

OURS = {
    "requests_total", "errors_total", "inflight_requests", "streaming_requests_total",
    "plane_rtt_seconds", "plane_step_seconds", "scheduler_step_seconds", "plane_epoch",
    "requests_cancelled_total",
}  # fmt: skip


@pytest.mark.wide
def test_vllms_names_are_there_twice_with_the_same_numbers(fake_plane, tmp_path):
    async def run() -> Page:
        async with whole_plane(fake_plane, tmp_path, metrics_compat="vllm") as served:
            params = GenerationParams(max_tokens=5, seed=0)
            async with await served.frontend.submit("hello", params) as generation:
                while (await generation.next_delta()).end is None:
                    pass
            assert (await served.http.get("/v1/nowhere/42")).status_code == 404
            return await served.settled()

    page = asyncio.run(run())
    assert {family.name for family in FAMILIES if family.is_vllms} == VLLMS
    assert {family.name for family in FAMILIES} >= OURS
    names = {sample.name for sample in page.samples}
    expected = sample_names(FAMILIES)
    assert {name for name in names if name.startswith(PREFIX)} == expected
    twice = sample_names((f for f in FAMILIES if f.is_vllms), VLLM_PREFIX)
    assert {name for name in names if name.startswith(VLLM_PREFIX)} == twice
    for name in twice:
        ours = page.find(name.replace(VLLM_PREFIX, PREFIX))
        theirs = page.find(name)
        assert [sample.value for sample in ours] == [sample.value for sample in theirs]
        assert all(s.labels["model_name"] == "fake" for s in (*ours, *theirs))
        assert all(sample.labels["engine"] == "0" for sample in theirs)
    assert page.total("vllm:generation_tokens_total") == 5
    planes = {s.labels["plane"] for s in page.find("hetero_plane_up")}
    assert planes == {fake_plane.address}
    # What a client makes up is in no label.
    methods = {s.labels["method"] for s in page.find("hetero_requests_total")}
    assert methods == {"other"}
    assert page.total("process_resident_memory_bytes") > 0


def test_states_that_are_kept_and_those_that_were_found_are_told_apart(
    fake_plane, tmp_path, monkeypatch
):
    counted = EngineLoop.metrics.fget

    def with_states(loop: EngineLoop) -> EngineMetrics:
        return dataclasses.replace(counted(loop), num_kept_states=3, num_state_hits=4)

    monkeypatch.setattr(EngineLoop, "metrics", property(with_states))

    async def run() -> Page:
        async with whole_plane(fake_plane, tmp_path) as served:
            return await served.settled()

    page = asyncio.run(run())
    assert page.total("hetero_states_kept") == 3
    assert page.total("hetero_state_hits_total") == 4


@pytest.mark.wide
def test_several_planes_are_told_apart_and_requests_are_of_all(
    fake_plane, fake_plane_class, tmp_path
):
    other = fake_plane_class(f"unix:{tmp_path}/other.sock")
    other.start()

    async def run() -> Page:
        addresses = f"{fake_plane.address},{other.address}"
        async with whole_plane(
            fake_plane, tmp_path, compute=addresses, metrics_compat="vllm"
        ) as served:
            await until(lambda: sum(m.is_linked for m in served.plane._fleet.members) == 2)
            return await served.settled()

    page = asyncio.run(run())
    other.kill()
    planes = {fake_plane.address, other.address}
    assert {s.labels["plane"] for s in page.find("hetero_plane_up")} == planes
    assert {s.labels["plane"] for s in page.find("hetero_plane_rtt_seconds_count")} == planes
    epochs = {s.labels["plane"]: s.value for s in page.find("hetero_plane_epoch")}
    assert epochs == {fake_plane.address: fake_plane.epoch, other.address: other.epoch}
    assert {s.labels["engine"] for s in page.find("vllm:kv_cache_usage_perc")} == {"0", "1"}
    (tokens,) = page.find("vllm:generation_tokens_total")
    assert tokens.labels["engine"] == "all"


@pytest.mark.wide
def test_a_step_that_does_not_end_ages_until_it_does(fake_plane, tmp_path):
    async def run() -> None:
        async with whole_plane(fake_plane, tmp_path) as served:

            async def age() -> float:
                return (await served.page()).total("hetero_plane_last_step_age_seconds")

            async def is_older_than(seconds: float) -> bool:
                return await age() > seconds

            assert await age() == 0
            fake_plane.may_run.clear()
            params = GenerationParams(max_tokens=5, seed=0)
            async with await served.frontend.submit("hello", params) as generation:
                await until(partial(is_older_than, 0.0))
                await until(partial(is_older_than, await age()))
                fake_plane.may_run.set()
                while (await generation.next_delta()).end is None:
                    pass
            await served.settled()
            assert await age() == 0

    asyncio.run(run())


def test_without_a_compute_plane_the_page_shows_the_service_and_no_model():
    visits = VisitMeter()
    with visits.visit("grpc", "Generate") as visit:
        visit.error = "COMPUTE_UNAVAILABLE"
    text, _ = MetricsPage(Sources(visits, RequestMeter(), list))()
    page = Page(text.decode())
    assert page.total("hetero_errors_total", reason="COMPUTE_UNAVAILABLE") == 1
    assert not page.find("hetero_num_requests_running")
    other, _ = MetricsPage(Sources(VisitMeter(), RequestMeter(), list))()
    assert not Page(other.decode()).find("hetero_errors_total")


def test_a_request_fails_once_for_the_first_reason():
    visits = VisitMeter()
    with visits.visit("http", "/v1/completions"):
        note_error("COMPUTE_UNAVAILABLE")
        note_error("INTERNAL")
    assert visits.num_errors == {("http", "COMPUTE_UNAVAILABLE"): 1}


def test_without_prometheus_client_there_is_no_page_and_no_pretence_of_one(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "prom" in name else find_spec(name)
    )
    assert Instruments(None).page(list) is None
    with pytest.raises(ConfigError, match=r"metrics_compat.*prometheus_client"):
        Instruments(None, repeats_vllm=True).page(list)


def test_metrics_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="metrics_compat"):
        ControlPlaneConfig(compute="unix:c.sock", http=False, metrics_compat="vllm")
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        ControlPlaneConfig(compute="unix:c.sock", otlp_traces_endpoint="localhost:4317")


def test_the_dashboard_asks_for_nothing_that_is_not_exported():
    board = json.loads(DASHBOARD.read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    queries += [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"\bhetero_\w+", query)}
    exported = sample_names(FAMILIES)
    assert asked <= exported
    # And the other way round: what is measured can be seen, one series of each histogram at least.
    for family in FAMILIES:
        assert any(name.startswith(PREFIX + family.name) for name in asked), family.name
    boxes = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(boxes)) == len(boxes)
    assert all(query.count("(") == query.count(")") for query in queries)
