"""Prints what int8 operations compute with an instruction set: `… NAME [all]`.

Two numbers: of rows as the set makes them, and of products, whose rows are the same on every set.
"""

from __future__ import annotations

import hashlib
import sys

from compute_plane.config import ComputePlaneConfig
from compute_plane.executor.kernel_cache import prepare_kernel_cache
from tests.amx import sets

sets.use(sys.argv[1])
prepare_kernel_cache(ComputePlaneConfig().kernel_cache_root)

import numpy as np  # noqa: E402 - the set must be chosen before anything is compiled

from kernels.cpu import row_inputs  # noqa: E402
from kernels.cpu.int8_packing import INT8_FORMATS  # noqa: E402
from kernels.cpu.int8_pair_tile import PAIR_OFFSET, PARTNER_OFFSET  # noqa: E402
from kernels.cpu.operands import RowFormat  # noqa: E402
from tests.kernels.cpu.operation_calls import (  # noqa: E402
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
rows, k, n = 67, 512, 50
makers = {"normed": row_inputs.normed_rows, "gated": row_inputs.gated_rows}
labels = list(INT8_FORMATS)
if "all" not in sys.argv:
    del makers["gated"]
    labels = ["Q4_1", "Q8_0", "Q5_K", "Q6_K"]  # of every kind of weights and of scales
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
groups = values.reshape(rows, -1, 2, 16).astype(np.int32)
first, partner = groups[:, :, 0], groups[:, :, 1]
scales = random.uniform(0.01, 1, (rows, k // 32)).astype(np.float32)
sums = groups.sum(axis=(2, 3), dtype=np.int32)
half_sums = groups.sum(axis=3, dtype=np.int16).reshape(rows, -1)
pair_sums = (first * partner + PAIR_OFFSET * first + PARTNER_OFFSET * partner).sum(
    axis=2, dtype=np.int32
)
x = Int8Rows(values, scales, scales * sums.astype(np.float32), half_sums, pair_sums)
for label in labels:
    packed = packed_weights(label, random_blocks(label, n, k, random), k)
    for count in (1, 9, rows):
        out = np.empty((count, n), np.float32)
        product(label, packed, x, count, n, out)
        of_products.update(out)
sys.stdout.write(f"{of_rows.hexdigest()} {of_products.hexdigest()}")
