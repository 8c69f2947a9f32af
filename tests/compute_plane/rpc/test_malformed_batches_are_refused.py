"""Every field of a batch, wrong in every way it can be wrong, through both RPCs."""

from __future__ import annotations

import math

import grpc
import pytest

from protos.hetero.compute.v1 import compute_pb2
from tests.compute_plane.rpc.plane_harness import (
    Controller,
    Harness,
    reason,
    start,
    violated_fields,
)

HUGE = (1 << 32) - 1
NAN = math.nan


def sound_parts() -> dict:
    """A batch with a bit of everything: a start, a prefill row, a decode row.

    Slots 0 ("one", blocks 0 and 1) and 1 ("two!", blocks 8 and 9) have been prefilled; slot 2 is
    new, with blocks 16 and 17; a third block comes with the row.
    """
    return {
        "starts": [start(2, b"third one", [16, 17])],
        "slots": [0, 2],
        "query_lens": [1, 9],
        "positions": [3, 0],
        "new_block_counts": [0, 1],
        "new_block_ids": [18],
        "sampled_rows": [0, 1],
    }


def with_start(**parts: object) -> dict:
    """The sound batch with its start changed."""
    sampling, prefix = parts.pop("sampling", None), parts.pop("prefix", None)
    changed = start(2, b"third one", [16, 17])
    for name, value in parts.items():
        if isinstance(value, list):
            changed.ClearField(name)
            getattr(changed, name).extend(value)
        else:
            setattr(changed, name, value)
    if sampling is not None:
        changed.sampling.CopyFrom(compute_pb2.SamplingParams(**sampling))
    if prefix is not None:
        changed.prefix.CopyFrom(prefix)
    return {"starts": [changed]}


def sampling(**parts: object) -> dict:
    return with_start(sampling={"temperature": 0.0, "top_p": 1.0, **parts})


def bias(*entries: tuple[int, float]) -> dict:
    """The sound batch with biases of tokens."""
    return sampling(
        logit_bias=[compute_pb2.LogitBias(token_id=token, bias=value) for token, value in entries]
    )


MASK = b"\xff" * 33
"""Allows every token: 259 of them, and bits behind."""


def constraints(*entries: tuple[int, bytes], num_drafts: int = 0) -> dict:
    """The sound batch with constraints of rows."""
    return {
        "constraints": [
            compute_pb2.RowConstraint(row=row, allowed_tokens=mask, num_drafts=num_drafts)
            for row, mask in entries
        ]
    }


def copy(slot: int = 0, index: int = 0, source: int = 0, destination: int = 30) -> dict:
    return {
        "copies": [
            compute_pb2.BlockCopy(
                slot=slot,
                logical_index=index,
                source_block=source,
                destination_block=destination,
            )
        ]
    }


INVALID = {
    "slots is longer than query_lens": ({"slots": [0, 2, 1]}, "query_lens"),
    "a slot out of range": ({"slots": [0, 8]}, "slots[1]"),
    "a slot far out of range": ({"slots": [HUGE, 2]}, "slots[0]"),
    "a slot not started": ({"slots": [0, 5]}, "slots[1]"),
    "a slot twice": ({"slots": [0, 0]}, "slots[1]"),
    "too many rows": (
        {"slots": [0] * 7, "query_lens": [1] * 7, "positions": [0] * 7},
        "slots",
    ),
    "a row without tokens": ({"query_lens": [1, 0]}, "query_lens[1]"),
    "more tokens than a batch has": ({"query_lens": [1, 40]}, "query_lens"),
    "query_lens overflow": ({"query_lens": [HUGE, HUGE]}, "query_lens"),
    "more tokens than are known": ({"query_lens": [1, 10]}, "query_lens[1]"),
    "positions too short": ({"positions": [3]}, "positions"),
    "a position before the computed ones": ({"positions": [2, 0]}, "positions[0]"),
    "a position past the computed ones": ({"positions": [4, 0]}, "positions[0]"),
    "a position past the pool": ({"positions": [3, 384]}, "positions[1]"),
    "a row that ends past the pool": ({"positions": [3, 380]}, "positions[1]"),
    "token_counts too short": ({"token_counts": [0]}, "token_counts"),
    "token_ids without counts": ({"token_ids": [1]}, "token_ids"),
    "fewer token_ids than counted": ({"token_counts": [0, 1]}, "token_ids"),
    "a token id out of range": ({"token_counts": [0, 1], "token_ids": [259]}, "token_ids[0]"),
    "more tokens than a sequence has": (
        {"token_counts": [0, 376], "token_ids": [1] * 376},
        "token_counts[1]",
    ),
    "new_block_counts too long": ({"new_block_counts": [0, 1, 0]}, "new_block_counts"),
    "more new_block_ids than counted": ({"new_block_ids": [18, 19]}, "new_block_ids"),
    "a count beyond any table": ({"new_block_counts": [0, HUGE]}, "new_block_ids"),
    "a new block out of range": ({"new_block_ids": [96]}, "new_block_ids[0]"),
    "a table too short": (
        {"new_block_counts": [], "new_block_ids": []},
        "new_block_counts[1]",
    ),
    "a table too long": (
        {"new_block_counts": [0, 95], "new_block_ids": list(range(1, 96))},
        "new_block_counts[1]",
    ),
    "a block written by two rows": ({"new_block_ids": [0]}, "new_block_ids"),
    "a block at two places of one table": ({"new_block_ids": [16]}, "new_block_ids"),
    "a sampled row out of range": ({"sampled_rows": [0, 2]}, "sampled_rows[1]"),
    "a row sampled twice into one slot": ({"sampled_rows": [1, 1]}, "sampled_rows[1]"),
    "more samples than rows fit": ({"sampled_rows": [0] * 7}, "sampled_rows"),
    "a row sampled before its last token": ({"query_lens": [1, 8]}, "sampled_rows[1]"),
    "sampled_slots too short": ({"sampled_slots": [0]}, "sampled_slots"),
    "a sampled slot out of range": ({"sampled_slots": [0, 8]}, "sampled_slots[1]"),
    "a sampled slot not started": ({"sampled_slots": [0, 5]}, "sampled_slots[1]"),
    "a sampled slot twice": ({"sampled_slots": [0, 0]}, "sampled_slots[1]"),
    "a sample into a slot with a row": ({"sampled_slots": [2, 0]}, "sampled_slots[0]"),
    "a sample into a slot of another length": ({"sampled_slots": [0, 1]}, "sampled_slots[1]"),
    "a released slot out of range": ({"released": [8]}, "released[0]"),
    "a row of a slot just released": ({"released": [0]}, "slots[0]"),
    "a started slot out of range": (with_start(slot=8), "starts[0].slot"),
    "a slot started twice": (
        {"starts": [start(2, b"third one", [16, 17])] * 2},
        "starts[1].slot",
    ),
    "a start without tokens": (with_start(token_ids=[]), "starts[0].token_ids"),
    "a start with too many tokens": (with_start(token_ids=[1] * 385), "starts[0].token_ids"),
    "a start with a wrong token": (
        with_start(token_ids=[*b"third on", 259]),
        "starts[0].token_ids[8]",
    ),
    "a start without a prompt": (with_start(num_prompt_tokens=0), "starts[0].num_prompt_tokens"),
    "a prompt longer than its start": (
        with_start(num_prompt_tokens=10),
        "starts[0].num_prompt_tokens",
    ),
    "a start with a wrong block": (with_start(block_ids=[96]), "starts[0].block_ids[0]"),
    "a start with too many blocks": (with_start(block_ids=[1] * 97), "starts[0].block_ids"),
    "a start with another slot's tokens that is none": (
        with_start(prefix=compute_pb2.SlotPrefix(slot=8)),
        "starts[0].prefix.slot",
    ),
    "a start with tokens of a slot not started": (
        with_start(prefix=compute_pb2.SlotPrefix(slot=5)),
        "starts[0].prefix.slot",
    ),
    "a start with more tokens than the other slot has": (
        with_start(prefix=compute_pb2.SlotPrefix(slot=0, num_tokens=100)),
        "starts[0].prefix.num_tokens",
    ),
    "a start with more blocks than the other slot has": (
        with_start(prefix=compute_pb2.SlotPrefix(slot=0, num_blocks=90)),
        "starts[0].prefix.num_blocks",
    ),
    "a start with tokens of another slot without end": (
        with_start(prefix=compute_pb2.SlotPrefix(slot=0, num_tokens=HUGE)),
        "starts[0].token_ids",
    ),
    "a start with blocks of another slot without end": (
        with_start(prefix=compute_pb2.SlotPrefix(slot=0, num_blocks=HUGE)),
        "starts[0].block_ids",
    ),
    "a negative temperature": (sampling(temperature=-0.5), "starts[0].sampling.temperature"),
    "an infinite temperature": (
        sampling(temperature=float("inf")),
        "starts[0].sampling.temperature",
    ),
    "a temperature that is no number": (
        sampling(temperature=float("nan")),
        "starts[0].sampling.temperature",
    ),
    "top_p zero": (sampling(top_p=0.0), "starts[0].sampling.top_p"),
    "top_p above one": (sampling(top_p=1.5), "starts[0].sampling.top_p"),
    "top_p that is no number": (sampling(top_p=float("nan")), "starts[0].sampling.top_p"),
    "a copy of a slot out of range": (copy(slot=8), "copies[0].slot"),
    "a copy of a slot not started": (copy(slot=5), "copies[0].slot"),
    "a copy past the table": (copy(index=2), "copies[0].logical_index"),
    "a copy of a block not in that place": (copy(source=1), "copies[0].source_block"),
    "a copy from outside the pool": (copy(source=96), "copies[0].source_block"),
    "a copy to outside the pool": (copy(destination=96), "copies[0].destination_block"),
    "a copy onto itself": (copy(destination=0), "copies[0].destination_block"),
    "a copy into another row's block": (
        copy(index=1, source=1, destination=16),
        "copies[0].destination_block",
    ),
    "log-probabilities of no row": (
        {"prompt_logprobs": [compute_pb2.PromptLogprobsRequest(row=2)]},
        "prompt_logprobs[0].row",
    ),
    "log-probabilities of a row twice": (
        {"prompt_logprobs": [compute_pb2.PromptLogprobsRequest(row=1)] * 2},
        "prompt_logprobs[1].row",
    ),
    "too many likely tokens beside those of a prompt": (
        {"prompt_logprobs": [compute_pb2.PromptLogprobsRequest(row=1, num_logprobs=21)]},
        "prompt_logprobs[0].num_logprobs",
    ),
    "min_p below 0": (sampling(min_p=-0.1), "starts[0].sampling.min_p"),
    "min_p above 1": (sampling(min_p=1.01), "starts[0].sampling.min_p"),
    "min_p not a number": (sampling(min_p=NAN), "starts[0].sampling.min_p"),
    "a negative repetition_penalty": (
        sampling(repetition_penalty=-1.1),
        "starts[0].sampling.repetition_penalty",
    ),
    "an infinite repetition_penalty": (
        sampling(repetition_penalty=math.inf),
        "starts[0].sampling.repetition_penalty",
    ),
    "a repetition_penalty that is not a number": (
        sampling(repetition_penalty=NAN),
        "starts[0].sampling.repetition_penalty",
    ),
    "presence_penalty too large": (
        sampling(presence_penalty=2.1),
        "starts[0].sampling.presence_penalty",
    ),
    "presence_penalty not a number": (
        sampling(presence_penalty=NAN),
        "starts[0].sampling.presence_penalty",
    ),
    "frequency_penalty too small": (
        sampling(frequency_penalty=-2.1),
        "starts[0].sampling.frequency_penalty",
    ),
    "too many likely tokens": (sampling(num_logprobs=21), "starts[0].sampling.num_logprobs"),
    "a bias of no token": (bias((1, 1.0), (259, 1.0)), "starts[0].sampling.logit_bias[1].token_id"),
    "a bias of a token far out of range": (
        bias((HUGE, 1.0)),
        "starts[0].sampling.logit_bias[0].token_id",
    ),
    "two biases of one token": (
        bias((1, 1.0), (2, 1.0), (1, 1.0)),
        "starts[0].sampling.logit_bias[2].token_id",
    ),
    "an infinite bias": (bias((1, -math.inf)), "starts[0].sampling.logit_bias[0].bias"),
    "a bias that is not a number": (bias((1, NAN)), "starts[0].sampling.logit_bias[0].bias"),
    "too many biases": (bias(*[(0, 1.0)] * 1025), "starts[0].sampling.logit_bias"),
    "a constraint of no row": (constraints((2, MASK)), "constraints[0].row"),
    "a constraint of a row that is not sampled": (
        {**constraints((1, MASK)), "sampled_rows": [0]},
        "constraints[0].row",
    ),
    "two constraints of a row": (constraints((1, MASK), (1, MASK)), "constraints[1].row"),
    "a constraint behind drafts that are not": (
        constraints((1, MASK), num_drafts=HUGE),
        "constraints[0].num_drafts",
    ),
    "a constraint of no length": (constraints((0, b"")), "constraints[0].allowed_tokens"),
    "a short constraint": (constraints((0, MASK[1:])), "constraints[0].allowed_tokens"),
    "a constraint that allows nothing": (
        constraints((0, bytes(32) + b"\xf8")),  # but tokens that do not exist
        "constraints[0].allowed_tokens",
    ),
    "hidden states of no row": (
        {"embeddings": [compute_pb2.EmbeddingRequest(row=2, part=1)]},
        "embeddings[0].row",
    ),
    "hidden states of no known part": (
        {"embeddings": [compute_pb2.EmbeddingRequest(row=1, part=3)]},
        "embeddings[0].part",
    ),
    "a digest of no block": ({"digest_blocks": [1 << 20]}, "digest_blocks[0]"),
}

UNSUPPORTED = {
    "swap_out": ({"swap_out": [compute_pb2.BlockMove()]}, "swap_out"),
    "swap_in": ({"swap_in": [compute_pb2.BlockMove()]}, "swap_in"),
}

CASES = [
    pytest.param(parts, field, wanted, id=name)
    for table, wanted in (
        (INVALID, compute_pb2.REFUSAL_REASON_INVALID_BATCH),
        (UNSUPPORTED, compute_pb2.REFUSAL_REASON_UNSUPPORTED),
    )
    for name, (parts, field) in table.items()
]


def prepared_controller(plane: Harness) -> Controller:
    controller = plane.open()
    controller.run(
        starts=[start(0, b"one", [0, 1]), start(1, b"two!", [8, 9])],
        slots=[0, 1],
        query_lens=[3, 4],
        positions=[0, 0],
        sampled_rows=[0, 1],
    )
    return controller


@pytest.fixture(scope="module")
def sound_tokens(shared_plane: Harness) -> list[int]:
    return prepared_controller(shared_plane).run(**sound_parts())


def test_the_batch_the_table_starts_from_is_sound(sound_tokens: list[int]):
    assert len(sound_tokens) == 2


@pytest.mark.parametrize(("parts", "field", "wanted"), CASES)
def test_a_malformed_batch_is_refused_and_changes_nothing(
    shared_plane: Harness, sound_tokens: list[int], parts: dict, field: str, wanted: int
):
    controller = prepared_controller(shared_plane)
    pool = shared_plane.executor.pool.copy()
    bad = {**sound_parts(), **parts}
    with controller.stream() as stream:
        stream.send(controller.batch(**bad))
        output = stream.receive()
        assert output.refusal.reason == wanted
        assert output.refusal.field == field
        assert field.partition("[")[0] in output.refusal.message or "block" in field
        assert output.refusal.message
        assert not output.sampled_token_ids
    with pytest.raises(grpc.RpcError) as caught:
        controller.execute_one(controller.batch(**bad))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(caught.value) == [field]
    assert reason(caught.value) in ("INVALID_BATCH", "UNSUPPORTED")
    assert (shared_plane.executor.pool == pool).all()
    assert controller.run(**sound_parts()) == sound_tokens
