"""Random bytes and random fields to every method: never a fault of the server's, never a hang."""

from __future__ import annotations

import random

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from protos.hetero.inference.v1 import inference_pb2 as pb

CALLERS_FAULT = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
}
ODD_NUMBERS = (0, 1, 2, 3, 5, 97, 258, 259, 2**31 - 1, 2**32 - 1)
ODD_FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, -2.0, 1e-45, 1e300, float("inf"), float("nan"))
ODD_TEXTS = ("", "a", "hello", "{}", "[", "user", "\0", "é€😀", "x" * 300, "{{ 1 / 0 }}")
NOT_FUZZED = ("Drain",)  # it ends the story

METHODS = [
    method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name not in NOT_FUZZED
]


def odd_value(field, draw):
    if field.type in (FieldDescriptor.TYPE_STRING,):
        return draw.choice(ODD_TEXTS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return draw.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return draw.choice(ODD_FLOATS)
    number = draw.choice(ODD_NUMBERS)
    return min(number, 2**31 - 1) if field.type == FieldDescriptor.TYPE_INT32 else number


def fill(message, draw, depth=0):
    """Set a few of the fields to odd values."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.4 or (depth > 4):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(draw.randint(0, 3)):
                getattr(message, field.name)[draw.choice(ODD_NUMBERS)] = draw.choice(ODD_FLOATS)
        elif field.is_repeated and field.message_type is not None:
            for _ in range(draw.randint(0, 3)):
                fill(getattr(message, field.name).add(), draw, depth + 1)
        elif field.is_repeated:
            values = [odd_value(field, draw) for _ in range(draw.randint(0, 6))]
            getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), draw, depth + 1)
        else:
            setattr(message, field.name, odd_value(field, draw))
    return message


def fuzz(method, draw):
    """Return the bytes of a message: well-formed, cut, mangled, or none at all."""
    data = fill(getattr(pb, method.input_type.name)(), draw).SerializeToString()
    kind = draw.random()
    if kind < 0.6:
        return data
    if kind < 0.8:
        return draw.randbytes(draw.randint(0, 60))
    mangled = bytearray(data or b"\0")
    mangled[draw.randrange(len(mangled))] ^= 1 << draw.randrange(8)
    return bytes(mangled)


def send(channel, method, data):
    """The status of one call with these bytes."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    call = channel.unary_stream if method.server_streaming else channel.unary_unary
    try:
        answer = call(path, request_serializer=bytes, response_deserializer=bytes)(data, timeout=30)
        if method.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("count", [20, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_whatever_a_caller_sends_is_the_callers_fault(channel, stub, expected, method, count):
    draw = random.Random(f"{method.name}/{count}")
    for _ in range(count if count < 100 else count // len(METHODS)):
        data = fuzz(method, draw)
        code, said = send(channel, method, data)
        assert code in CALLERS_FAULT, (data, code, said)
    neighbour = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(max_tokens=9, seed=0))
    assert stub.Generate(neighbour).text == expected("hello", 9)


@pytest.fixture(scope="module")
def fake_plane(fake_plane_class, tmp_path_factory):
    plane = fake_plane_class(f"unix:{tmp_path_factory.mktemp('plane')}/compute.sock")
    plane.features = ("copies", "sampled_slots", "prompt_logprobs")
    plane.start()
    yield plane
    plane.kill()


@pytest.fixture(scope="module")
def control_plane(fake_plane, start_control_plane, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    process = start_control_plane(fake_plane, f"--chat-template={template}")
    process.ready()
    yield process
    process.close()
