"""Runs the attention and rope operations on arrays, without an executor.

As a program it prints digests of results: `python attention_driver.py avx2 float32 bfloat16 …`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from compute_plane.config import ComputePlaneConfig
from compute_plane.cpu.kernel_cache import prepare_kernel_cache
from kernels.cpu.kv_layout import KvLayout, decode_blocks, from_bfloat16
from kernels.reference.paged_attention import paged_attention
from kernels.reference.rope import UNCHANGED, HeadChanges, rope_write_kv
from tests.amx import sets

if __name__ == "__main__":  # before anything is emitted
    sets.use(sys.argv[1])
    prepare_kernel_cache(ComputePlaneConfig().kernel_cache_root)

from kernels.cpu.attention import merge_attention
from kernels.cpu.attention_items import attention_items, rows_per_item
from kernels.cpu.attention_plan import AttentionPlan, AttentionShape, plan_attention
from kernels.cpu.attention_sizes import (
    attention_partial_floats,
    attention_scratch_bytes,
    rope_scratch_bytes,
)
from kernels.cpu.catalogue import ATTENTION, ROPE_WRITE
from kernels.cpu.eight_bits import WIDEN
from kernels.cpu.operands import Attention, RopeAngles, RopeWrite
from kernels.cpu.operation import HEADER_WORDS, RECORD_WORDS, Operation, StepWord
from kernels.cpu.rope_write import rope_angles

Array = npt.NDArray[Any]
CALLABLE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
MAX_WORKERS = 3


def aligned(num_bytes: int, fill: int = 0) -> Array:
    raw = np.full(num_bytes + 64, fill, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + num_bytes]


def run_chunks(
    operation: Operation, record: Array, header: Array, chunks: int, workers: int
) -> None:
    kernel = CALLABLE(operation.address)

    def one(worker: int) -> None:
        for chunk in range(worker, chunks, workers):
            kernel(record.ctypes.data, header.ctypes.data, chunk, chunks, worker)

    if workers == 1:
        one(0)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, range(workers)))


@dataclass
class Setting:
    """A pool and the shape of a model; `data` may be filled with anything before it is used.

    `window`: of the layer; 0: none. `sinks`: of its heads, scores as the model has them. `parts`:
    into which heads are cut that all read the same; 0: each kv head has its own. `cap`: of scores
    as the model has them; 0: none.
    """

    layout: KvLayout
    num_heads: int
    num_blocks: int
    window: int = 0
    sinks: Array | None = None
    parts: int = 0
    cap: float = 0
    keep: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.num_blocks * self.layout.block_bytes
        # 0xFF in every byte: NaN as float32, as bfloat16 and as a scale.
        self.data = aligned(size, 0xFF).reshape(self.num_blocks, self.layout.block_bytes)

    @property
    def cap_bits(self) -> int:
        return int(np.float32(self.cap * np.log2(np.e)).view(np.int32))

    @property
    def work_heads(self) -> int:
        return self.parts or self.layout.num_kv_heads

    @property
    def group(self) -> int:
        return self.num_heads // self.work_heads

    def layer_address(self, layer: int) -> int:
        return self.data.ctypes.data + layer * self.layout.layer_bytes

    def header(self, first_token: int, **arrays: Any) -> Array:
        words = np.zeros(HEADER_WORDS, np.int64)
        need = attention_scratch_bytes(
            self.layout.head_dim, self.layout.own_value_dim, rows_per_item(self.group)
        )
        need = -(-max(need, rope_scratch_bytes(self.layout.head_dim)) // 64) * 64
        scratch = aligned(need * MAX_WORKERS, 0xFF)
        words[StepWord.FIRST_TOKEN] = first_token
        words[StepWord.SCRATCH], words[StepWord.SCRATCH_BYTES] = scratch.ctypes.data, need
        self.keep = [scratch]
        for name, value in arrays.items():
            if isinstance(value, np.ndarray):
                self.keep.append(value)
                value = value.ctypes.data
            words[StepWord[name]] = value
        return words

    def rope(
        self, qkv: Array, frequencies: Array, positions: Array, places: Array, layer: int = 0,
        first_token: int = 0, chunks: int = 1, workers: int = 1,
        changes: HeadChanges = UNCHANGED, factors: Array | float = 1,
        growth: tuple[Array, int] | None = None,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """Run both rope operations; return queries [T, H·D], cosines and sines [T, D/2]."""
        num_tokens, dim = len(qkv), self.layout.head_dim
        rows = first_token + num_tokens
        cosines, sines = (np.full((rows, dim // 2), np.nan, np.float32) for _ in range(2))
        queries = np.full((rows, self.num_heads * dim), np.nan, np.float32)
        header = self.header(
            first_token, NUM_TOKENS=num_tokens, POSITIONS=positions.astype(np.int32),
            KV_PLACES=places.astype(np.int64),
        )  # fmt: skip
        record = np.zeros(RECORD_WORDS, np.int64)
        record[RopeAngles.FREQUENCIES] = frequencies.ctypes.data
        record[RopeAngles.COSINES] = cosines.ctypes.data
        record[RopeAngles.SINES] = sines.ctypes.data
        record[RopeAngles.HALF] = dim // 2
        factors = np.full(dim // 2, factors, np.float32)
        record[RopeAngles.FACTORS] = factors.ctypes.data
        run_chunks(rope_angles, record, header, chunks, workers)
        ones = np.ones(dim, np.float32)
        record = np.zeros(RECORD_WORDS, np.int64)
        for word, value in (
            (RopeWrite.QKV, qkv.ctypes.data), (RopeWrite.COSINES, cosines.ctypes.data),
            (RopeWrite.SINES, sines.ctypes.data), (RopeWrite.QUERIES, queries.ctypes.data),
            (RopeWrite.POOL, self.layer_address(layer)),
            (RopeWrite.BLOCK_BYTES, self.layout.block_bytes),
            (RopeWrite.HEAD_BYTES, self.layout.head_bytes),
            (RopeWrite.BLOCK_SIZE, self.layout.block_size), (RopeWrite.HEAD_DIM, dim),
            (RopeWrite.NUM_HEADS, self.num_heads),
            (RopeWrite.NUM_KV_HEADS, self.layout.num_kv_heads),
            (RopeWrite.BIAS, address_of(changes.bias)),
            (RopeWrite.QUERY_NORM, address_of(changes.norms and changes.norms[0])),
            (RopeWrite.KEY_NORM, address_of(changes.norms and changes.norms[1])),
            (RopeWrite.EPSILON, np.float32(changes.eps).view(np.uint32)),
            (RopeWrite.VALUE_NORM, ones.ctypes.data if changes.norms_values else 0),
            (RopeWrite.GROWTH, address_of(growth and growth[0])),
            (RopeWrite.GROWTH_LENGTH, growth[1] if growth else 0),
        ):  # fmt: skip
            record[word] = value
        run_chunks(ROPE_WRITE[self.layout.dtype], record, header, chunks, workers)
        return queries[first_token:], cosines[first_token:], sines[first_token:]

    def plan(
        self, tables: Array, query_lens: Array, positions: Array, threads: int = 1
    ) -> AttentionPlan:
        """Return how contexts are cut, as for so many threads."""
        shape = AttentionShape(self.group, self.layout.block_size, self.work_heads, threads)
        return plan_attention(attention_items(query_lens, self.group), positions, tables, shape)

    def attend(
        self, queries: Array, tables: Array, query_lens: Any, positions: Array, layer: int = 0,
        first_token: int = 0, chunks: int | None = None, workers: int = 1, threads: int = 1,
    ) -> Array:  # fmt: skip
        """Return attention's output [T, H·D]; queries [first_token + T, H·D] as rope leaves them.

        `threads`: contexts are cut as for so many threads.
        """
        layout, query_lens = self.layout, np.asarray(query_lens, np.int32)
        positions = positions.astype(np.int32)
        tables = np.ascontiguousarray(tables, np.int32)
        items, tokens, merges, slots = self.plan(tables, query_lens, positions, threads)
        num_tokens = int(query_lens.sum())
        width = self.num_heads * layout.own_value_dim
        out = np.full((num_tokens, width), np.nan, np.float32)
        partials = aligned(
            4
            * int(merges[:, 1].sum())
            * attention_partial_floats(self.num_heads, layout.own_value_dim),
            0xFF,
        )
        header = self.header(
            first_token, NUM_TOKENS=num_tokens, POSITIONS=positions, BLOCK_TABLES=tables,
            TABLE_WIDTH=tables.shape[1], ATTENTION_ITEMS=items, NUM_ATTENTION_ITEMS=len(items),
            ATTENTION_TOKENS=tokens, PARTIAL_SLOTS=slots, ATTENTION_MERGES=merges,
            NUM_ATTENTION_MERGES=len(merges),
        )  # fmt: skip
        record = np.zeros(RECORD_WORDS, np.int64)
        sinks = None
        if self.sinks is not None:
            sinks = (self.sinks * np.log2(np.e)).astype(np.float32)
        for word, value in (
            (Attention.QUERIES, queries.ctypes.data), (Attention.OUT, out.ctypes.data),
            (Attention.POOL, self.layer_address(layer)),
            (Attention.BLOCK_BYTES, layout.block_bytes), (Attention.HEAD_BYTES, layout.head_bytes),
            (Attention.BLOCK_SIZE, layout.block_size), (Attention.HEAD_DIM, layout.head_dim),
            (Attention.NUM_HEADS, self.num_heads), (Attention.NUM_KV_HEADS, self.work_heads),
            (Attention.PARTIALS, partials.ctypes.data), (Attention.WINDOW, self.window),
            (Attention.SINKS, address_of(sinks)), (Attention.VALUE_DIM, layout.own_value_dim),
            (Attention.HEAD_STRIDE, 0 if self.parts else layout.head_bytes),
            (Attention.QUERIES_FIRST_WORD, StepWord.FIRST_TOKEN), (Attention.CAP, self.cap_bits),
        ):  # fmt: skip
            record[word] = value
        total = len(items) * self.work_heads
        run_chunks(ATTENTION[layout.dtype], record, header, chunks or total, workers)
        if len(merges):
            run_chunks(merge_attention, record, header, len(merges) * self.num_heads, workers)
        return out


@dataclass
class Case:
    """Sequences whose K and V are in a pool, and the queries of all their tokens.

    `queries`: [T, H·D], scaled. `out`: attention of all tokens by the reference, on what the pool
    holds. `starts`: index of each sequence's first token.
    """

    setting: Setting
    tables: Array
    lengths: list[int]
    positions: Array
    queries: Array
    out: Array

    @property
    def starts(self) -> Array:
        return np.cumsum(self.lengths) - self.lengths

    def attend(self, spans: list[tuple[int, int, int]], **options: Any) -> Array:
        """Return attention of spans (sequence, first position, end), as rows of one piece."""
        chosen = np.concatenate([np.arange(first, end) + self.starts[s] for s, first, end in spans])
        return self.setting.attend(
            np.ascontiguousarray(self.queries[chosen]), self.tables[[s for s, _, _ in spans]],
            [end - first for _, first, end in spans], self.positions[chosen], layer=LAYER,
            **options,
        )  # fmt: skip

    def plan(self, spans: list[tuple[int, int, int]]) -> AttentionPlan:
        """Return how the contexts of such spans are cut for one thread."""
        return self.setting.plan(
            np.ascontiguousarray(self.tables[[s for s, _, _ in spans]]),
            np.array([end - first for _, first, end in spans], np.int32),
            np.concatenate([np.arange(first, end, dtype=np.int32) for _, first, end in spans]),
        )

    def all_spans(self) -> list[tuple[int, int, int]]:
        return [(s, 0, length) for s, length in enumerate(self.lengths)]


LAYER = 1
SINKS = np.array([-40.0, 0.3, 2.0, 300.0], np.float32)
"""Of four heads: far below the scores, among them and far above."""
UNUSED_BLOCK = 2**30


def frequencies_of(head_dim: int) -> Array:
    return (10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


def make_case(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
    lengths: list[int], window: int = 0, sinks: Array | None = None, cap: float = 0,
) -> Case:  # fmt: skip
    """Write random sequences into shuffled blocks of a pool that is full of NaN."""
    random = np.random.default_rng([num_heads, num_kv_heads, head_dim, block_size, *lengths])
    layout = KvLayout(dtype, 2, num_kv_heads, block_size, head_dim)
    counts = [-(-length // block_size) for length in lengths]
    setting = Setting(layout, num_heads, sum(counts) + 3, window, sinks, cap=cap)
    blocks = random.permutation(setting.num_blocks)
    tables = np.full((len(lengths), max(counts) + 1), UNUSED_BLOCK, np.int32)
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        tables[row, :count] = blocks[end - count : end]
    positions = np.concatenate([np.arange(length) for length in lengths])
    rows = np.repeat(np.arange(len(lengths)), lengths)
    places = tables[rows, positions // block_size].astype(np.int64) * block_size
    places += positions % block_size
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = random.standard_normal((len(positions), width)).astype(np.float32)
    queries, cosines, sines = setting.rope(
        qkv, frequencies_of(head_dim), positions, places, layer=LAYER
    )
    shape = (setting.num_blocks, 2, 2, num_kv_heads, block_size, head_dim)
    pool, rotated = (
        np.full(shape, np.nan, np.float32),
        np.empty((len(positions), num_heads, head_dim), np.float32),
    )
    rope_write_kv(qkv, cosines, sines, pool, LAYER, places, rotated)
    held = np.where(np.isnan(pool), np.float32(np.nan), decode_blocks(layout, setting.data))
    expected = np.empty_like(rotated)
    paged_attention(
        rotated, held, LAYER, tables, rows, positions.astype(np.int32), head_dim**-0.5, 0,
        len(positions) * num_kv_heads, expected, window or None, sinks, cap or None,
    )  # fmt: skip
    return Case(setting, tables, lengths, positions, queries, expected.reshape(len(positions), -1))


def address_of(array: Array | None) -> int:
    """Return where an array lies; 0 for none."""
    return 0 if array is None else array.ctypes.data


def codes_widened(dtype: str) -> Array:
    """Return the 256 codes of a type as the attention kernels expand them, float32."""
    widen = WIDEN[dtype]

    @numba.njit
    def run(codes: int, count: int, out: int) -> None:
        widen(codes, count, out)

    codes, out = aligned(256), aligned(512)
    codes[:] = np.arange(256)
    run(codes.ctypes.data, 256, out.ctypes.data)
    return from_bfloat16(out.view(np.uint16))


def digests(dtypes: list[str]) -> dict[str, list[Any]]:
    """Return a digest of everything computed for some shapes, and the largest error."""
    found = {}
    for dtype in dtypes:
        digest, error = hashlib.sha256(), 0.0
        if dtype in WIDEN:
            digest.update(codes_widened(dtype).tobytes())
        for shape in [
            (9, 3, 64, 16, [1, 17, 130]), (4, 4, 40, 24, [100]), (8, 1, 80, 8, [1100]),
            (9, 3, 64, 16, [2300], 1050), (4, 2, 64, 16, [1100], 128, SINKS),
            (4, 2, 64, 16, [1100], 0, None, 1.5),
        ]:  # fmt: skip
            case = make_case(dtype, *shape)
            result = case.attend(case.all_spans(), chunks=3)
            digest.update(case.queries.tobytes() + case.setting.data.tobytes() + result.tobytes())
            error = max(error, float(np.abs(result - case.out).max()))
        found[dtype] = [digest.hexdigest(), error]
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(digests(sys.argv[2:])))
