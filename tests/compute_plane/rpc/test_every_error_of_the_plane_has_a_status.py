from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2

import compute_plane.errors
import compute_plane.model.errors
import planes.errors
from compute_plane.errors import BatchRefused, InvalidBatch
from compute_plane.rpc.convert import REFUSAL_REASON, refusal_reason
from compute_plane.rpc.status import STATUS_OF, rich_status, status_code
from planes.errors import EngineError


def error_classes(root: type[EngineError] = EngineError) -> set[type[EngineError]]:
    """Every error class the compute plane can raise: its own and the shared families."""
    found = {root}
    for cls in root.__subclasses__():
        found |= error_classes(cls)
    return {cls for cls in found if cls.__module__.startswith(("compute_plane.", "planes."))}


def test_every_error_class_has_a_row_of_its_own():
    modules = (compute_plane.errors, compute_plane.model.errors, planes.errors)
    named = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, EngineError)
    }
    assert named <= error_classes()
    assert error_classes() == set(STATUS_OF)


def test_every_refusal_has_a_word_on_the_wire():
    assert set(REFUSAL_REASON) == error_classes(BatchRefused) - {BatchRefused}
    assert len(set(REFUSAL_REASON.values())) == len(REFUSAL_REASON)


def test_reasons_are_distinct_words():
    reasons = [cls.reason for cls in STATUS_OF]
    assert len(set(reasons)) == len(reasons)
    assert all(reason.replace("_", "").isupper() for reason in reasons)


def test_a_users_own_error_takes_the_row_of_its_ancestor():
    class OwnRefusal(InvalidBatch):
        pass

    error = OwnRefusal("mine")
    assert status_code(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal_reason(error) == REFUSAL_REASON[InvalidBatch]


@pytest.mark.parametrize("field", [None, "slots[3]"])
def test_details_name_reason_and_field(field: str | None):
    status = rich_status(InvalidBatch("too many", field=field))
    info = error_details_pb2.ErrorInfo.FromString(status.details[0].value)
    assert (info.reason, info.domain) == ("INVALID_BATCH", "hetero-paged-infer")
    assert len(status.details) == (1 if field is None else 2)
