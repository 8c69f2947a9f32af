from __future__ import annotations

import pytest
from grpc import _channel

from hetero_infer import Client, GenerationParams
from protos.hetero.inference.v1 import inference_pb2_grpc

PARAMS = GenerationParams(max_tokens=9)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_a_signal_while_a_call_begins_does_not_hold_the_program_up(
    serve, monkeypatch, interruption
):
    """gRPC knows of the call then, and of nobody who would see it end: closing waits for that."""

    def interrupted(_):
        raise interruption

    address = serve(inference_pb2_grpc.InferenceServiceServicer())
    monkeypatch.setattr(_channel, "_run_channel_spin_thread", interrupted)
    with (
        pytest.raises(interruption),
        Client(address) as client,
        client.stream("x", PARAMS) as stream,
    ):
        list(stream)
