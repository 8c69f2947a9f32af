"""What packed weights are: matrices and vectors by their addresses, layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from compute_plane.cpu.packed_latents import PackedLatents
from compute_plane.cpu.packed_recurrences import PackedRecurrence
from compute_plane.executor.weight_formats import Conversion, describe_formats
from compute_plane.model.tensor import TensorFormat

UInt8Array = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]


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

    def moved(self, by: int) -> PackedMatrix:
        """Return it so many bytes further on."""
        return replace(self, address=self.address + by)


class MatrixPart(NamedTuple):
    """A tensor that is part of a packed matrix: its `n` columns of it from `column` on.

    `format`: that of the matrix, by its label.
    """

    name: str
    format: str
    column: int
    n: int


@dataclass(frozen=True, slots=True)
class PackedMlp:
    """`gate_up`: columns gate, up. One matrix, or several where formats or orders of inputs differ.

    Of models without gates up alone. `down` has no order of its own: what these give is in it.
    """

    gate_up: tuple[PackedMatrix, ...]
    down: PackedMatrix

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """All matrices."""
        return (*self.gate_up, self.down)

    def moved(self, by: int) -> PackedMlp:
        """Return it so many bytes further on."""
        return PackedMlp(tuple(part.moved(by) for part in self.gate_up), self.down.moved(by))


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """Addresses of a mixture's biases, float32: [E], [E, 2·I] (gate, up) and [E, hidden]."""

    router: int
    gate_up: int
    down: int

    def moved(self, by: int) -> ExpertBiases:
        """Return them so many bytes further on."""
        return ExpertBiases(self.router + by, self.gate_up + by, self.down + by)


@dataclass(frozen=True, slots=True)
class PackedShared:
    """What all tokens go through beside their experts: `mlp`. `gate`: [1, hidden], or None."""

    mlp: PackedMlp
    gate: PackedMatrix | None = None

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """All matrices."""
        return self.mlp.matrices if self.gate is None else (*self.mlp.matrices, self.gate)

    @property
    def read(self) -> tuple[PackedMatrix, ...]:
        """The matrices that read the hidden states."""
        gates = () if self.gate is None else (self.gate,)
        return (*gates, *self.mlp.gate_up)

    def moved(self, by: int) -> PackedShared:
        """Return it so many bytes further on."""
        return PackedShared(self.mlp.moved(by), None if self.gate is None else self.gate.moved(by))


@dataclass(frozen=True, slots=True)
class PackedOwnNorms:
    """Addresses of the norms that parts of a mixture have for themselves, float32 [hidden] each.

    `router`, `experts`: of what these read. `shared_output`, `experts_output`: of what all tokens
    go through, and of what experts give. `expert_scales`: of float32 [E].
    """

    router: int
    experts: int
    shared_output: int
    experts_output: int
    expert_scales: int

    def moved(self, by: int) -> PackedOwnNorms:
        """Return them so many bytes further on."""
        return PackedOwnNorms(
            self.router + by,
            self.experts + by,
            self.shared_output + by,
            self.experts_output + by,
            self.expert_scales + by,
        )


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """A mixture of experts: `router` [E, hidden], and E packed alike, `stride_bytes` apart.

    `first`: the first expert. `biases`, `shared`, `norms`: None where the architecture has none.
    `correction`: address of float32 [E], added to scores where experts are chosen, or None.
    """

    router: PackedMatrix
    first: PackedMlp
    stride_bytes: int
    biases: ExpertBiases | None = None
    correction: int | None = None
    shared: PackedShared | None = None
    norms: PackedOwnNorms | None = None

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """The matrices, of the first expert for all of them."""
        of_all = () if self.shared is None else self.shared.matrices
        return (self.router, *self.first.matrices, *of_all)

    def moved(self, by: int) -> PackedExperts:
        """Return it so many bytes further on."""
        return PackedExperts(
            self.router.moved(by),
            self.first.moved(by),
            self.stride_bytes,
            None if self.biases is None else self.biases.moved(by),
            None if self.correction is None else self.correction + by,
            None if self.shared is None else self.shared.moved(by),
            None if self.norms is None else self.norms.moved(by),
        )


Feedforward: TypeAlias = PackedMlp | PackedExperts


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention of a layer. `o`: of what it gives.

    `qkv`: columns q, k, v, in one matrix or several, as in `PackedMlp`. `qkv_bias`: address of
    float32 [(H + 2·G)·D]; `head_norms`: of two float32 [D], for query and for key heads
    (normalised together: [H·D] and [G·D]). Where keys and values are an earlier layer's, there are
    columns q alone, and no norm of keys. `o_bias`: of float32 [hidden]; `sinks`: of float32 [H], in
    powers of 2. `gate`: [H·D, hidden], whose sigmoid multiplies what attention gives. None where
    the architecture has none.
    """

    qkv: tuple[PackedMatrix, ...]
    o: PackedMatrix
    qkv_bias: int | None = None
    head_norms: tuple[int, int | None] | None = None
    o_bias: int | None = None
    sinks: int | None = None
    gate: PackedMatrix | None = None

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """All matrices."""
        gates = () if self.gate is None else (self.gate,)
        return (*self.qkv, *gates, self.o)

    def moved(self, by: int) -> PackedAttention:
        """Return it so many bytes further on."""
        return PackedAttention(
            qkv=tuple(part.moved(by) for part in self.qkv),
            o=self.o.moved(by),
            qkv_bias=_moved(self.qkv_bias, by),
            head_norms=None
            if self.head_norms is None
            else (self.head_norms[0] + by, _moved(self.head_norms[1], by)),
            o_bias=_moved(self.o_bias, by),
            sinks=_moved(self.sinks, by),
            gate=None if self.gate is None else self.gate.moved(by),
        )


Mixer: TypeAlias = PackedAttention | PackedLatents | PackedRecurrence
"""What lets a token see those before it."""


@dataclass(frozen=True, slots=True)
class PackedLayerInput:
    """What a layer reads of a second embedding: `gate` [P, hidden], `output` [hidden, P].

    `output_norm`: address of float32 [hidden].
    """

    gate: PackedMatrix
    output: PackedMatrix
    output_norm: int

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """All matrices."""
        return (self.gate, self.output)

    def moved(self, by: int) -> PackedLayerInput:
        """Return it so many bytes further on."""
        return PackedLayerInput(self.gate.moved(by), self.output.moved(by), self.output_norm + by)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One decoder layer; `attn_norm`, `mlp_norm`: addresses of float32 [hidden].

    `output_norms`: of two float32 [hidden], for what mixer and MLP give. None where the
    architecture has none; mixer or MLP where the layer has the other alone. `scale`: what hidden
    states are multiplied by behind it. `beside`: what keeps a state, where the mixer is attention
    that reads the same.
    """

    attn_norm: int | None
    mixer: Mixer | None
    mlp_norm: int | None
    feedforward: Feedforward | None
    output_norms: tuple[int, int] | None = None
    layer_input: PackedLayerInput | None = None
    scale: float = 1.0
    beside: PackedRecurrence | None = None

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """All matrices of the layer; of experts those of the first."""
        parts = (self.mixer, self.beside, self.feedforward, self.layer_input)
        return tuple(matrix for part in parts if part is not None for matrix in part.matrices)

    def moved(self, by: int) -> PackedLayer:
        """Return it so many bytes further on."""
        return PackedLayer(
            attn_norm=_moved(self.attn_norm, by),
            mixer=None if self.mixer is None else self.mixer.moved(by),
            mlp_norm=_moved(self.mlp_norm, by),
            feedforward=None if self.feedforward is None else self.feedforward.moved(by),
            output_norms=_both_moved(self.output_norms, by),
            layer_input=None if self.layer_input is None else self.layer_input.moved(by),
            scale=self.scale,
            beside=None if self.beside is None else self.beside.moved(by),
        )


def _moved(vector: int | None, by: int) -> int | None:
    return None if vector is None else vector + by


def _both_moved(vectors: tuple[int, int] | None, by: int) -> tuple[int, int] | None:
    return None if vectors is None else (vectors[0] + by, vectors[1] + by)


@dataclass(frozen=True, slots=True)
class PackedLayerInputs:
    """What the inputs of all L layers are made of.

    `embedding`: [V, L·P]. `projection`: [L·P, hidden]. `norm`: address of float32 [P].
    """

    embedding: PackedMatrix
    projection: PackedMatrix
    norm: int

    def moved(self, by: int) -> PackedLayerInputs:
        """Return it so many bytes further on."""
        return PackedLayerInputs(
            self.embedding.moved(by), self.projection.moved(by), self.norm + by
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """The weights of a model, or of its last layers and all behind them.

    `memory`: the region all addresses lie in; they are good as long as it lives. `embedding`: None
    where the layers before these run elsewhere. `final_norm`: address of float32 [hidden], the norm
    before the head, scaled as logits are; `embedding_norm`: of the same, unscaled.
    `lm_head` is `embedding` if the embeddings are tied and it is there. `elements`: (stored,
    runs as) to the number of weights. `conversions`: of the matrices that do not run in their
    file's format. `layer_inputs`: of models that have them. `parts`: of which tensors each matrix
    is, by its address; without those whose rows or inputs are in an order of their own.
    """

    memory: UInt8Array
    embedding: PackedMatrix | None
    layers: tuple[PackedLayer, ...]
    final_norm: int
    embedding_norm: int
    lm_head: PackedMatrix
    elements: Counter[tuple[TensorFormat, TensorFormat]]
    conversions: tuple[Conversion, ...]
    layer_inputs: PackedLayerInputs | None = None
    parts: Mapping[int, Sequence[MatrixPart]] = field(default_factory=dict)

    @property
    def weight_format(self) -> str:
        """What the matrices are stored and run as, for people."""
        return describe_formats(self.elements)

    @property
    def num_bytes(self) -> int:
        """Bytes of the region."""
        return self.memory.nbytes
