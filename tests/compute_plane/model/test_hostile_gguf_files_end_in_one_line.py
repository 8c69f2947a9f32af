from __future__ import annotations

import itertools
import os
import struct
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from compute_plane.model.errors import ModelFileError
from compute_plane.model.gguf_header import open_gguf
from compute_plane.model.loader import load_model
from compute_plane.model.rope import inverse_frequencies
from compute_plane.model.source import locate_model
from tests.compute_plane.model.llama_weights import decoded_weights

# A tiny model's float32 weights take 0.5 MB and its decoded vocabulary less.
MAX_ALLOCATED_BYTES = 8 << 20
FILE_SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """A sound file's bytes, and where its data starts."""
    path = tiny.gguf(tmp_path_factory.mktemp("whole") / "m.gguf", tiny.model())
    first = min(entry.offset for entry in open_gguf(path).tensors.values())
    return path.read_bytes(), first


def use(path):
    """Read everything there is to read of a model; returns the weights."""
    model = load_model(str(path))
    Tokenizer.from_buffer(model.assets.tokenizer_json)
    inverse_frequencies(model.spec)
    return decoded_weights(model)


def outcome(path):
    """Return None if the file loads, else its error; check the error's form and the memory."""
    error = None
    tracemalloc.start()
    try:
        use(path)
    except ModelFileError as fault:
        error = fault
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MAX_ALLOCATED_BYTES
    check_form(path, error)
    return error


def check_form(path, error):
    if error is not None:
        assert error.message.startswith(f"{path}: ")
        assert error.message.isprintable()
        assert len(error.message) < 1000


def text(value):
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def tensor(name, dimensions=(4,), kind=0, offset=0, num_dimensions=None):
    count = len(dimensions) if num_dimensions is None else num_dimensions
    return (
        text(name)
        + struct.pack("<I", count)
        + b"".join(struct.pack("<Q", size) for size in dimensions)
        + struct.pack("<IQ", kind, offset)
    )


def container(keys=(), tensors=(), data=b"", *, num_keys=None, num_tensors=None, version=3):
    """Assemble a GGUF file of whatever is given."""
    header = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header += b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


HUGE = (1 << 64) - 1
HOSTILE = {
    "the file is empty": b"",
    "magic at byte 0 needs 4 bytes": b"GG",
    "not a GGUF file": b"PK\x03\x04" + bytes(100),
    "version must be 2 or 3, got 1": container(version=1),
    "version must be 2 or 3, got 4": container(version=4),
    "big-endian": container(version=3 << 24),
    "tensor count must be at most": container(num_tensors=HUGE),
    "key count must be at most": container(num_keys=HUGE),
    "tensor count is 100000, more than": container(num_tensors=100000, data=bytes(64)),
    "key count is 60000, more than": container(num_keys=60000, data=bytes(64)),
    "name of key 0 must be at most 65535 bytes": container(
        [struct.pack("<Q", HUGE)], data=bytes(64)
    ),
    "name of key 0 is not UTF-8": container([key(b"\xff", 4, bytes(4))]),
    "value of a has unknown type 13": container([key("a", 13, bytes(8))]),
    "value of a at byte": container([key("a", 8, struct.pack("<Q", HUGE))]),
    "value of b at byte": container([key("b", 9, struct.pack("<IQ", 5, HUGE))]),
    "array of arrays": container([key("a", 9, struct.pack("<IQ", 9, 1) + bytes(16))]),
    "value of c has unknown type 77": container([key("c", 9, struct.pack("<IQ", 77, 1))]),
    "value of a must have at most 4194304 elements": container(
        [key("a", 9, struct.pack("<IQ", 8, HUGE))]
    ),
    "elements, more than the": container([key("a", 9, struct.pack("<IQ", 8, 1000))]),
    "the file ends within element 1": container(
        [key("a", 9, struct.pack("<IQ", 8, 3) + text("x") + struct.pack("<Q", HUGE))],
        data=bytes(64),
    ),
    "key a appears twice": container([key("a", 4, bytes(4)), key("a", 4, bytes(4))]),
    "tensor a appears twice": container([], [tensor("a"), tensor("a", offset=32)], bytes(64)),
    "name of tensor 0 must be": container([], [text("x" * 65536)], bytes(64)),
    "must have 1 to 4 dimensions, got 0": container([], [tensor("a", ())], bytes(64)),
    "must have 1 to 4 dimensions, got 4000000000": container(
        [], [tensor("a", num_dimensions=4000000000)], bytes(64)
    ),
    "has an empty dimension: [0, 4]": container([], [tensor("a", (4, 0))], bytes(64)),
    "tensor a needs bytes": container([], [tensor("a", (HUGE,) * 4)], bytes(64)),
    "tensor b needs bytes": container([], [tensor("b", (4,), offset=64)], bytes(64)),
    "type IQ3_S": container([], [tensor("a", (256,), 21)], bytes(256)),
    "rows of 128 elements, Q2_K needs": container([], [tensor("a", (128,), 10)], bytes(256)),
    "rows of 255 elements, Q3_K needs": container([], [tensor("a", (255,), 11)], bytes(256)),
    "rows of 33 elements, IQ4_NL needs": container([], [tensor("a", (33,), 20)], bytes(64)),
    "rows of 128 elements, IQ4_XS needs": container([], [tensor("a", (128,), 23)], bytes(256)),
    "type 4096": container([], [tensor("a", (4,), 4096)], bytes(64)),
    "rows of 33 elements, Q4_1 needs": container([], [tensor("a", (33,), 3)], bytes(64)),
    "rows of 33 elements, Q5_0 needs": container([], [tensor("a", (33,), 6)], bytes(64)),
    "rows of 33 elements, Q5_1 needs": container([], [tensor("a", (33,), 7)], bytes(64)),
    "rows of 288 elements, Q4_K needs": container([], [tensor("a", (288,), 12)], bytes(256)),
    "rows of 255 elements, Q5_K needs": container([], [tensor("a", (255,), 13)], bytes(256)),
    "rows of 32 elements, Q6_K needs": container([], [tensor("a", (32,), 14)], bytes(256)),
    "tensor q needs bytes": container([], [tensor("q", (256, 2), 14)], bytes(256)),
    "tensor k needs bytes": container([], [tensor("k", (HUGE & ~255,) * 4, 12)], bytes(256)),
    "tensor a starts at 4, not a multiple of 32": container([], [tensor("a", offset=4)], bytes(64)),
    "tensors a and b overlap": container(
        [], [tensor("a", (16,)), tensor("b", (4,), offset=32)], bytes(64)
    ),
    "tensors c and d overlap": container([], [tensor("c"), tensor("d")], bytes(64)),
    "general.alignment must be a uint32": container([key("general.alignment", 10, bytes(8))]),
    "power of two and at least 8, got 0": container([key("general.alignment", 4, bytes(4))]),
    "power of two and at least 8, got 48": container(
        [key("general.alignment", 4, struct.pack("<I", 48))]
    ),
    "tensor e needs bytes 2147483648 to": container(
        [key("general.alignment", 4, struct.pack("<I", 1 << 31))], [tensor("e")], bytes(64)
    ),
    "key general.architecture is missing": container(),
    "general.architecture must be a string, but it is of type uint32": container(
        [key("general.architecture", 4, bytes(4))]
    ),
    "architecture \\x1b[31m\\nred is not supported": container(
        [key("general.architecture", 8, text("\x1b[31m\nred"))]
    ),
    "general.architecture must be at most 1024 bytes": container(
        [key("general.architecture", 8, text("x" * 5000))]
    ),
    "general.architecture is not UTF-8": container(
        [key("general.architecture", 8, text(b"\xff\xfe"))]
    ),
}


@pytest.mark.parametrize("words", HOSTILE)
def test_a_hostile_header_is_refused_with_its_fault(tmp_path, words):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[words])
    error = outcome(path)
    assert error is not None
    assert words in error.message


def test_tensors_may_lie_in_any_order_and_leave_gaps(tmp_path):
    path = tmp_path / "sound.gguf"
    path.write_bytes(
        container([], [tensor("a", offset=96), tensor("b", (2, 4)), tensor("c", offset=32)])
        + bytes(112)
    )
    entries = open_gguf(path).tensors
    assert [entries[name].offset % 32 for name in "abc"] == [0, 0, 0]
    assert entries["b"].shape == (4, 2)


DECLARED = {
    "llama.block_count": (4, [0, 3, 4_000_000_000]),
    "llama.attention.head_count": (4, [0, 3, 4_000_000_000]),
    "llama.attention.head_count_kv": (4, [0, 3, 4_000_000_000]),
    "llama.embedding_length": (4, [0, 63, 4_000_000_000]),
    "llama.feed_forward_length": (4, [0, 4_000_000_000]),
    "llama.context_length": (4, [0, 4_000_000_000]),
    "llama.vocab_size": (4, [0, 4_000_000_000]),
    "llama.attention.key_length": (4, [0, 15, 4_000_000_000]),
    "llama.rope.freq_base": (6, [0.0, -1.0, float("nan"), float("inf")]),
    "llama.attention.layer_norm_rms_epsilon": (6, [0.0, -1.0, float("nan"), 5.0]),
    "tokenizer.ggml.eos_token_id": (4, [265, 4_000_000_000]),
    "tokenizer.ggml.bos_token_id": (4, [265]),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, (_, values) in DECLARED.items() for value in values],
)
def test_a_number_that_the_tensors_belie_is_refused(whole, tmp_path, name, value):
    content, _ = whole
    kind = DECLARED[name][0]
    start = content.index(text(name)) + len(text(name))
    assert struct.unpack_from("<I", content, start)[0] == kind
    stored = struct.pack("<f" if kind == 6 else "<I", value)
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content[: start + 4] + stored + content[start + 8 :])
    assert outcome(path) is not None


def section_ends(content):
    """Offsets at which something begins or ends: every length field and what follows it."""
    names = (b"general.architecture", b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges")
    marks = [0, 4, 8, 16, 24]
    for name in (*names, b"token_embd.weight", b"output_norm.weight"):
        at = content.index(name)
        marks += [at - 8, at - 4, at, at + len(name), at + len(name) + 4, at + len(name) + 12]
    return marks


def test_a_file_cut_at_any_section_is_refused(whole, tmp_path):
    content, data_start = whole
    path = tmp_path / "cut.gguf"
    for end in [*section_ends(content), data_start - 1, data_start, len(content) - 32]:
        path.write_bytes(content[:end])
        assert outcome(path) is not None, end


@pytest.mark.wide
@FILE_SETTINGS
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(whole, tmp_path, data):
    content, data_start = whole
    # Half of the cuts fall into the header, which is a small part of the file.
    end = data.draw(
        st.integers(0, data_start) | st.integers(data_start, len(content) - 32), label="end"
    )
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:end])
    assert outcome(path) is not None


@FILE_SETTINGS
@given(data=st.data())
def test_flipped_bits_in_the_header_load_or_are_refused(whole, tmp_path, data):
    content, data_start = whole
    flipped = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3), label="flips")):
        flipped[data.draw(st.integers(0, data_start - 1), label="byte")] ^= 1 << data.draw(
            st.integers(0, 7), label="bit"
        )
    path = tmp_path / "flipped.gguf"
    path.write_bytes(flipped)
    outcome(path)


@pytest.mark.wide
def test_every_bit_of_the_lengths_counts_and_types_may_flip(whole, tmp_path):
    """The fields a reader trusts: all 64 bits of the counts, and those around each key's name."""
    content, _ = whole
    fields = [range(4, 24)]
    for name in (b"general.architecture", b"tokenizer.ggml.tokens", b"blk.0.attn_q.weight"):
        at = content.index(name)
        fields += [range(at - 8, at), range(at + len(name), at + len(name) + 16)]
    path = tmp_path / "flipped.gguf"
    survivors = 0
    for byte, bit in itertools.product(itertools.chain(*fields), range(0, 8, 2)):
        flipped = bytearray(content)
        flipped[byte] ^= 1 << bit
        path.write_bytes(flipped)
        survivors += outcome(path) is None
    # Version 2 is the same layout, so one flip may pass; nearly all must not.
    assert survivors <= 3


@FILE_SETTINGS
@given(content=st.binary(max_size=400))
def test_random_bytes_behind_the_magic_are_refused(tmp_path, content):
    path = tmp_path / "random.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + content)
    assert outcome(path) is not None


@pytest.mark.wide
def test_flipped_bits_in_the_default_models_header_load_or_are_refused(tmp_path):
    """The real header, over zeros in place of the weights: a sparse file of the same size."""
    original = locate_model("default").path
    first = min(entry.offset for entry in open_gguf(original).tensors.values())
    with original.open("rb") as file:
        header = file.read(first)
    path = tmp_path / "flipped.gguf"
    for seed in range(12):
        flipped = bytearray(header)
        # Spread over the header: the keys come first, then strings, then the tensor table.
        flipped[(seed * 7919 + seed * first // 12) % first] ^= 1 << seed % 8
        with path.open("wb") as file:
            file.write(flipped)
            file.truncate(original.stat().st_size)
        error = None
        try:
            model = load_model(str(path))
        except ModelFileError as fault:
            error = fault
        else:
            Tokenizer.from_buffer(model.assets.tokenizer_json)
        check_form(path, error)


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in outcome(tmp_path / "pipe.gguf").message
    (tmp_path / "dangling.gguf").symlink_to(tmp_path / "nothing")
    with pytest.raises(ModelFileError, match="No such file"):
        open_gguf(tmp_path / "dangling.gguf")
