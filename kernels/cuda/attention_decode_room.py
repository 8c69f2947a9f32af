"""Where decode attention on tensor cores keeps what lasts: in registers, or where there is room.

Queries are the operand B of the first product, the same for every tile of keys. A lane's share of a
head is a vector of four words for every two products, filled by the pool's `load_query`: words 0
and 1 are of the even product, 2 and 3 of the odd.

*Ample room.* Queries are registers like all the rest, 16 of them for a tile of heads at D 128.

*Scarce room*: D 256 in a pool of 16 bits. A tile of keys, one of values and the sums are 64
registers each, of the 255 that a thread can have. The tiles stay as they are, a whole one on its
way while another is computed with: in halves that take turns, a row of few tiles would wait for the
memory twice as often. What gives way is the rest:

Queries lie in shared memory, once for the four warps, 4 KB. Each warp reads a quarter of the
vectors when its first keys and values are under way, and lays down a word of all lanes beside the
next:

    vector c    word 0 of lanes 0 … 31 │ word 1 │ word 2 │ word 3        512 bytes, 128 a word

so that word t of all lanes is a tile of eight heads by 16 bytes, as the tensor cores' reads take
them: one gives every lane its vector back, right before the two products that it is for. No two
lanes meet in a bank. A warp's tile takes eight such reads of 4 wavefronts each, 4 KB out of shared
memory for 16 KB from the pool.

Numbers that only the end of a chunk needs, most of them places in memory, are computed there,
anew each time; those that must last are of 32 bits. The compiler would compute them once, before
all loops, and keep them, as halves of 64 bits, where there is nothing left to keep them in.

So is what a cap needs (`attention_caps`), for each tile: a visit to the special-function unit and
three instructions beside some 300.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda, uint32

from kernels.cuda.attention_caps import steeper, steeper_anew
from kernels.cuda.attention_chunks import SHARERS
from kernels.cuda.attention_decode_layout import HEADS_OF_TILE
from kernels.cuda.attention_decode_pool import DecodePool
from kernels.cuda.attention_partials import part_of_block, unchanged
from kernels.cuda.instructions.addresses import anew, multiply_add_int32
from kernels.cuda.instructions.tiles import load_tiles
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar, Scalars

VECTOR_WORDS = 4 * 32  # of all lanes of a warp


@dataclass(frozen=True, slots=True)
class DecodeRoom:
    """Device functions for what lasts, for one kind of pool and a group's tiles of heads.

    make_queries()
        the array that queries wait in, of this thread or of the block
    load_queries(queries, query, place, first_head, quad_row, quad)
        read them, if they wait in registers: heads from `first_head` on of the row at `place`
    share_queries(the same, warp)
        read them, if they wait in shared memory; all threads of the block must call it
    query_tile(queries, vectors, n, m, lane)
        the operand B of product m of tile n of heads; `vectors` [tiles of heads, 4] are registers
        that it may leave something in, from an even m for the odd one behind it
    again(number)
        the same int32, and what is made of it is computed behind here, if room is scarce
    begin_of_chunk(chunk, chunk_tiles, first_tile)
        the first tile of a chunk
    find_row(row, split, split_rows)
        the block's row and split, which are these
    steeper(unit, cap)
        that of `attention_caps`, computed behind here, if room is scarce
    """

    make_queries: DeviceFunction
    load_queries: DeviceFunction
    share_queries: DeviceFunction
    query_tile: DeviceFunction
    again: DeviceFunction
    begin_of_chunk: DeviceFunction
    find_row: DeviceFunction
    steeper: DeviceFunction


def make_decode_room(pool: DecodePool, head_size: int, group: int, head_tiles: int) -> DecodeRoom:
    """Return the functions for a pool of `make_decode_pool`."""
    columns = head_size // 32  # vectors of a head
    load_query = pool.load_query

    @cuda.jit(device=True, inline="always")
    def load_vectors(
        vectors: Local, query: Pointer, place: Scalar, first_head: Scalar,
        first_column: Scalar, num: Scalar, quad_row: Scalar, quad: Scalar,
    ) -> None:  # fmt: skip
        """Read the lane's vectors of `num` columns of each tile of heads, zeros past the group."""
        for n in range(head_tiles):
            head = HEADS_OF_TILE * n + quad_row
            first = place + (first_head + head) * head_size
            for i in range(num):
                for word in range(4):
                    vectors[n * num + i, word] = uint32(0)
                if head < group:
                    load_query(vectors, n * num + i, query, first, first_column + i, quad)

    make = _make_scarce if pool.fills_registers else _make_ample
    return make(load_vectors, columns, head_tiles)


def _make_ample(load_vectors: DeviceFunction, columns: int, head_tiles: int) -> DecodeRoom:
    shape = (head_tiles * columns, 4)

    @cuda.jit(device=True, inline="always")
    def make_queries() -> Local:
        return cuda.local.array(shape, uint32)

    @cuda.jit(device=True, inline="always")
    def load_queries(
        queries: Local, query: Pointer, place: Scalar, first_head: Scalar,
        quad_row: Scalar, quad: Scalar,
    ) -> None:  # fmt: skip
        load_vectors(queries, query, place, first_head, 0, columns, quad_row, quad)

    @cuda.jit(device=True, inline="always")
    def share_queries(
        _queries: Local, _query: Pointer, _place: Scalar, _first_head: Scalar, _quad_row: Scalar,
        _quad: Scalar, _warp: Scalar,
    ) -> None:  # fmt: skip
        pass

    @cuda.jit(device=True, inline="always")
    def query_tile(queries: Local, _vectors: Local, n: Scalar, m: Scalar, _lane: Scalar) -> Scalars:
        q, word = n * columns + m // 2, m % 2 * 2
        return queries[q, word], queries[q, word + 1]

    @cuda.jit(device=True, inline="always")
    def begin_of_chunk(chunk: Scalar, chunk_tiles: Scalar, first_tile: Scalar) -> Scalar:
        return first_tile + chunk * chunk_tiles

    @cuda.jit(device=True, inline="always")
    def find_row(row: Scalar, split: Scalar, _split_rows: Scalar) -> Scalars:
        return row, split

    return DecodeRoom(
        make_queries, load_queries, share_queries, query_tile, unchanged, begin_of_chunk,
        find_row, steeper,
    )  # fmt: skip


def _make_scarce(load_vectors: DeviceFunction, columns: int, head_tiles: int) -> DecodeRoom:
    of_warp = columns // SHARERS
    num_words, vectors_shape = head_tiles * columns * VECTOR_WORDS, (head_tiles * of_warp, 4)

    @cuda.jit(device=True, inline="always")
    def make_queries() -> Pointer:
        return cuda.shared.array(num_words, uint32, alignment=16)

    @cuda.jit(device=True, inline="always")
    def load_queries(
        _queries: Pointer, _query: Pointer, _place: Scalar, _first_head: Scalar,
        _quad_row: Scalar, _quad: Scalar,
    ) -> None:  # fmt: skip
        pass

    @cuda.jit(device=True, inline="always")
    def share_queries(
        queries: Pointer, query: Pointer, place: Scalar, first_head: Scalar,
        quad_row: Scalar, quad: Scalar, warp: Scalar,
    ) -> None:  # fmt: skip
        vectors = cuda.local.array(vectors_shape, uint32)
        first = warp * of_warp
        load_vectors(vectors, query, place, first_head, first, of_warp, quad_row, quad)
        for n in range(head_tiles):
            for i in range(of_warp):
                begin = (n * columns + first + i) * VECTOR_WORDS + 4 * quad_row + quad
                for word in range(4):
                    queries[begin + 32 * word] = vectors[n * of_warp + i, word]
        cuda.syncthreads()

    @cuda.jit(device=True, inline="always")
    def query_tile(queries: Pointer, vectors: Local, n: Scalar, m: Scalar, lane: Scalar) -> Scalars:
        if m % 2 == 0:
            load_tiles(vectors, n, queries, (n * columns + m // 2) * VECTOR_WORDS + 4 * lane)
        word = m % 2 * 2
        return vectors[n, word], vectors[n, word + 1]

    @cuda.jit(device=True, inline="always")
    def find_row(_row: Scalar, _split: Scalar, split_rows: Scalar) -> Scalars:
        row, split, _ = part_of_block(anew(split_rows))
        return row, split

    return DecodeRoom(
        make_queries, load_queries, share_queries, query_tile, anew, multiply_add_int32,
        find_row, steeper_anew,
    )  # fmt: skip
