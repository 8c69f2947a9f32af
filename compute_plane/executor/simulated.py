"""An executor without a model: it keeps token ids where others keep KV.

The next token is a hash of all tokens of the sequence *as they are read through the block table*,
so one wrong block, position or copy changes the text, and any schedule of the same requests gives
the same text as each request alone. It needs no model file and no arithmetic; tests, and people who
want to try the planes, use it.

Array letters: N blocks, B block size, T tokens, S rows, M table width.
"""

from __future__ import annotations

import hashlib
import string
from typing import Final

import numpy as np

from compute_plane.executor.interface import (
    ExecutionBatch,
    ExecutionOutput,
    Float32Array,
    Int32Array,
    SamplingRow,
)
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
    """A `GPUExecutor` whose pool [N, B] holds token ids."""

    numerics_id = "simulated/blake2b"

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self.pool: Int32Array = np.full((num_blocks, block_size), NEVER_WRITTEN, dtype=np.int32)

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run one step: copies, then all writes, then all reads."""
        for copy in batch.copies:
            self.pool[copy.destination] = self.pool[copy.source]
        rows = np.repeat(np.arange(batch.query_lens.size), batch.query_lens)  # [T]
        blocks = batch.block_tables[rows, batch.positions // self._block_size]
        self.pool[blocks, batch.positions % self._block_size] = batch.input_tokens
        next_tokens = [
            draw(self._read(batch, row), sampling)
            for row, sampling in zip(batch.sampled_rows.tolist(), batch.sampling, strict=True)
        ]
        return ExecutionOutput(
            next_tokens=np.array(next_tokens, dtype=np.int32),
            prompt_logprobs=[
                self._logprobs(batch, row, targets)
                for row, targets in zip(
                    batch.prompt_logprob_rows, batch.prompt_logprob_targets, strict=True
                )
            ],
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
        return self.pool[batch.block_tables[row, :num_blocks]].reshape(-1)[:seq_len]

    def _logprobs(self, batch: ExecutionBatch, row: int, targets: Int32Array) -> Float32Array:
        """Return a number per target that depends on it and on everything before it."""
        tokens = self._read(batch, row)
        first = int(batch.seq_lens[row] - batch.query_lens[row])
        digest = hashlib.blake2b(tokens[:first].tobytes(), digest_size=8)
        logprobs = np.empty(targets.size, dtype=np.float32)
        for i, target in enumerate(targets.tolist()):
            digest.update(tokens[first + i].tobytes())
            number = int.from_bytes(digest.digest(), "little") + target
            logprobs[i] = -(number % 1024) / 64
        return logprobs


def draw(tokens: Int32Array, sampling: SamplingRow) -> int:
    """Return the token that follows `tokens`: by them alone if greedy, else by the key as well."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, dtype="<i4").tobytes(), digest_size=8)
    if sampling.temperature > 0:
        key = (
            sampling.seed,
            sampling.sample_index,
            sampling.position,
            sampling.temperature,
            sampling.top_p,
        )
        digest.update(repr(key).encode())
    number = int.from_bytes(digest.digest(), "little")
    if number % EOS_ODDS == 0:
        return EOS_TOKEN_ID
    return ALPHABET[number // EOS_ODDS % len(ALPHABET)]
