"""An answer that can no longer keep to its form ends its request, which its caller may change."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.core.constraint import Constraint, Draft
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.core.structured_outputs import StructuredOutputs

FORM = StructuredOutputs(regex="a*")


class Ending:
    """Allows anything, until so many tokens have come."""

    allowed_tokens = b"\xff" * 4
    is_complete = False

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens
        self.error: str | None = None

    @property
    def constrainer(self) -> Ending:
        return self

    def advance(self, taken: Sequence[tuple[Constraint, Sequence[int]]]) -> None:
        for constraint, tokens in taken:
            assert isinstance(constraint, Ending)
            constraint.num_left -= len(tokens)
            if constraint.num_left < 0:
                constraint.error = "it takes too much"

    def draft(self, most: int) -> Sequence[Draft]:  # noqa: ARG002
        return ()


def ask(e, form: StructuredOutputs | None, num_tokens: int) -> Request:
    params = GenerationParams(max_tokens=9, seed=1, structured_outputs=form)
    request = Request(1, [7] * 3, params, frozenset({0}), constraints=(Ending(num_tokens),))
    e.scheduler.add_request(request)
    return request


def last_event(e):
    for _ in range(4):
        e.send()
        (event,) = e.commit()
    return event


def test_the_error_names_the_field_that_asks_for_the_form(engine):
    e = engine()
    request = ask(e, FORM, 3)
    event = last_event(e)
    assert (event.state, event.finish_reason) == (RequestState.FAILED, FinishReason.ERROR)
    assert event.error_field == "structured_outputs.regex"
    assert event.error == ("structured_outputs.regex can no longer be satisfied: it takes too much")
    assert (request.error, request.output_tokens) == (event.error, [5, 5, 5])
    assert e.used_blocks == 0


def test_where_none_does_there_is_none(engine):
    e = engine()
    ask(e, None, 3)
    event = last_event(e)
    assert (event.error, event.error_field) == ("it takes too much", None)


def test_a_plane_that_keeps_to_no_mask_is_not_its_callers_fault(engine):
    e = engine()
    request = ask(e, FORM, 0)
    request.constraints[0].allowed_tokens = b"\xdf" * 4  # not token 5, which the plane samples
    e.send()
    (event,) = e.commit()
    assert (event.error, event.error_field) == (
        "the compute plane sampled token 5, which its form forbids",
        None,
    )
