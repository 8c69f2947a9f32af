"""Prints what int8 operations compute with an instruction set: `… NAME [all]`.

Two numbers: of rows as the set makes them, and of products, whose rows are the same on every set.
"""

from __future__ import annotations

import hashlib
import sys

from compute_plane.config import ComputePlaneConfig
from compute_plane.cpu.kernel_cache import prepare_kernel_cache
from tests.amx import sets

sets.use(sys.argv[1])
prepare_kernel_cache(ComputePlaneConfig().kernel_cache_root)

import numpy as np  # noqa: E402 - the set must be chosen before anything is compiled

from kernels.cpu import row_inputs  # noqa: E402
from kernels.cpu.int8_packing import INT8_FORMATS  # noqa: E402
from kernels.cpu.int8_pair_tile import PAIR_OFFSET  # noqa: E402
from kernels.cpu.operands import RowFormat  # noqa: E402
from tests.kernels.cpu.operation_calls import (  # noqa: E402
    SCALES_AT,
    Int8Rows,
    packed_weights,
    product,
    random_blocks,
    row_record,
    run,
    step_header,
)

random = np.random.default_rng(0)
of_rows, of_products = hashlib.sha256(), hashlib.sha256()
rows, k, n = 67, 512, 210  # eight panels, four and two
makers = {"normed": row_inputs.normed_rows, "gated": row_inputs.gated_rows}
labels, counts = list(INT8_FORMATS), (*range(1, 14), 16, 63, 64, rows)
if "all" not in sys.argv:
    del makers["gated"]
    labels = ["Q4_1", "Q8_0", "Q5_K", "Q6_K", "IQ4_XS"]  # of every kind of weights and of scales
    counts = (1, 9, rows)
for maker in makers.values():
    source = (random.standard_normal((rows, 2 * k)) * 5).astype(np.float32)
    weight = random.standard_normal(k).astype(np.float32)
    header, _ = step_header(rows)
    floats = np.empty((rows, k - 7), np.float32)
    run(maker, row_record(source, k - 7, RowFormat.FLOAT32, floats, weight), header)
    of_rows.update(floats)
    x = Int8Rows.empty(rows, k)
    run(maker, row_record(source, k, RowFormat.INT8, x, weight), header)
    for part in (x.values, x.scales, x.scaled_sums, x.sums):
        of_rows.update(part[:rows])
values = random.integers(-PAIR_OFFSET, PAIR_OFFSET + 1, (rows, k), np.int8)
values[5], values[6] = PAIR_OFFSET, -PAIR_OFFSET  # beside the largest weights: sums of 16 bits
x = Int8Rows.of(values, random.uniform(0.01, 1, (rows, k // 32)).astype(np.float32))
for label in labels:
    blocks, fmt = random_blocks(label, n, k, random), INT8_FORMATS[label]
    for at in SCALES_AT.get(label, (0,)):
        # In every third column d and m have no exponent: subnormal numbers.
        blocks.reshape(n, -1, fmt.block_bytes)[::3, :, at + 1] &= 0x83
    # All bits of a column's weights, none of another's, their scales as they are.
    places = [at + byte for at in SCALES_AT.get(label, (0,)) for byte in (0, 1)]
    for number, byte in ((1, 0xFF), (2, 0x00)):
        column = blocks[number].reshape(-1, fmt.block_bytes)
        scales, column[:] = column[:, places], byte
        column[:, places] = scales
    packed = packed_weights(label, blocks, k)
    for count in counts:
        out = np.empty((count, n), np.float32)
        product(label, packed, x, count, n, out)
        of_products.update(out)
sys.stdout.write(f"{of_rows.hexdigest()} {of_products.hexdigest()}")
