"""Routes for those who run the server: health, readiness, metrics."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from control_plane.http.backend import Backend
from control_plane.http.errors import HttpRefusal
from control_plane.http.model_schema import State


def operation_routes(backend: Backend) -> APIRouter:
    """Return the routes; they work before there is an engine. Only metrics need a token."""
    router = APIRouter(tags=["operations"])

    # Load balancers ask with HEAD; the server leaves the body out.
    @router.head("/healthz", include_in_schema=False)
    @router.get("/healthz", response_model=State)
    async def healthz() -> Response:
        """Say that the process is alive: its event loop answers."""
        return JSONResponse({"status": "ok", "state": backend.gate.state.value})

    # /health: as vLLM and llama-server call it, for probes that were written for them.
    @router.head("/health", include_in_schema=False)
    @router.get("/health", include_in_schema=False)
    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz", response_model=State, responses={503: {"model": State}})
    async def readyz() -> Response:
        """Say whether requests are taken and computed now; 503 if not."""
        gate = backend.gate
        status = "ok" if gate.is_serving else "unavailable"
        code = HTTPStatus.OK if gate.is_serving else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"status": status, "state": gate.state.value}, code)

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}

    @router.get("/metrics", response_class=Response, responses={200: text})
    async def metrics() -> Response:
        """Show the metrics, in the text format of Prometheus."""
        if backend.metrics is None:
            raise HttpRefusal(
                HTTPStatus.NOT_FOUND, "This server has no metrics page.", code="not_found"
            )
        page, content_type = backend.metrics()
        return Response(page, headers={"Content-Type": content_type})

    return router
