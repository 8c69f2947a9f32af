"""Answers that go on behind tokens which their reader has: some are at their end already."""

from __future__ import annotations

from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.engine.events import RequestEnd, RequestTimings, RequestUpdate
from control_plane.engine.streams import RequestStream


def end_of_continued(request: Request, stream: RequestStream, now: float) -> RequestUpdate | None:
    """Return the end of an answer whose first tokens are all there is of it; None: it goes on.

    `stream`: has the text of these tokens. `now`: on the engine's clock.
    """
    known, params = request.output_tokens, request.params
    matched_stop = None
    if known and known[-1] in request.end_token_ids:
        matched_stop = known[-1] if known[-1] in params.stop_token_ids else None
        reason = FinishReason.STOP
    elif stream.texts[0].has_ended or any(one.is_complete for one in request.constraints):
        reason = FinishReason.STOP
    elif known and len(known) == params.max_tokens:
        reason = FinishReason.LENGTH
    else:
        return None
    timings = RequestTimings(None, None, now - request.arrival_time)
    return RequestUpdate(
        request.id,
        end=RequestEnd(RequestState.COMPLETED, reason, timings),
        finish_reason=reason,
        matched_stop=matched_stop,
    )
