from __future__ import annotations

import pytest

from control_plane.tracing.trace_context import TraceContext, read_trace

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def test_a_caller_span_is_read_with_its_flags_and_state():
    headers = [("tracestate", "a=1"), ("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x", b"\xff")]
    assert read_trace([*headers, ("tracestate", "b=2")]) == TraceContext(
        TRACE, PARENT, is_sampled=True, state="a=1,b=2"
    )
    assert read_trace([("traceparent", f"00-{TRACE}-{PARENT}-02")]) == TraceContext(
        TRACE, PARENT, is_sampled=False
    )


@pytest.mark.parametrize(
    "value",
    [
        "", "00", f"00-{TRACE}-{PARENT}", f"00-{TRACE.upper()}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-01-more", f"00-{TRACE}-{PARENT}-0g", f"0-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01\n00", "x" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_trace_context_is_ignored(value):
    assert read_trace([("traceparent", value)]) is None


def test_versions_to_come_may_have_more_and_two_parents_are_none():
    longer = f"01-{TRACE}-{PARENT}-01-what-comes-later"
    assert read_trace([("traceparent", longer)]) == TraceContext(TRACE, PARENT, is_sampled=True)
    assert read_trace([("traceparent", longer)] * 2) is None
    assert read_trace([]) is None


def test_a_state_too_long_is_dropped_and_the_parent_kept():
    headers = [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "a=" + "x" * 600)]
    found = read_trace(headers)
    assert found is not None
    assert found.state == ""
