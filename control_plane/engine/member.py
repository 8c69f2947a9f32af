"""One compute plane of a fleet: its link, its engine thread, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from control_plane.core.request import Request
from control_plane.engine.admission import Admission
from control_plane.engine.bring_up import ConnectedPlane
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.inbox import Inbox
from control_plane.engine.loop import EngineLoop
from control_plane.engine.plane import said
from control_plane.engine.routing import CHUNK_TOKENS, Candidate, PrefixTrace
from control_plane.engine.thread import EngineThread
from control_plane.errors import PlaneMismatchError

MAX_TRACED_CHUNKS = 1 << 16


@dataclass(frozen=True, slots=True)
class PlaneFacts:
    """What decides whether a request may go to a plane; read by any thread."""

    address: str
    numerics_id: str
    admission: Admission

    def takes(self, request: Request) -> bool:
        """Whether the plane could ever compute the request."""
        return self.admission.has_room(
            request.num_prompt_tokens, request.params, embeds=request.embedding is not None
        )


class Member:
    """A compute plane that answered once; used on the event loop, but for `facts` and `inbox`."""

    def __init__(
        self,
        client: ComputeClient,
        connected: ConnectedPlane,
        make_loop: Callable[[Member], EngineLoop],
        *,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        plane = connected.plane
        self._client = client
        self.connected = connected
        self.facts = PlaneFacts(str(client.address), plane.numerics_id, connected.make_admission())
        num_chunks = plane.num_blocks * plane.block_size // CHUNK_TOKENS
        self.trace = PrefixTrace(min(num_chunks, MAX_TRACED_CHUNKS))
        self.is_linked = False
        self.lost_at: float | None = None
        self.load = 0
        self.loop = make_loop(self)
        self._thread = EngineThread(self.loop, on_fault=on_fault)

    @property
    def inbox(self) -> Inbox:
        """Where commands to its engine go."""
        return self.loop.inbox

    @property
    def epoch(self) -> int:
        """That of the plane's process."""
        return self._client.epoch

    def candidate(self, hashes: list[int]) -> Candidate:
        """Return what speaks for sending a prompt with these chunks here."""
        is_caching = self.connected.prefix_cache
        return Candidate(self.trace.num_cached_tokens(hashes) if is_caching else 0, self.load)

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    def has_turned(self) -> bool:
        """Whether its engine has turned since this was last asked."""
        return self._thread.has_turned()

    def stop(self, timeout_s: float) -> None:
        """End its engine and the requests that it has; wait for it."""
        self._thread.stop(timeout_s)


def check_same_model(one: ConnectedPlane, other: ConnectedPlane, address: str) -> None:
    """Raise PlaneMismatchError unless two planes have the same model; `address`: of the other.

    And the same adapters, in the same order. Their devices, their pools and how they compute may
    differ.
    """
    facts: list[tuple[str, object, object]] = [
        (name, getattr(one.plane, name), getattr(other.plane, name))
        for name in ("model", "model_sha256", "vocab_size", "context_length", "adapters")
    ]
    for name, first, second in facts:
        if first != second:
            raise PlaneMismatchError(
                f"the compute planes must have the same model: {name} at {address} is "
                f"{said(second)}, elsewhere it is {said(first)}",
                field=name,
            )
    for name in one.assets.__slots__:
        if getattr(one.assets, name) != getattr(other.assets, name):
            raise PlaneMismatchError(
                f"the compute planes must have the same model: {name} at {address} is not what "
                "it is elsewhere",
                field=name,
            )
