"""A whole control plane in this process, in front of the fake compute plane, and its page."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import grpc.aio
import httpx
from google.rpc import error_details_pb2, status_pb2
from prometheus_client.parser import text_string_to_metric_families

from control_plane.app import ControlPlane
from control_plane.config import ControlPlaneConfig
from tests.control_plane.api.services import Services
from tests.waiting import PATIENCE_S, until


class WholePlane:
    """The control plane, a gRPC client (`rpc`) and an HTTP client (`http`) of it."""

    def __init__(self, plane: ControlPlane, channel: grpc.aio.Channel) -> None:
        self.plane = plane
        self.rpc = Services(channel)
        self.http = httpx.AsyncClient(base_url=f"http://{plane._http.address}", timeout=PATIENCE_S)

    @property
    def frontend(self):
        return self.plane._grpc._access.require()

    async def page(self) -> Page:
        response = await self.http.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return Page(response.text)

    async def settled(self) -> Page:
        """The page once nobody is served any more, and no step is under way."""
        busy = (
            "hetero_inflight_requests",
            "hetero_num_requests_running",
            "hetero_kv_cache_usage_perc",  # not free before its last step is committed
        )
        page = await self.page()

        async def is_settled() -> bool:
            nonlocal page
            page = await self.page()
            return len(self.plane._hub) == 0 and not any(map(page.total, busy))

        await until(is_settled)
        return page


class Page:
    """What one look at the page has shown."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def find(self, name: str, **labels: str) -> list:
        return [
            sample
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def total(self, name: str, **labels: str) -> float:
        return sum(sample.value for sample in self.find(name, **labels))

    def by(self, label: str, name: str) -> dict[str, float]:
        """The values that are not 0, by one label."""
        found: dict[str, float] = {}
        for sample in self.find(name):
            found[sample.labels[label]] = found.get(sample.labels[label], 0) + sample.value
        return {key: value for key, value in found.items() if value}


@contextlib.asynccontextmanager
async def whole_plane(fake_plane, tmp_path, **settings):
    wiring = {
        "compute": fake_plane.address,
        "listen": f"unix:{tmp_path}/control.sock",
        "http_port": 0,
        "shutdown_timeout": 5.0,
    }
    config = ControlPlaneConfig(**(wiring | settings))
    plane = ControlPlane(config)
    running = asyncio.create_task(plane.run())

    def is_up() -> bool:
        if running.done():
            running.result()  # why it ended
        http = plane._http
        return http is not None and http._server is not None and http._server.started

    await until(is_up)
    async with asyncio.timeout(PATIENCE_S):
        await plane._shutdown._link_up.wait()
    async with grpc.aio.insecure_channel(plane._address) as channel:
        served = WholePlane(plane, channel)
        async with served.http:
            yield served
    plane._shutdown.on_signal()
    assert await asyncio.wait_for(running, PATIENCE_S) == 0
    gc.unfreeze()  # what the server froze is the tests' own process


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The word that a refused RPC's details have."""
    (packed,) = (value for key, value in error.trailing_metadata() if key.endswith("-bin"))
    info = error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(packed).details:
        if detail.Unpack(info):
            return info.reason
    raise AssertionError("the error has no reason")
