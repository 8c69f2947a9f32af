"""In which format each matrix of a model runs, and what that loses.

    file      auto     float32   bfloat16
    F32       F32      F32       BF16
    F16       F16      F32       BF16
    BF16      BF16     F32       BF16
    Q8_0      Q8_0     F32       BF16
    Q4_0      Q4_0     F32       BF16
    Q4_1      Q4_1     F32       BF16
    Q5_0      Q5_0     F32       BF16
    Q5_1      Q5_1     F32       BF16
    Q4_K      Q4_K     F32       BF16
    Q5_K      Q5_K     F32       BF16
    Q6_K      Q6_K     F32       BF16
    Q2_K      Q8_0     F32       BF16     requantised
    Q3_K      Q6_K     F32       BF16     exact
    IQ4_NL    IQ4_NL   F32       BF16
    IQ4_XS    IQ4_XS   F32       BF16
    MXFP4     Q4_F     F32       BF16     exact for scales that are float16
    INT4      Q4_0     F32       BF16     exact for scales that are float16
    UINT4     Q4_1     F32       BF16     scale · zero point is rounded to float16
    INT8      Q8_0     F32       BF16     exact for scales that are float16
    UINT8     Q8_0     F32       BF16     requantised
    FP8       Q8_0     F32       BF16     requantised

The last five are group-wise quantised checkpoints (`compute_plane.model.group_parts`,
`compute_plane.model.float8_matrices`). A group of theirs is 32 · n neighbouring inputs; where a
matrix has its columns sorted to make it so, the rows that meet it are sorted too
(`input_order_of`).

The loss of a conversion is the relative root-mean-square error of the weights, measured when a
model is loaded, over a sample of the rows of every matrix that is converted with a loss (of models
with thousands of experts, of some hundreds of matrices). With
SmolLM2-135M, quantised by llama.cpp, Q4_1 as BF16 loses 0.13 %. The table is the CPU executor's;
the CUDA executor has some formats more and lacks others (`compute_plane.cuda.weight_plan`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog

from compute_plane.model.quantize import convert_rows
from compute_plane.model.tensor import IntArray, RawTensor, TensorFormat
from planes.errors import ConfigError

log = structlog.get_logger()

AUTO: Final = "auto"
FLOAT32: Final = "float32"
BFLOAT16: Final = "bfloat16"

OWN_FORMAT: Final[Mapping[TensorFormat, TensorFormat]] = {
    TensorFormat.F32: TensorFormat.F32,
    TensorFormat.F16: TensorFormat.F16,
    TensorFormat.BF16: TensorFormat.BF16,
    TensorFormat.Q8_0: TensorFormat.Q8_0,
    TensorFormat.Q4_0: TensorFormat.Q4_0,
    TensorFormat.Q4_1: TensorFormat.Q4_1,
    TensorFormat.Q5_0: TensorFormat.Q5_0,
    TensorFormat.Q5_1: TensorFormat.Q5_1,
    TensorFormat.Q4_K: TensorFormat.Q4_K,
    TensorFormat.Q5_K: TensorFormat.Q5_K,
    TensorFormat.Q6_K: TensorFormat.Q6_K,
    TensorFormat.Q2_K: TensorFormat.Q8_0,
    TensorFormat.Q3_K: TensorFormat.Q6_K,
    TensorFormat.IQ4_NL: TensorFormat.IQ4_NL,
    TensorFormat.IQ4_XS: TensorFormat.IQ4_XS,
    TensorFormat.MXFP4: TensorFormat.Q4_F,
    TensorFormat.INT4: TensorFormat.Q4_0,
    TensorFormat.UINT4: TensorFormat.Q4_1,
    TensorFormat.INT8: TensorFormat.Q8_0,
    TensorFormat.UINT8: TensorFormat.Q8_0,
    TensorFormat.FP8: TensorFormat.Q8_0,
}
"""What `auto` runs a file's format as."""

EXACT: Final = (
    (TensorFormat.IQ4_NL, TensorFormat.Q8_0),
    (TensorFormat.Q3_K, TensorFormat.Q6_K),
)
"""Conversions of quantised formats that keep every weight."""

SAMPLED_ROWS: Final = 64
"""Rows of a matrix over which its loss is measured, spread evenly."""
SAMPLED_MATRICES: Final = 512
"""Matrices over which the loss of a conversion is measured at most, spread evenly."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Matrices that run in another format than their file's.

    `relative_error`: √(Σ (weight as run − weight)² / Σ weight²) over the sampled rows of all of
    them; 0 if the conversion is exact. `num_bytes`: of all of them, as they run.
    """

    stored: str
    runs_as: str
    num_matrices: int
    relative_error: float
    num_bytes: int


def format_to_run(tensor: RawTensor, dtype: str) -> TensorFormat:
    """Return the format in which a stored matrix runs. Raises ConfigError for an unknown dtype."""
    if dtype == AUTO:
        return OWN_FORMAT[tensor.format]
    if dtype == FLOAT32:
        return TensorFormat.F32
    if dtype == BFLOAT16:
        return TensorFormat.BF16
    raise ConfigError(f"dtype must be {AUTO}, {FLOAT32} or {BFLOAT16}, got {dtype}", field="dtype")


def input_order_of(tensor: RawTensor, target: TensorFormat) -> IntArray | None:
    """Return the order in which a matrix wants the elements of its rows; None: the model's."""
    return tensor.input_order if target.block_elements > 1 else None


def is_exact(stored: TensorFormat, target: TensorFormat) -> bool:
    """Tell whether every stored weight is kept."""
    return stored is target or target is TensorFormat.F32 or (stored, target) in EXACT


def error_sums(tensor: RawTensor, target: TensorFormat) -> tuple[float, float]:
    """Return Σ (weight as run − weight)² and Σ weight² over sampled rows of a matrix."""
    last = tensor.stored.shape[0] - 1
    picked = np.unique(np.linspace(0, last, SAMPLED_ROWS).astype(np.intp))
    stored = np.ascontiguousarray(tensor.rows(picked))
    path, name = tensor.path, tensor.stored_name
    run = convert_rows(stored, tensor.format, target, path=path, name=name)
    f32 = TensorFormat.F32
    weights = convert_rows(stored, tensor.format, f32, path=path, name=name).view(np.float32)
    as_run = convert_rows(run, target, f32, path=path, name=name).view(np.float32)
    errors = as_run.astype(np.float64) - weights
    return float(np.square(errors).sum()), float(np.square(weights.astype(np.float64)).sum())


def measure_conversions(
    converted: Sequence[tuple[RawTensor, TensorFormat]], pool: ThreadPoolExecutor
) -> tuple[Conversion, ...]:
    """Return what is lost, by pairs of formats.

    `converted`: the matrices that do not run in their file's format, with the one they run in.
    """
    lossy = [
        pair
        for of_pair in _by_formats(converted).values()
        if not is_exact(of_pair[0][0].format, of_pair[0][1])
        for pair in of_pair[:: -(-len(of_pair) // SAMPLED_MATRICES)]
    ]
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for (tensor, target), (errors, weights) in zip(
        lossy, pool.map(lambda pair: error_sums(*pair), lossy), strict=True
    ):
        key = (tensor.format.label, target.label)
        before = sums.get(key, (0.0, 0.0))
        sums[key] = (before[0] + errors, before[1] + weights)
    counts: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for tensor, target in converted:
        key = (tensor.format.label, target.label)
        counts[key] += 1
        num_bytes[key] += tensor.stored.shape[0] * target.row_bytes(tensor.shape[-1])
    return tuple(
        Conversion(*key, count, _relative(*sums.get(key, (0.0, 0.0))), num_bytes[key])
        for key, count in counts.items()
    )


def _by_formats(
    converted: Sequence[tuple[RawTensor, TensorFormat]],
) -> dict[tuple[str, str], list[tuple[RawTensor, TensorFormat]]]:
    """Return matrices by what they are stored and run as."""
    found: dict[tuple[str, str], list[tuple[RawTensor, TensorFormat]]] = {}
    for tensor, target in converted:
        found.setdefault((tensor.format.label, target.label), []).append((tensor, target))
    return found


def _relative(errors: float, weights: float) -> float:
    return float(np.sqrt(errors / weights)) if weights else 0.0


def log_conversions(conversions: Iterable[Conversion]) -> None:
    """Say what was converted, a line for each pair of formats."""
    for conversion in conversions:
        log.info(
            "weights run in another format than the file's"
            if conversion.relative_error
            else "weights run in another format than the file's, which loses nothing",
            stored=conversion.stored,
            runs_as=conversion.runs_as,
            num_matrices=conversion.num_matrices,
            relative_error=round(conversion.relative_error, 6),
            num_bytes=conversion.num_bytes,
        )


def describe_formats(elements: Mapping[tuple[TensorFormat, TensorFormat], int]) -> str:
    """Return what matrices are stored and run as, those with most elements first.

    `elements`: (stored, runs as) to the number of weights. Such as "Q4_1" or
    "Q4_K, Q2_K as Q8_0".
    """
    ordered: Iterable[tuple[TensorFormat, TensorFormat]] = sorted(
        elements, key=lambda pair: (-elements[pair], pair[0].label)
    )
    return ", ".join(
        stored.label if stored is target else f"{stored.label} as {target.label}"
        for stored, target in ordered
    )
