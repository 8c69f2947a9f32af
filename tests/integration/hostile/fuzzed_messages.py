"""Protobuf messages nobody would send: odd values, broken bytes, wrong types, endless depth."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message

from protos.hetero.inference.v1 import inference_pb2 as pb

ODD_NUMBERS = (0, 1, 2, 3, 5, 20, 97, 128, 49_151, 49_152, 2**31 - 1, 2**32 - 1)
ODD_FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, -2.0, 1e-45, 1e300, float("inf"), float("nan"))
ODD_TEXTS = (
    "", "a", "hello", "{}", "[" * 200, '{"a": NaN}', "user", "system", "tool", "\0", "é€😀",
    "x" * 300, "{{ 1 / 0 }}", "<|im_start|>", "\u202e", "\ufffe",
)  # fmt: skip

MAX_TOKENS, CONTEXT = 1, 2048
MAX_SAMPLES = 3
TOO_LARGE = 5 << 20
"""Bytes; more than gRPC takes."""

METHODS = [
    method for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods
]


def message_of(method: MethodDescriptor) -> Message:
    """An empty request."""
    return getattr(pb, method.input_type.name)()


def odd_value(field: FieldDescriptor, draw: random.Random) -> object:
    if field.type == FieldDescriptor.TYPE_STRING:
        return draw.choice(ODD_TEXTS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return draw.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return draw.choice(ODD_FLOATS)
    number = draw.choice(ODD_NUMBERS)
    if field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_ENUM):
        return draw.choice((1, -1)) * min(number, 2**31 - 1)
    return number


def fill(message: Message, draw: random.Random, depth: int = 0) -> Message:
    """Set some of the fields to odd values."""
    share = draw.choice((0.2, 0.6))
    for field in message.DESCRIPTOR.fields:
        if draw.random() > share or depth > 4:
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


def varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*data, number))


def tag(field_number: int, wire_type: int) -> bytes:
    return varint(field_number << 3 | wire_type)


def as_it_is(data: bytes, draw: random.Random) -> bytes:  # noqa: ARG001 - one of several
    return data


def noise(data: bytes, draw: random.Random) -> bytes:  # noqa: ARG001
    return draw.randbytes(draw.randint(0, 60))


def flipped(data: bytes, draw: random.Random) -> bytes:
    mangled = bytearray(data or b"\0")
    for _ in range(draw.randint(1, 8)):
        mangled[draw.randrange(len(mangled))] ^= 1 << draw.randrange(8)
    return bytes(mangled)


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randint(0, len(data))]


def twice(data: bytes, draw: random.Random) -> bytes:
    """Fields that are there twice, members of a oneof beside each other."""
    return data + cut(data, draw) + data


def wrong_wire_types(data: bytes, draw: random.Random) -> bytes:
    fields = [
        tag(draw.randint(0, 21), draw.randrange(8)) + draw.randbytes(draw.randint(0, 9))
        for _ in range(draw.randint(1, 6))
    ]
    return data + b"".join(fields)


def huge_lengths(data: bytes, draw: random.Random) -> bytes:
    length = draw.choice((2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
    return data + tag(draw.randint(1, 6), 2) + varint(length) + draw.randbytes(10)


def endless_varint(data: bytes, draw: random.Random) -> bytes:
    return data + tag(draw.randint(1, 6), 0) + b"\xff" * draw.choice((9, 10, 11, 200))


def deep_groups(data: bytes, draw: random.Random) -> bytes:
    number, depth = draw.randint(1, 30), draw.choice((50, 99, 101, 20_000))
    groups = tag(number, 3) * depth
    return data + groups + (tag(number, 4) * depth if draw.random() < 0.5 else b"")


def deep_messages(data: bytes, draw: random.Random) -> bytes:
    number = draw.randint(1, 4)
    for _ in range(draw.choice((20, 99, 101, 3000))):
        data = tag(number, 2) + varint(len(data)) + data
    return data


def no_utf8(data: bytes, draw: random.Random) -> bytes:
    text = draw.choice((b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"))
    return data + tag(draw.randint(1, 6), 2) + varint(len(text)) + text


def too_large(data: bytes, draw: random.Random) -> bytes:
    if draw.random() > 0.05:
        return as_it_is(data, draw)
    return data + tag(2, 2) + varint(TOO_LARGE) + b"a" * TOO_LARGE


KINDS: list[Callable[[bytes, random.Random], bytes]] = [
    as_it_is, as_it_is, as_it_is, noise, flipped, flipped, cut, twice, wrong_wire_types,
    huge_lengths, endless_varint, deep_groups, deep_messages, no_utf8, too_large,
]  # fmt: skip


def bounded(method: MethodDescriptor, data: bytes) -> bytes:
    """The same bytes, or where they would be computed for long, those of a shorter answer."""
    message = message_of(method)
    try:
        message.ParseFromString(data)
    except DecodeError:
        return data
    request = message
    if isinstance(message, pb.ResumeRequest):
        kind = message.WhichOneof("request")
        if kind is None:
            return data
        request = getattr(message, kind)
    if not isinstance(request, pb.GenerateRequest | pb.ChatRequest):
        return data
    sampling = request.sampling
    tokens = sampling.max_tokens if sampling.HasField("max_tokens") else 100
    if not (MAX_TOKENS < tokens < CONTEXT or sampling.n > MAX_SAMPLES):
        return data
    if MAX_TOKENS < tokens < CONTEXT:
        sampling.max_tokens = MAX_TOKENS
    if MAX_SAMPLES < sampling.n <= 128:
        sampling.n = MAX_SAMPLES
    return message.SerializeToString()


def ends_the_story(method: MethodDescriptor, data: bytes) -> bool:
    """Whether the message is a valid one to `Drain`."""
    if method.name != "Drain":
        return False
    try:
        message_of(method).ParseFromString(data)
    except DecodeError:
        return False
    return True


def fuzzed(seed: str, count: int) -> Iterator[tuple[MethodDescriptor, bytes]]:
    """So many messages, for all methods in turn; the same for the same seed."""
    draw = random.Random(seed)
    for index in range(count):
        method = METHODS[index % len(METHODS)]
        while True:
            data = fill(message_of(method), draw).SerializeToString()
            data = bounded(method, draw.choice(KINDS)(data, draw))
            if not ends_the_story(method, data):
                yield method, data
                break
