"""What the public protocol promises in its descriptors alone."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor

from protos.hetero.inference.v1 import inference_pb2 as pb

FILE = pb.DESCRIPTOR

SERVICES = {
    "InferenceService": {"Generate", "GenerateStream", "Chat", "ChatStream", "Resume", "Embed"},
    "ModelService": {"ListModels", "GetModelInfo"},
    "TokenizerService": {"Tokenize", "Detokenize", "ApplyChatTemplate"},
    "AdminService": {
        "GetMemoryStats", "GetMetrics", "ListRequests", "Abort", "Drain", "FlushPrefixCache",
    },
}  # fmt: skip


def test_services_are_split_by_caller():
    found = {name: {m.name for m in s.methods} for name, s in FILE.services_by_name.items()}
    assert found == SERVICES


def test_a_prompt_is_text_or_token_ids():
    (prompt,) = pb.GenerateRequest.DESCRIPTOR.oneofs
    assert [field.name for field in prompt.fields] == ["text", "token_ids"]


def test_every_sampling_scalar_says_whether_it_was_given():
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        assert field.has_presence or field.is_repeated, field.name
    params = pb.SamplingParams(temperature=0)
    assert params.HasField("temperature")
    assert not params.HasField("top_p")


@pytest.mark.parametrize("enum", FILE.enum_types_by_name.values(), ids=lambda enum: enum.name)
def test_every_enum_starts_unspecified(enum):
    first = enum.values[0]
    assert first.number == 0
    assert first.name.endswith("_UNSPECIFIED")


def test_a_stream_has_what_each_of_its_events_owes():
    def names(message) -> set[str]:
        return {field.name for field in message.DESCRIPTOR.fields}

    assert names(pb.Started) >= {"request_id", "model", "prompt_tokens", "sampling"}
    assert names(pb.Delta) >= {"text", "token_ids", "offset", "index"}
    assert names(pb.Finished) >= {"finish_reason", "matched_stop", "usage", "timings"}
    usage = pb.Usage.DESCRIPTOR.fields_by_name["cached_tokens"]
    assert usage.type == FieldDescriptor.TYPE_UINT32
