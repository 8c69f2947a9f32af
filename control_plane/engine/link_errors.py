"""What a compute plane's statuses mean for the link, in words and in errors."""

from __future__ import annotations

import grpc
from google.rpc import (  # type: ignore[import-untyped] # googleapis-common-protos has no stubs
    error_details_pb2,
)
from grpc_status import rpc_status

from control_plane.errors import FencedError, LinkError
from planes.address import Address
from protos.hetero.compute.v1 import compute_pb2


def link_lost(ended: grpc.RpcError | None) -> LinkError:
    """Return the error for a stream that ended, by itself (None) or with a status."""
    what = "it closed the stream" if ended is None else details(ended)
    return LinkError(f"the compute plane is lost: {what}")


def no_answer(error: grpc.RpcError, address: Address) -> LinkError:
    """Return the error for a unary call that failed."""
    if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return LinkError(f"what answers at {address} is no compute plane: {details(error)}")
    return LinkError(f"the compute plane does not answer: {details(error)}")


def why_not_open(error: grpc.RpcError) -> str:
    """Say why `Open` was refused; for the refusal that a person can mend, say how."""
    if not isinstance(error, grpc.Call) or reason(error) != "SESSION_HELD":
        return details(error)
    return (
        f"another control plane uses it ({error.details()}): stop that one first; this one waits "
        "and takes over when the session is free"
    )


def check_session(output: compute_pb2.ExecutionOutput, address: Address) -> None:
    """Raise unless the reply is one to a step: some refusals concern the session itself."""
    why, message = output.refusal.reason, output.refusal.message
    if why == compute_pb2.REFUSAL_REASON_STALE_SESSION:
        raise FencedError(f"another control plane took over {address}: {message}")
    if why in (
        compute_pb2.REFUSAL_REASON_STALE_EPOCH,
        compute_pb2.REFUSAL_REASON_STEP_GAP,
    ):
        raise LinkError(f"the compute plane at {address} lost count: {message}")


def reason(error: grpc.RpcError | None) -> str:
    """Return the machine-readable reason the plane gave; empty if the transport failed."""
    if not isinstance(error, grpc.Call):
        return ""
    info = error_details_pb2.ErrorInfo()
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # the details do not belong to the status: not a plane of ours
        return ""
    for packed in status.details if status is not None else ():
        if packed.Unpack(info):
            return str(info.reason)
    return ""


def details(error: grpc.RpcError) -> str:
    """Return code and message in one line."""
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
