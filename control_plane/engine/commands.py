"""What each command does to the scheduler and the books; on the engine thread."""

from __future__ import annotations

from collections.abc import Callable

from control_plane.core.embedding import EMBEDDINGS
from control_plane.core.generation_params import GenerationParams
from control_plane.core.interface import (
    ADAPTERS,
    OPTIONAL_PARAMETERS,
    EndsSamples,
    FlushesPrefixCache,
    KeepsParameters,
    SchedulerProtocol,
)
from control_plane.core.request import Request
from control_plane.engine.inbox import (
    Adopt,
    Cancel,
    Command,
    EndSample,
    FlushPrefixCache,
    Inspect,
    Submit,
    Withdraw,
)
from control_plane.engine.ledger import Ledger
from control_plane.engine.moving import Moving, adopt, withdraw
from control_plane.errors import QueueFullError
from planes.errors import EngineError, ValidationError

_PLAIN = GenerationParams()


class CommandDesk:
    """Carries commands out.

    `check_grace` raises if the compute plane has been away too long for a new request. `may_move`:
    whether requests may leave now. `publish_news`: called before requests leave, so that nobody
    else has news of them first. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        scheduler: SchedulerProtocol,
        ledger: Ledger,
        *,
        max_queued_requests: int,
        check_grace: Callable[[], None],
        may_move: Callable[[], bool],
        publish_news: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._max_queued_requests = max_queued_requests
        self._check_grace = check_grace
        self._may_move = may_move
        self._publish_news = publish_news
        self._clock = clock

    def carry_out(self, command: Command) -> None:
        """Do what a command says."""
        match command:
            case Submit(request):
                self._add(request)
            case Cancel(request_id):
                output = self._scheduler.cancel(request_id, self._clock())
                if output is not None:
                    self._ledger.take(output)
            case EndSample(request_id, sample_index, num_tokens):
                self._end_sample(request_id, sample_index, num_tokens)
            case FlushPrefixCache(reply_count):
                reply_count(self._flush_prefix_cache())
            case Inspect(reply, include_ended):
                reply(self._ledger.list_requests(include_ended=include_ended))
            case Withdraw(may_go, reply_moving):
                moving: list[Moving] = []
                if self._may_move():
                    moving = withdraw(self._scheduler, self._ledger, may_go)
                self._publish_news()
                reply_moving(moving)
            case Adopt(incoming):
                adopt(self._scheduler, self._ledger, incoming)

    def _add(self, request: Request) -> None:
        """Queue a request, or publish why not."""
        try:
            limit = self._max_queued_requests
            if self._scheduler.get_stats().num_queued_requests >= limit:
                raise QueueFullError(f"{limit} requests wait already (max_queued_requests)")
            self._check_grace()
            self._check_parameters(request)
            self._scheduler.add_request(request)
        except EngineError as error:
            self._ledger.refuse(request, error)
        else:
            self._ledger.admit(request)

    def _check_parameters(self, request: Request) -> None:
        """Refuse what a scheduler of a user's own would pass over in silence."""
        scheduler = self._scheduler
        keeps = scheduler.keeps if isinstance(scheduler, KeepsParameters) else frozenset()
        if request.embedding is not None and EMBEDDINGS not in keeps:
            raise ValidationError("this engine's scheduler makes no embeddings", field="prompt")
        if request.adapter and ADAPTERS not in keeps:
            raise ValidationError("this engine's scheduler takes no adapters", field="model")
        for name in OPTIONAL_PARAMETERS:
            value = getattr(request.params, name)
            if name in keeps or value == getattr(_PLAIN, name):
                continue
            field = value.name if name == "structured_outputs" else name
            wanted = "1" if name == "n" else "unset"
            raise ValidationError(
                f"{field} must be {wanted}: this engine's scheduler does not keep to it",
                field=field,
            )

    def _end_sample(self, request_id: int, sample_index: int, num_tokens: int) -> None:
        """End a sample; a scheduler of a user's own that cannot lets it run on, unread."""
        if isinstance(self._scheduler, EndsSamples):
            output = self._scheduler.end_sample(request_id, sample_index, num_tokens, self._clock())
            if output is not None:
                self._ledger.take(output)

    def _flush_prefix_cache(self) -> int:
        """Forget what earlier requests left; how many blocks that was."""
        scheduler = self._scheduler
        return scheduler.flush_prefix_cache() if isinstance(scheduler, FlushesPrefixCache) else 0
