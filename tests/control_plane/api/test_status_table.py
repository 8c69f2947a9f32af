from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

import control_plane
from control_plane.api.status import (
    HTTP_STATUS_OF,
    STATUS_OF,
    describe_error,
    describe_fault,
    http_status,
    status_code,
)
from control_plane.core.errors import ContextLengthError
from control_plane.errors import QueueFullError
from planes.errors import EngineError, ValidationError


def every_error_class():
    """All EngineError classes of this plane and of `planes`, modules not imported yet included."""
    for module in pkgutil.walk_packages(control_plane.__path__, "control_plane."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, todo = set(), [EngineError]
    while todo:
        cls = todo.pop()
        found.add(cls)
        todo.extend(cls.__subclasses__())
    return {cls for cls in found if cls.__module__.startswith(("planes.", "control_plane."))}


def test_every_error_class_has_a_row_of_its_own():
    assert every_error_class() == set(STATUS_OF)


def test_the_page_for_grpc_developers_has_every_reason_with_its_code():
    page = (Path(__file__).parents[3] / "docs" / "grpc.md").read_text(encoding="utf-8")
    told, code = {}, ""
    for first, reasons in re.findall(r"^\| (`[A-Z_]+`|) ?\| (`[A-Z_`, ]+`) \|", page, re.MULTILINE):
        code = first.strip("`") or code
        told.update(dict.fromkeys(re.findall(r"[A-Z_]+", reasons), code))
    assert told == {cls.reason: code.name for cls, code in STATUS_OF.items()} | {
        "INTERNAL": "INTERNAL"  # of a fault that has no class
    }


def test_a_users_subclass_takes_the_row_of_its_nearest_ancestor():
    class MyContextLengthError(ContextLengthError):
        pass

    assert status_code(MyContextLengthError("x")) is grpc.StatusCode.INVALID_ARGUMENT


def unpack(failure, *kinds):
    ((key, value),) = failure.trailing_metadata
    assert key == "grpc-status-details-bin"
    status = status_pb2.Status.FromString(value)
    assert (status.code, status.message) == (failure.code.value[0], failure.message)
    found = []
    for kind in kinds:
        (packed,) = (d for d in status.details if d.Is(kind.DESCRIPTOR))
        message = kind()
        packed.Unpack(message)
        found.append(message)
    assert len(status.details) == len(kinds)
    return found


def test_a_field_becomes_a_violation_with_its_path_in_the_request():
    failure = describe_error(ValidationError("top_p is 7", field="top_p"))
    info, bad = unpack(failure, error_details_pb2.ErrorInfo, error_details_pb2.BadRequest)
    assert info.reason == "INVALID_REQUEST"
    assert [(v.field, v.description) for v in bad.field_violations] == [
        ("sampling.top_p", "top_p is 7")
    ]


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("structured_outputs.json", "sampling.structured_outputs.json"),
        ("token_ids", "token_ids.ids"),
        ("stop[0]", "sampling.stop[0]"),
        ("messages[0].role", "messages[0].role"),
        ("continued", "received_token_ids"),
    ],
)
def test_what_lies_within_a_field_is_named_by_its_whole_path_too(field, path):
    failure = describe_error(ValidationError("no", field=field))
    _, bad = unpack(failure, error_details_pb2.ErrorInfo, error_details_pb2.BadRequest)
    assert [violation.field for violation in bad.field_violations] == [path]


def test_a_passing_state_says_when_to_retry():
    failure = describe_error(QueueFullError("full"))
    _, retry = unpack(failure, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)
    assert retry.retry_delay.seconds == 1


def test_a_fault_of_ours_tells_the_client_only_where_to_look():
    failure = describe_fault("abc")
    (info,) = unpack(failure, error_details_pb2.ErrorInfo)
    assert failure.code is grpc.StatusCode.INTERNAL
    assert info.metadata["request_id"] == "abc"


@pytest.mark.parametrize("code", sorted({code.name for code in STATUS_OF.values()}))
def test_codes_are_those_of_the_design(code):
    assert code in {
        "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
        "UNAVAILABLE", "INTERNAL", "UNAUTHENTICATED", "PERMISSION_DENIED", "CANCELLED",
    }  # fmt: skip


def test_every_code_of_the_table_has_an_http_status_of_its_kind():
    for error, code in STATUS_OF.items():
        is_ours = code.name in ("INTERNAL", "UNAVAILABLE", "CANCELLED")
        assert (HTTP_STATUS_OF[code] >= 500) == is_ours, error
    assert http_status(QueueFullError("no")) == 429
    assert http_status(ContextLengthError("no")) == 400
