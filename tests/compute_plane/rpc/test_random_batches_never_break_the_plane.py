"""Random batches, nearly right ones among them: never a fault, never a neighbour's text."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compute_plane.executor.interface import SamplingRow
from compute_plane.executor.simulated import draw
from protos.hetero.compute.v1 import compute_pb2
from tests.compute_plane.rpc.plane_harness import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Controller,
    Harness,
    start,
)

NEIGHBOUR_SLOT = 7
NEIGHBOUR_BLOCKS = list(range(48, NUM_BLOCKS))
GREEDY = SamplingRow(0.0, 1.0, 0, 0, 0)

STRANGE = st.sampled_from([96, 259, 1000, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
slot_ids = st.integers(0, 6) | st.integers(0, 6) | st.integers(8, 9) | STRANGE
block_ids = st.integers(0, 47) | st.integers(0, 47) | STRANGE
token_ids = st.integers(0, 258) | st.integers(0, 258) | STRANGE
small = st.integers(0, 9) | st.integers(0, 3) | STRANGE
floats = st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5, -1.0, float("nan"), float("inf"), 1e30])


def lists(values: st.SearchStrategy[int], most: int = 7) -> st.SearchStrategy[list[int]]:
    return st.lists(values, max_size=most)


sampling_params = st.builds(
    compute_pb2.SamplingParams,
    temperature=floats,
    top_p=st.just(1.0) | floats,
    seed=st.integers(0, 2**64 - 1),
    top_k=st.just(0) | small,
    min_p=st.just(0.0) | floats,
    repetition_penalty=st.just(0.0) | floats,
    presence_penalty=st.just(0.0) | floats,
    frequency_penalty=st.just(0.0) | floats,
    logit_bias=st.lists(
        st.builds(compute_pb2.LogitBias, token_id=token_ids, bias=floats), max_size=2
    ),
    num_logprobs=st.none() | small,
)
good_sampling = st.just(compute_pb2.SamplingParams(top_p=1.0))
prefixes = st.builds(
    compute_pb2.SlotPrefix, slot=slot_ids, num_tokens=small, num_blocks=st.just(0) | small
)
starts = st.builds(
    compute_pb2.SlotStart,
    slot=slot_ids,
    token_ids=lists(st.integers(0, 258), 12) | lists(token_ids),
    num_prompt_tokens=st.just(1) | small,
    block_ids=lists(block_ids),
    sampling=good_sampling | sampling_params,
    sample_index=small,
    prefix=st.none() | prefixes,
)
good_starts = st.builds(
    lambda slot, tokens: start(slot, bytes(tokens), list(range(slot * 6, slot * 6 + 6))),
    st.integers(0, 6),
    st.lists(st.integers(0, 255), min_size=1, max_size=12),
)
moves = st.builds(compute_pb2.BlockMove, source_block=block_ids, destination_block=block_ids)
copies = st.builds(
    compute_pb2.BlockCopy,
    slot=slot_ids,
    logical_index=small,
    source_block=block_ids,
    destination_block=block_ids,
)
logprobs = st.builds(compute_pb2.PromptLogprobsRequest, row=st.integers(0, 4), num_logprobs=small)

ANYTHING = {
    "slots": lists(slot_ids),
    "query_lens": lists(small),
    "positions": lists(small),
    "token_counts": lists(small),
    "token_ids": lists(token_ids),
    "new_block_counts": lists(small),
    "new_block_ids": lists(block_ids),
    "sampled_rows": lists(small),
    "sampled_slots": lists(slot_ids),
    "released": lists(slot_ids),
    "starts": st.lists(good_starts | starts, max_size=3),
    "copies": st.lists(copies, max_size=2),
    "swap_out": st.lists(moves, max_size=1),
    "prompt_logprobs": st.lists(logprobs, max_size=2),
    "digest_blocks": lists(block_ids),
}


@st.composite
def sound_parts(draw_: st.DrawFn) -> dict:
    """Rows that fit their starts: such a batch runs."""
    started = draw_(st.lists(good_starts, max_size=4, unique_by=lambda s: s.slot))
    lens = [draw_(st.integers(1, len(s.token_ids))) for s in started]
    ends = [i for i, s in enumerate(started) if lens[i] == len(s.token_ids)]
    return {
        "starts": started,
        "slots": [s.slot for s in started],
        "query_lens": lens,
        "positions": [0] * len(started),
        "sampled_rows": ends,
        "prompt_logprobs": [compute_pb2.PromptLogprobsRequest(row=i) for i in ends[:1]],
    }


@st.composite
def random_parts(draw_: st.DrawFn) -> dict:
    """A sound batch with some parts replaced by anything: none, one, or many."""
    parts = draw_(sound_parts())
    changed = draw_(
        st.just([])
        | lists(st.sampled_from(sorted(ANYTHING)), 1)
        | st.lists(st.sampled_from(sorted(ANYTHING)), min_size=2, max_size=8)
    )
    return {**parts, **{name: draw_(ANYTHING[name]) for name in changed}}


class Neighbour:
    """A sequence that goes on beside the random batches; its text is known beforehand."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._tokens: list[int] = []
        self._num_computed = 0

    def go_on(self) -> None:
        """Compute one step, anew if the sequence has filled its blocks; check its token."""
        parts: dict = {}
        if not self._tokens or len(self._tokens) >= len(NEIGHBOUR_BLOCKS) * BLOCK_SIZE:
            self._tokens, self._num_computed = list(b"the neighbour"), 0
            parts["starts"] = [start(NEIGHBOUR_SLOT, b"the neighbour", NEIGHBOUR_BLOCKS)]
        (token,) = self._controller.run(
            slots=[NEIGHBOUR_SLOT],
            query_lens=[len(self._tokens) - self._num_computed],
            positions=[self._num_computed],
            sampled_rows=[0],
            **parts,
        )
        self._num_computed = len(self._tokens)
        assert token == draw(np.array(self._tokens, dtype=np.int32), GREEDY)
        self._tokens.append(token)


@pytest.mark.wide
def test_random_batches_are_run_or_refused_and_the_neighbour_goes_on(shared_plane: Harness):
    controller = shared_plane.open("fuzzer")
    neighbour = Neighbour(controller)
    codes = {grpc.StatusCode.OK: 0, grpc.StatusCode.INVALID_ARGUMENT: 0}

    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(parts=random_parts())
    def run(parts: dict) -> None:
        try:
            controller.execute_one(controller.batch(**parts))
        except grpc.RpcError as error:
            code = error.code()
        else:
            code = grpc.StatusCode.OK
        assert code in codes, code
        codes[code] += 1
        neighbour.go_on()

    run()
    assert min(codes.values()) >= 30, codes
    assert not shared_plane.faults.is_set()


@pytest.mark.parametrize("data", [b"", b"\x08\x01", b"\xff\xff\xff", b"\x82\x01\x02\xff\x01"])
def test_bytes_that_are_no_batch_end_the_call_and_nothing_else(shared_plane: Harness, data: bytes):
    call = shared_plane.channel.unary_unary("/hetero.compute.v1.ComputeService/ExecuteOne")
    with pytest.raises(grpc.RpcError) as caught:
        call(data)
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    Neighbour(shared_plane.open()).go_on()
