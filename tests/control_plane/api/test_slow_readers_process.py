"""A client that stops reading, against a control plane process on a fake compute plane."""

from __future__ import annotations

import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.api.services import Services


def ask(max_tokens, **sampling):
    params = pb.SamplingParams(max_tokens=max_tokens, seed=0, num_logprobs=20, **sampling)
    return pb.GenerateRequest(text="hello", sampling=params)


def test_a_reader_that_stops_is_cut_off_and_its_neighbour_reads_on(fake_plane, launch, expected):
    fake_plane.num_blocks = 1024
    fake_plane.features = (*fake_plane.features, "logprobs")
    process = launch("--max-unread-tokens=64", "--max-model-len=4000")
    window = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(process.ready(), options=window) as channel:
        stub = Services(channel)
        stream = stub.GenerateStream(ask(1800))
        assert next(stream).HasField("started")
        deadline = time.monotonic() + 60
        while stub.GetMetrics(pb.GetMetricsRequest()).cancelled_requests == 0:
            assert time.monotonic() < deadline
            assert stub.Generate(ask(9)).text == expected("hello", 9)
        assert stub.GetMetrics(pb.GetMetricsRequest()).active_sequences <= 1
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        info = error_details_pb2.ErrorInfo()
        assert any(packed.Unpack(info) for packed in rpc_status.from_call(caught.value).details)
        assert info.reason == "READER_TOO_SLOW"
