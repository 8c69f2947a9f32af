"""What the front end of an engine is put together from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from control_plane.core.embedding import AUTO
from control_plane.core.kv_cache import MemoryStats
from control_plane.engine.admission import Admission
from control_plane.engine.gate import Gate
from control_plane.engine.inbox import RequestDoor
from control_plane.engine.plane import PlaneDescription
from control_plane.engine.stream_hub import StreamHub
from control_plane.engine.streams import DEFAULT_MAX_UNREAD_TOKENS
from control_plane.engine.watch import WatchMaker, watch_nothing
from control_plane.structured.grammars import Grammars
from control_plane.telemetry import EngineMetrics
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.chat_template import NO_TEMPLATE, ChatTemplate
from control_plane.text.tokenizer import Tokenizer
from planes.errors import ValidationError


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a front end works with; `metrics` and `memory_stats` read the engine's last turn.

    `max_queued_requests`: that may wait for each of `num_planes` compute planes. `chat_template`:
    None if there is none, `why_no_chat` says why not. `answer_formats`: how answers of
    conversations come apart; None: they are text. `max_unread_tokens`: of one sample, before its
    reader is too slow. `on_drain` is called when the server begins to drain by a client's word.
    `wants_principal`: requests are made in somebody's name (`control_plane.access`), or refused.
    `watch`: makes who looks on while a request is answered. `pooling`: how texts are embedded, one
    of `core.embedding.POOLINGS`; `text_end`: token ids that come behind them then.
    """

    plane: PlaneDescription
    tokenizer: Tokenizer
    admission: Admission
    grammars: Grammars
    inbox: RequestDoor
    hub: StreamHub
    gate: Gate
    metrics: Callable[[], EngineMetrics]
    memory_stats: Callable[[], MemoryStats]
    max_queued_requests: int
    num_planes: int = 1
    chat_template: ChatTemplate | None = None
    why_no_chat: str = NO_TEMPLATE
    answer_formats: AnswerFormats | None = None
    max_unread_tokens: int = DEFAULT_MAX_UNREAD_TOKENS
    on_drain: Callable[[], None] | None = None
    wants_principal: bool = False
    watch: WatchMaker = watch_nothing
    pooling: str = AUTO
    text_end: Sequence[int] = ()

    def check_together(self, num_prompts: int) -> None:
        """Raise ValidationError for more prompts of one call than may ever wait together."""
        most = self.max_queued_requests * self.num_planes
        if num_prompts > most:
            raise ValidationError(
                f"prompt must be at most {most} prompt{'s' if most > 1 else ''} in one call, as "
                f"many requests as may wait here (max_queued_requests), got {num_prompts}",
                field="prompt",
            )
