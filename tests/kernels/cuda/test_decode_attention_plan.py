"""Where decode attention cuts a row, and when it splits one over several blocks of threads."""

from __future__ import annotations

import pytest
from numba import cuda

from kernels.cuda.attention_chunks import (
    CHUNK_TILES,
    FEW_CHUNKS,
    LEAST_CHUNK_TILES,
    LEAST_GAIN,
    MAX_CHUNKS,
    SHARERS,
    TILE_TOKENS,
    least_chunk_tiles,
    most_chunks,
    most_tokens_read,
    num_chunks,
    num_tickets,
    plan_splits,
    plan_tail,
    tiles_of_chunk,
)
from kernels.cuda.attention_decode import DecodePlan, DecodeVariant
from kernels.cuda.attention_wide import WideDecodeVariant
from kernels.cuda.latent_attention import LatentDecodeVariant

H200 = 132


@pytest.mark.parametrize(
    ("num_tokens", "chunks"),
    [
        (0, 0), (1, 1), (128, 1), (129, 2), (512, 4), (1024, 8),  # 128 tokens a chunk
        (1025, 6), (1536, 8), (1537, 7),  # 192, 256
        (2048, 8), (2049, 9), (16384, 64), (16385, 52), (32768, 64), (1_000_000, 64),
    ],
)  # fmt: skip
def test_a_row_has_8_chunks_or_some_of_256_tokens_and_never_more_than_64(num_tokens, chunks):
    assert num_chunks(num_tokens, LEAST_CHUNK_TILES) == chunks


@pytest.mark.parametrize(
    ("num_tokens", "chunks"), [(0, 0), (256, 1), (257, 2), (2048, 8), (2049, 9)]
)
def test_in_a_pool_of_8_bits_a_short_row_has_chunks_of_256_tokens(num_tokens, chunks):
    assert num_chunks(num_tokens, least_chunk_tiles("int8")) == chunks
    of_one = DecodeVariant("bfloat16", 64, 4, 16, "int8").num_partials(1, 1, 1)
    room = DecodeVariant("bfloat16", 64, 4, 16, "int8").num_partials(1, 1, num_tokens)
    assert room == chunks * of_one


@pytest.mark.parametrize("least", [LEAST_CHUNK_TILES, CHUNK_TILES])
def test_every_chunk_has_whole_rounds_of_the_sharers_and_the_last_begins_inside_the_row(least):
    for num_tiles in range(1, 20_000, 7):
        of_chunk = tiles_of_chunk(num_tiles, least)
        chunks = num_chunks(16 * num_tiles, least)
        assert of_chunk % SHARERS == 0
        assert (chunks - 1) * of_chunk < num_tiles <= chunks * of_chunk
        assert chunks <= MAX_CHUNKS


@pytest.mark.parametrize(("rows", "longest"), [(32, 4096), (33, 131072), (1, 128), (0, 4096)])
def test_a_grid_that_fills_the_device_or_has_one_chunk_is_not_split(rows, longest):
    assert plan_splits(rows, 8, longest, H200, 2, 8) == 1


@pytest.mark.parametrize(
    ("rows", "longest", "splits"), [(8, 8192, 4), (1, 32768, 32), (1, 2048, 8), (16, 4096, 2)]
)
def test_a_grid_that_underfills_the_device_is_split_no_further_than_helps(rows, longest, splits):
    assert plan_splits(rows, 8, longest, H200, 2, 8) == splits


@pytest.mark.parametrize("longest", [8192, 32768, 131072])
@pytest.mark.parametrize("least_blocks", [2, 3, 4])
def test_a_graph_for_long_rows_does_not_flood_the_device_with_blocks_for_short_ones(
    longest, least_blocks
):
    for rows in range(1, 257):
        splits = plan_splits(rows, 8, longest, H200, least_blocks, 8)
        assert rows * 8 * splits <= 16 * H200  # unsplit, 256 rows are as many; three are at work


@pytest.mark.parametrize("longest", [8192, 32768, 131072])
@pytest.mark.parametrize(
    ("rows", "least_blocks", "splits"), [(8, 3, 8), (16, 3, 4), (32, 3, 2), (16, 2, 2), (24, 2, 2)]
)
def test_a_graph_for_long_rows_is_split_as_well_for_short_ones(rows, least_blocks, longest, splits):
    assert plan_splits(rows, 8, longest, H200, least_blocks, 8) == splits


def test_the_plan_of_a_variant_counts_the_blocks_that_share_a_group():
    small, large = (DecodeVariant("float32", 64, group, 16) for group in (4, 16))

    assert large.plan_of(3, 8, 2048, 2).grid == (32, 2, 3)
    assert large.plan(1, 8, 2048, H200).splits == small.plan(4, 8, 2048, H200).splits
    assert large.num_partials(1, 8, 4096) == 4 * small.num_partials(1, 8, 4096)


@pytest.mark.parametrize(("group", "parts", "heads"), [(3, 1, 3), (4, 2, 2), (8, 3, 3)])
def test_a_block_has_up_to_three_heads_of_256_in_float32(group, parts, heads):
    variant = DecodeVariant("float32", 256, group, 16)

    assert variant.plan_of(3, 8, 2048, 2).grid == (8 * parts, 2, 3)
    # Of each head a thread has two sums, a peak and a mass.
    assert variant.num_partials(1, 1, 1) == parts * heads * 4 * 128


@pytest.mark.parametrize(
    ("variant", "blocks"),
    [
        (DecodeVariant("bfloat16", 128, 4, 16), 2),
        (DecodeVariant("bfloat16", 128, 4, 16, "int8"), 3),
        (DecodeVariant("bfloat16", 128, 16, 16, "int8"), 2),  # more do not fit
        (DecodeVariant("bfloat16", 64, 4, 16), 3),
        (DecodeVariant("bfloat16", 64, 4, 16, "float8"), 4),  # six would be needed
        (DecodeVariant("float32", 64, 4, 16), 3),
        (DecodeVariant("bfloat16", 256, 4, 16), 1),  # two fit
        (DecodeVariant("bfloat16", 256, 4, 16, "int8"), 2),
        (DecodeVariant("float32", 256, 4, 16), 3),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_smaller_tiles_need_more_blocks_of_threads_for_the_same_bandwidth(variant, blocks):
    assert variant.least_blocks == blocks


def test_a_long_row_of_small_tiles_is_split_further():
    large, small = (DecodeVariant("bfloat16", 64, 4, 16, kv_dtype) for kv_dtype in (None, "int8"))

    assert large.plan(1, 8, 32768, H200).splits == 64
    assert small.plan(1, 8, 32768, H200).splits == 64
    assert DecodeVariant("bfloat16", 128, 4, 16).plan(1, 8, 32768, H200).splits == 32


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_device_function_is_made_for_the_plan_of_a_launch(dtype, monkeypatch):
    variant = DecodeVariant(dtype, 64, 5, 16)

    def plan():
        return [variant.plan(rows, 8, 1024, H200) for rows in (8, 256)]

    first = plan()
    monkeypatch.setattr(cuda, "jit", None)  # cannot be called

    assert plan() == first


def test_a_plan_has_room_for_partials_only_where_rows_are_split():
    variant = DecodeVariant("bfloat16", 64, 4, 16)

    few, many = (variant.plan(rows, 8, 4096, H200) for rows in (4, 128))

    assert few.splits > 1
    assert (few.grid, few.split_rows) == ((8, few.splits, 4), 4)
    assert few.num_partials == variant.num_partials(4, 8, 4096)
    assert many == DecodePlan(grid=(8, 1, 128), splits=1, split_rows=0, num_partials=0)


def test_partials_have_room_for_as_many_chunks_as_a_row_up_to_the_longest_can_have():
    variant = DecodeVariant("bfloat16", 64, 4, 16)
    of_one = variant.num_partials(1, 1, 1)

    for longest in (1, 128, 129, 512, 1024, 1100, 2049, 8192, 16384, 16385, 131072):
        needed = max(num_chunks(length, 8) for length in range(1, min(longest, 20_000) + 1))
        assert variant.num_partials(1, 1, longest) == needed * of_one
    assert variant.num_partials(32, 8, 8192) * 4 == 32 * 8 * 32 * 6 * 128 * 4  # 25 MB


@pytest.mark.wide
def test_no_plan_of_fewer_rows_or_shorter_ones_has_more_partials_than_is_said():
    of_heads = [
        DecodeVariant("bfloat16", 128, 4, 16), DecodeVariant("bfloat16", 128, 16, 16, "int8"),
        DecodeVariant("float32", 256, 8, 16), DecodeVariant("bfloat16", 64, 4, 16, None, True),
        WideDecodeVariant("bfloat16", 512, 8, 16), WideDecodeVariant("float32", 512, 8, 16),
    ]  # fmt: skip
    of_latents = [
        LatentDecodeVariant("bfloat16", heads, rank, 64, 16)
        for heads, rank in ((16, 512), (20, 256), (128, 512))
    ]
    for num_multiprocessors in (1, 16, H200):
        place, longest = num_multiprocessors, 131072
        for variant in (*of_heads, *of_latents):
            heads = (8,) if isinstance(variant, DecodeVariant) else ()
            most, reached = 0, 0
            for rows in range(1, 257):
                most = max(most, variant.most_partials(rows, *heads, longest, place))
                assert most == variant.most_partials(rows, *heads, longest, place)
                for length in (100, 3000, longest):
                    plan = variant.plan(rows, *heads, length, place)
                    assert plan.num_partials <= variant.most_partials(rows, *heads, length, place)
                    reached = max(reached, plan.num_partials)
            assert 2 * reached >= most


def test_partials_of_latents_are_as_many_as_of_no_other_attention():
    deepseek = LatentDecodeVariant("bfloat16", 128, 512, 64, 16)
    assert 4 * deepseek.num_partials(1, 16) == 8 * 34816  # a chunk of each of eight units
    assert 4 * deepseek.most_partials(256, 163840, H200) == 33 * 8 * 64 * 34816
    assert 4 * deepseek.most_partials(3, 163840, H200) == 3 * 8 * 64 * 34816
    windowed = DecodeVariant("bfloat16", 64, 4, 16, None, True)
    of_window = windowed.most_partials(9, 8, 131072, H200, 1024)
    assert of_window == windowed.most_partials(9, 8, 1039, H200)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 256, 257, 4096, 20_000])
def test_a_row_with_a_window_has_no_more_chunks_than_are_planned_for(window):
    for length in (1, 16, 255, 256, 257, 4096, 5000, 20_001, 40_000):
        first_tile, end_tile = max(length - window, 0) // TILE_TOKENS, -(-length // TILE_TOKENS)
        chunks = num_chunks((end_tile - first_tile) * TILE_TOKENS, 8)
        assert chunks <= most_chunks(most_tokens_read(length, window), 8) <= MAX_CHUNKS
    assert most_tokens_read(window, window) == window


def test_rows_are_planned_by_their_window_not_by_their_length():
    variant = DecodeVariant("bfloat16", 64, 4, 16, None, True)

    plan = variant.plan(1, 8, 32768, H200, 1024)

    read = 1024 + TILE_TOKENS - 1
    assert plan == variant.plan(1, 8, read, H200) == variant.plan(1, 8, 131072, H200, 1024)
    assert plan.splits > 1
    assert plan.num_partials == variant.num_partials(1, 8, read)
    assert variant.plan(1, 8, 600, H200, 1024) == variant.plan(1, 8, 600, H200)


@pytest.mark.parametrize(
    ("rows", "splits", "split_rows"),
    [
        (64, 3, 16),  # 116 blocks were left for the last wave of 396, 48 rows are 384
        (63, 3, 15),
        (50, 8, 2),  # a row was left
        (57, 5, 12),
        (110, 3, 11),
        (49, 1, 0),  # less than a wave
        (99, 1, 0),  # two waves
        (128, 1, 0),  # 232 were left, nearly two to a multiprocessor
        (256, 1, 0),  # 68 of 2048
        (4096, 1, 0),
    ],
)
def test_rows_that_would_leave_the_device_half_empty_at_the_end_are_split(rows, splits, split_rows):
    variant = DecodeVariant("bfloat16", 128, 4, 16)

    plan = variant.plan(rows, 8, 4096, H200)

    assert (plan.splits, plan.split_rows) == (splits, split_rows)
    assert plan.num_partials == variant.num_partials(split_rows, 8, 4096)
    assert (rows - split_rows) // splits * splits == rows - split_rows
    assert plan.grid == (8, splits, split_rows + (rows - split_rows) // splits)


def test_where_more_blocks_are_at_work_at_a_time_none_is_left_to_be_split():
    assert DecodeVariant("bfloat16", 64, 4, 16).plan(64, 8, 4096, H200).split_rows == 0


@pytest.mark.parametrize("num_multiprocessors", [1, 16, 68, H200])
@pytest.mark.parametrize("units", [1, 8, 40])
def test_a_split_tail_has_bandwidth_and_tickets_and_saves_a_tenth(num_multiprocessors, units):
    for resident, least in ((2, 1), (2, 2), (3, 2), (4, 3)):
        for rows in range(1, 300):
            splits, split_rows = plan_tail(rows, units, 2048, num_multiprocessors, resident, least)
            if split_rows == 0:
                assert splits == 1
                continue
            assert (rows - split_rows) % splits == 0
            assert split_rows * units <= num_tickets(num_multiprocessors)
            at_end = split_rows * units * splits
            assert at_end >= least * num_multiprocessors or splits == FEW_CHUNKS
            # What is whole fits into the waves that were full.
            blocks, of_wave = rows * units, resident * num_multiprocessors
            last_wave = max(blocks % of_wave, least * num_multiprocessors)
            assert blocks <= 0.9 * (blocks // of_wave * of_wave + last_wave)
            assert blocks > of_wave
            assert blocks - split_rows * units <= blocks // of_wave * of_wave


def test_no_row_of_no_token_is_split_for_the_tail():
    assert plan_tail(64, 8, 0, H200, 3, 2) == (1, 0)


@pytest.mark.parametrize(
    ("kv_dtype", "longest", "splits"),
    [(None, 128, 1), (None, 129, 2), (None, 385, 3), ("int8", 256, 1), ("int8", 257, 2)],
)
def test_a_row_is_split_over_no_more_blocks_than_it_has_chunks(kv_dtype, longest, splits):
    plan = DecodeVariant("bfloat16", 128, 4, 16, kv_dtype).plan(64, 8, longest, H200)
    assert plan.splits == splits
    assert (plan.split_rows > 0) == (splits > 1)


@pytest.mark.spread(1)
@pytest.mark.parametrize("num_multiprocessors", [1, 68, H200])
def test_every_unit_that_is_split_has_a_ticket(num_multiprocessors):
    tickets = num_tickets(num_multiprocessors)

    split = [
        blocks
        for blocks in range(1, 2 * tickets)
        for least_blocks in (2, 4)
        if plan_splits(blocks, 1, 131072, num_multiprocessors, least_blocks, 8) > 1
    ]

    assert max(split, default=0) <= tickets
    # What has no ticket would not be split either.
    cost_unsplit = -(-(tickets + 1) // num_multiprocessors)
    assert (1 - LEAST_GAIN) * cost_unsplit <= (tickets + 1) / num_multiprocessors
