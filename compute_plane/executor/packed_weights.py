"""A model's weights in the form in which kernels read them: packed, in one region of huge pages.

    region    │ embedding │ layer 0: attn_norm, q·k·v, o, mlp_norm, gate·up, down │ layer 1 … │
              final norm │ lm_head, unless it is tied │       each part from a multiple of 64 bytes

Where a layer has them, the biases of q, k and v, as one vector, and the norms of heads are behind
it.

Matrices that see the same input are one: the rows of q, k and v follow each other, and those of
gate and up, so that one product computes them all. Where a file stores them in formats that run
differently, or wants their inputs in different orders, there are several, each with the column of
the product at which it begins.

Where down wants its inputs in an order of its own, the rows of gate and up are packed in it, and
what they give is what down wants. For other matrices the rows that meet them are sorted.

Of a model whose first layers run elsewhere the others are packed, without the embedding.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from compute_plane.executor.packing_jobs import PackingJob, PlannedMatrix, packed_bytes
from compute_plane.executor.weight_formats import (
    Conversion,
    describe_formats,
    format_to_run,
    input_order_of,
    measure_conversions,
)
from compute_plane.memory.huge_pages import huge_page_array
from compute_plane.memory.sizing import available_memory_bytes, check_weights_fit
from compute_plane.model import layout
from compute_plane.model.errors import printable
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import (
    ALL_ROWS,
    IntArray,
    RawTensor,
    TensorFormat,
    TensorSource,
)

UInt8Array = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]

ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A packed matrix of `n` columns of a product (rows of the file) and `k` inputs.

    `format`: label of the format it runs in (`kernels.cpu.float_packing`, `int8_packing`).
    `first_column`: the product's column at which its columns begin, 0 unless it is one of several.
    `input_order`: int32 [k], input j of the matrix is element input_order[j] of a row; None if they
    are in the model's order.
    """

    format: str
    n: int
    k: int
    address: int
    num_bytes: int
    first_column: int = 0
    input_order: Int32Array | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One decoder layer; `attn_norm`, `mlp_norm`: addresses of float32 [hidden].

    `qkv`: columns q, k, v; `gate_up`: columns gate, up. One matrix, or several where formats or
    orders of inputs differ. `down` has no order of its own: what gate and up give is in it.
    `qkv_bias`: address of float32 [(H + 2·G)·D]; `head_norms`: of two float32 [D], for query and
    for key heads. None where the architecture has none.
    """

    attn_norm: int
    qkv: tuple[PackedMatrix, ...]
    o: PackedMatrix
    mlp_norm: int
    gate_up: tuple[PackedMatrix, ...]
    down: PackedMatrix
    qkv_bias: int | None = None
    head_norms: tuple[int, int] | None = None

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """All matrices of the layer."""
        return (*self.qkv, self.o, *self.gate_up, self.down)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """The weights of a model, or of its last layers and all behind them.

    `memory`: the region all addresses lie in; they are good as long as it lives. `embedding`: None
    where the layers before these run elsewhere. `final_norm`: address of float32 [hidden].
    `lm_head` is `embedding` if the embeddings are tied and it is there. `elements`: (stored,
    runs as) to the number of weights. `conversions`: of the matrices that do not run in their
    file's format.
    """

    memory: UInt8Array
    embedding: PackedMatrix | None
    layers: tuple[PackedLayer, ...]
    final_norm: int
    lm_head: PackedMatrix
    elements: Counter[tuple[TensorFormat, TensorFormat]]
    conversions: tuple[Conversion, ...]

    @property
    def weight_format(self) -> str:
        """What the matrices are stored and run as, for people."""
        return describe_formats(self.elements)

    @property
    def num_bytes(self) -> int:
        """Bytes of the region."""
        return self.memory.nbytes


def pack_weights(
    spec: ModelSpec,
    source: TensorSource,
    dtype: str = "auto",
    *,
    num_threads: int = 2,
    first_layer: int = 0,
) -> PackedWeights:
    """Pack every tensor of a model, `num_threads` at a time, and give its file's pages back.

    `dtype`: auto, float32 or bfloat16 (`weight_formats`). `first_layer`: if not 0, embedding and
    layers before this one run elsewhere and are left out. Raises ModelFileError if a weight is not
    finite or does not fit its format, ConfigError for an unknown dtype, the family's MemoryError if
    there is no memory.
    """
    plan = _Plan(dtype)
    embedding = None if first_layer else plan.matrix([source.tensor(layout.EMBEDDING)])
    layers = [
        _plan_layer(plan, spec, source, layer) for layer in range(first_layer, spec.num_layers)
    ]
    final_norm = plan.vector(source.tensor(layout.FINAL_NORM))
    lm_head = embedding if spec.tie_embeddings else None
    if lm_head is None:
        name = layout.EMBEDDING if spec.tie_embeddings else layout.LM_HEAD
        lm_head = plan.matrix([source.tensor(name)])

    check_weights_fit(plan.num_bytes, available_memory_bytes())
    memory = huge_page_array(plan.num_bytes, purpose=f"the weights of {printable(spec.name)}")
    jobs = sorted(plan.jobs(memory), key=lambda job: -job.num_bytes)
    # NumPy lets go of the interpreter lock inside its loops, so threads pack side by side.
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        for _ in pool.map(PackingJob.run, jobs):
            pass
        conversions = measure_conversions(plan.converted(), pool)
    source.forget_pages()
    if spec.logits_scale != 1:
        end = final_norm + 4 * spec.hidden_size
        memory[final_norm:end].view(np.float32)[:] *= np.float32(spec.logits_scale)

    base = memory.ctypes.data

    def placed(matrix: PackedMatrix) -> PackedMatrix:
        return replace(matrix, address=base + matrix.address)

    def moved(norms: tuple[int, int] | None) -> tuple[int, int] | None:
        return None if norms is None else (base + norms[0], base + norms[1])

    packed_head = placed(lm_head)
    packed_embedding = None if embedding is None else placed(embedding)
    if embedding is lm_head:
        packed_embedding = packed_head
    return PackedWeights(
        memory=memory,
        embedding=packed_embedding,
        layers=tuple(
            PackedLayer(
                attn_norm=base + layer.attn_norm,
                qkv=tuple(map(placed, layer.qkv)),
                o=placed(layer.o),
                mlp_norm=base + layer.mlp_norm,
                gate_up=tuple(map(placed, layer.gate_up)),
                down=placed(layer.down),
                qkv_bias=None if layer.qkv_bias is None else base + layer.qkv_bias,
                head_norms=moved(layer.head_norms),
            )
            for layer in layers
        ),
        final_norm=base + final_norm,
        lm_head=packed_head,
        elements=plan.elements,
        conversions=conversions,
    )


def _plan_layer(plan: _Plan, spec: ModelSpec, source: TensorSource, layer: int) -> PackedLayer:
    """Plan one layer; addresses are offsets yet."""

    def tensor(role: str) -> RawTensor:
        return source.tensor(layout.layer_tensor(layer, role))

    down, gate_up = tensor(layout.DOWN), [tensor(r) for r in (layout.GATE, layout.UP)]
    biases = layout.qkv_biases(spec, layer)
    norms = [source.tensor(name) for name in layout.head_norms(spec, layer)]
    order = plan.input_order(down)
    if order is not None:
        down = replace(down, input_order=None)
    return PackedLayer(
        attn_norm=plan.vector(tensor(layout.ATTN_NORM)),
        qkv=plan.fused([tensor(r) for r in (layout.QUERY, layout.KEY, layout.VALUE)]),
        o=plan.matrix([tensor(layout.OUTPUT)]),
        mlp_norm=plan.vector(tensor(layout.MLP_NORM)),
        gate_up=plan.fused(gate_up, order),
        down=plan.matrix([down]),
        qkv_bias=plan.vector(*map(source.tensor, biases)) if biases else None,
        head_norms=(plan.vector(norms[0]), plan.vector(norms[1])) if norms else None,
    )


class _Plan:
    """Where every tensor goes; made before the memory is."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._vectors: list[tuple[RawTensor, int]] = []
        self._matrices: list[tuple[PlannedMatrix, PackedMatrix]] = []
        self.elements: Counter[tuple[TensorFormat, TensorFormat]] = Counter()
        self.num_bytes = 0

    def vector(self, *tensors: RawTensor) -> int:
        """Take a place for a vector of float32, of all `tensors`, and return its offset."""
        start = at = self._take(4 * sum(tensor.num_elements for tensor in tensors))
        for tensor in tensors:
            self._vectors.append((tensor, at))
            at += 4 * tensor.num_elements
        return start

    def matrix(
        self, tensors: Sequence[RawTensor], first_column: int = 0, row_order: IntArray | None = None
    ) -> PackedMatrix:
        """Take a place for a matrix of the rows of all `tensors`, which run in one way.

        `row_order`: the order in which the rows of each are packed; None: the model's.
        """
        target = format_to_run(tensors[0], self._dtype)
        n, k = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        size = packed_bytes(target, n, k)
        order = self.input_order(tensors[0])
        matrix = PackedMatrix(
            target.label, n, k, self._take(size), size, first_column,
            None if order is None else order.astype(np.int32),
        )  # fmt: skip
        self._matrices.append((PlannedMatrix(tensors, target, row_order), matrix))
        for tensor in tensors:
            self.elements[tensor.format, target] += tensor.num_elements
        return matrix

    def fused(
        self, tensors: Sequence[RawTensor], row_order: IntArray | None = None
    ) -> tuple[PackedMatrix, ...]:
        """Take places for matrices with the same input: one for each run that is read alike."""
        matrices: list[PackedMatrix] = []
        column = 0

        def way_of(tensor: RawTensor) -> tuple[TensorFormat, bytes | None]:
            order = self.input_order(tensor)
            target = format_to_run(tensor, self._dtype)
            return target, None if order is None else order.tobytes()

        for _, run in itertools.groupby(tensors, way_of):
            matrices.append(self.matrix(list(run), column, row_order))
            column += matrices[-1].n
        return tuple(matrices)

    def input_order(self, tensor: RawTensor) -> IntArray | None:
        """Return the order in which a matrix, as it runs, wants its inputs; None: the model's."""
        return input_order_of(tensor, format_to_run(tensor, self._dtype))

    def jobs(self, memory: UInt8Array) -> list[PackingJob]:
        """Return what is to be done, in pieces that threads can share."""
        jobs = []
        for tensor, start in self._vectors:
            out = memory[start : start + 4 * tensor.num_elements]
            jobs.append(PackingJob([tensor], TensorFormat.F32, out, ALL_ROWS, is_vector=True))
        for planned, matrix in self._matrices:
            jobs += planned.jobs(memory[matrix.address : matrix.address + matrix.num_bytes])
        return jobs

    def converted(self) -> list[tuple[RawTensor, TensorFormat]]:
        """Return the tensors that run in another format than their file's, with that format."""
        return [
            (tensor, planned.target)
            for planned, _ in self._matrices
            for tensor in planned.tensors
            if tensor.format is not planned.target
        ]

    def _take(self, num_bytes: int) -> int:
        start = self.num_bytes
        self.num_bytes = -(-(start + num_bytes) // ALIGNMENT) * ALIGNMENT
        return start
