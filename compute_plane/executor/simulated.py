"""An executor without a model: it keeps token ids where others keep KV.

The next token is a hash of all tokens of the sequence *as they are read through the block table*,
so one wrong block, position or copy changes the text, and any schedule of the same requests gives
the same text as each request alone. It needs no model file and no arithmetic; tests, and people who
want to try the planes, use it.

It has no logits. Temperature, top-p, top-k and min-p only enter the key of a draw, bias and
penalties do nothing, and log-probabilities and hidden states are numbers made of the same hash: in
the shape that was asked for, and the same in any schedule. Where a mask does not allow the token,
the hash picks one.

It may have states, which are hashes of the tokens that they have taken in. Where that of a row is
not of all tokens up to its end, everything that is made of these becomes something else; where it
is, everything is as without states.

With an adapter, of which it knows the number alone, it keeps other ids for the same tokens: so the
text is another one, and blocks that were filled with another adapter are noticed.

Array letters: N blocks, B block size, T tokens, S rows, M table width.
"""

from __future__ import annotations

import hashlib
import string
from typing import Final

import numpy as np

from compute_plane.executor.interface import (
    CopyKind,
    EmbeddingPart,
    ExecutionBatch,
    ExecutionOutput,
    Float32Array,
    Float64Array,
    Int32Array,
    SampleLogprobs,
    SamplingRow,
    TopLogprobs,
)
from compute_plane.memory.block_digest import block_digest
from compute_plane.model.spec import ModelSpec

BOS_TOKEN_ID: Final = 256
EOS_TOKEN_ID: Final = 257
PAD_TOKEN_ID: Final = 258
VOCAB_SIZE: Final = 259
"""Ids of the byte-level simple tokenizer: 0 to 255 are bytes."""

ALPHABET: Final = (string.ascii_letters + string.digits + " .").encode()
"""What it writes; 64 characters, so that every token is a whole one."""

EOS_ODDS: Final = 256
"""One token in so many, on average, ends the text."""

NEVER_WRITTEN: Final = -1

SPEC: Final = ModelSpec(
    name="simulated",
    architecture="simulated",
    vocab_size=VOCAB_SIZE,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    hidden_size=2,
    intermediate_size=2,
    context_length=1 << 16,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    num_parameters=0,
    weight_format="none",
)
"""What Describe says of it. One layer of one head: its pool holds one number a token."""


class SimulatedExecutor:
    """A `GPUExecutor` whose pool [N, B] holds token ids.

    `num_states`: those of its sequences and others to copy to and from; 0: it has none.
    """

    numerics_id = "simulated/blake2b"

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        num_states: int = 0,
    ) -> None:
        self._block_size = block_size
        self._states = [hashlib.blake2b() for _ in range(num_states)]
        self.pool: Int32Array = np.full((num_blocks, block_size), NEVER_WRITTEN, dtype=np.int32)
        self.host_pool: Int32Array = np.full(
            (num_host_blocks, block_size), NEVER_WRITTEN, dtype=np.int32
        )

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run one step: copies, then all writes, then all reads."""
        for copy in batch.copies:
            source = self.host_pool if copy.kind is CopyKind.SWAP_IN else self.pool
            destination = self.host_pool if copy.kind is CopyKind.SWAP_OUT else self.pool
            destination[copy.destination] = source[copy.source]
        rows = np.repeat(np.arange(batch.query_lens.size), batch.query_lens)  # [T]
        blocks = batch.block_tables[rows, batch.positions // self._block_size]
        held = batch.input_tokens
        if batch.adapters.size:
            held = held + VOCAB_SIZE * batch.adapters[rows]
        self.pool[blocks, batch.positions % self._block_size] = held
        if batch.states.size:
            self._advance_states(batch, held)
        histories = [self._read(batch, row) for row in batch.sampled_rows.tolist()]
        next_tokens = [
            draw(tokens, sampling)
            for tokens, sampling in zip(histories, batch.sampling, strict=True)
        ]
        prompt_logprobs = [
            self._logprobs(batch, row, targets)
            for row, targets in zip(
                batch.prompt_logprob_rows, batch.prompt_logprob_targets, strict=True
            )
        ]
        return ExecutionOutput(
            next_tokens=np.array(next_tokens, dtype=np.int32),
            prompt_logprobs=prompt_logprobs,
            sample_logprobs=[
                _sample_logprobs(k, _logprob(histories[k], next_tokens[k]), sampling.num_logprobs)
                for k, sampling in enumerate(batch.sampling)
                if sampling.num_logprobs is not None
            ],
            prompt_top_logprobs=[
                _top(logprobs, count)
                for logprobs, count in zip(prompt_logprobs, batch.prompt_num_logprobs, strict=False)
            ],
            block_digests=[block_digest(self.pool[block]) for block in batch.digest_blocks],
            embeddings=self._embeddings(batch) if batch.embeddings else None,
        )

    def capture_decode_graph(self, batch_size: int) -> None:
        """Do nothing: there are no launches to save."""

    def execute_graph(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run one step like `execute`."""
        return self.execute(batch)

    def _read(self, batch: ExecutionBatch, row: int) -> Int32Array:
        """Return all tokens of a row's sequence, in order, as the pool has them."""
        seq_len = int(batch.seq_lens[row])
        num_blocks = -(-seq_len // self._block_size)
        tokens: Int32Array = self.pool[batch.block_tables[row, :num_blocks]].reshape(-1)[:seq_len]
        if batch.states.size:
            state = self._states[batch.states[row]]
            if state.digest() != hashlib.blake2b(tokens.tobytes()).digest():
                tokens[0] = NEVER_WRITTEN  # of a copy
        return tokens

    def _advance_states(self, batch: ExecutionBatch, held: Int32Array) -> None:
        """Copy states, then let those of the rows take in what the pool holds of their tokens."""
        states = self._states
        for source, destination in batch.state_copies:
            states[destination] = states[source].copy()
        ends = np.cumsum(batch.query_lens)
        for row, state in enumerate(batch.states.tolist()):
            first = ends[row] - batch.query_lens[row]
            if batch.positions[first] == 0:
                states[state] = hashlib.blake2b()
            states[state].update(held[first : ends[row]].tobytes())

    def _embeddings(self, batch: ExecutionBatch) -> Float64Array:
        """Return numbers that depend on a text up to a token, or the sums of such."""
        found = np.zeros((len(batch.embeddings), SPEC.hidden_size))
        for values, want in zip(found, batch.embeddings, strict=True):
            tokens = self._read(batch, want.row)
            is_sum = want.part is EmbeddingPart.SUM
            count = int(batch.query_lens[want.row]) if is_sum else 1
            for end in range(len(tokens) - count + 1, len(tokens) + 1):
                values += hidden_states(tokens[:end])
        return found

    def _logprobs(self, batch: ExecutionBatch, row: int, targets: Int32Array) -> Float32Array:
        """Return a number per target that depends on it and on everything before it."""
        tokens = self._read(batch, row)
        first = int(batch.seq_lens[row] - batch.query_lens[row])
        logprobs = [
            _logprob(tokens[: first + i + 1], target) for i, target in enumerate(targets.tolist())
        ]
        return np.array(logprobs, dtype=np.float32)


def hidden_states(tokens: Int32Array) -> Float64Array:
    """Return the "hidden states" of the last of some tokens, [2], within 1 of 0 and never 0."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, dtype="<i4").tobytes(), digest_size=8)
    numbers = np.frombuffer(digest.digest(), dtype="<u2")[: SPEC.hidden_size].astype(np.float64)
    return (2 * numbers - 65535) / 65536


def _logprob(tokens: Int32Array, target: int) -> float:
    """Return a number that depends on a token and on all tokens before it."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, dtype="<i4").tobytes(), digest_size=8)
    return -((int.from_bytes(digest.digest(), "little") + target) % 1024) / 64


def _sample_logprobs(sample: int, logprob: float, count: int) -> SampleLogprobs:
    """Return the log-probabilities of one sample."""
    return SampleLogprobs(sample, logprob, _top(np.array([logprob], dtype=np.float32), count))


def _top(logprobs: Float32Array, count: int) -> TopLogprobs:
    """Return the tokens 0, 1, … as the likeliest at some places, and numbers below 0 for them."""
    token_ids = np.tile(np.arange(min(count, VOCAB_SIZE), dtype=np.int32), (logprobs.size, 1))
    return TopLogprobs(token_ids, logprobs[:, None] - token_ids.astype(np.float32))


def draw(tokens: Int32Array, sampling: SamplingRow) -> int:
    """Return the token that follows `tokens`: by them alone if greedy, else by the key as well."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, dtype="<i4").tobytes(), digest_size=8)
    if sampling.temperature > 0:
        key: tuple[float, ...] = (
            sampling.seed,
            sampling.sample_index,
            sampling.position,
            sampling.temperature,
            sampling.top_p,
        )
        if sampling.top_k or sampling.min_p:
            key += (sampling.top_k, sampling.min_p)
        digest.update(repr(key).encode())
    number = int.from_bytes(digest.digest(), "little")
    token = ALPHABET[number // EOS_ODDS % len(ALPHABET)]
    if number % EOS_ODDS == 0:
        token = EOS_TOKEN_ID
    mask = sampling.allowed_tokens
    if mask is None or mask[token // 8] >> token % 8 & 1:
        return token
    allowed = np.flatnonzero(np.unpackbits(mask, count=VOCAB_SIZE, bitorder="little"))
    return int(allowed[number // EOS_ODDS % allowed.size])
