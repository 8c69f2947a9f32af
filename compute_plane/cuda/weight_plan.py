"""Which format each matrix of a model runs in on the device, and how it comes there.

    file                     --dtype auto                  float32, bfloat16, float16
    F32, F16, BF16           the dtype of the step         the dtype of the step
    Q8_0, Q4_0, Q4_1         as they are                        "
    Q5_0, Q5_1                  "                               "
    Q4_K, Q5_K, Q6_K            "                               "
    MXFP4, FP8                  "                               "
    Q3_K                     Q6_K                               "
    Q2_K, IQ4_NL, IQ4_XS     Q8_0                               "
    INT4, INT8               Q4_0, Q8_0                         "
    UINT4, UINT8             Q4_Z, Q8_Z                         "

So it is on the CPU engine (`compute_plane.executor.weight_formats`, ADR 0008), but that there MXFP4
has float16 scales and FP8 runs as Q8_0; that a step on the device has one dtype, and matrices that
are not quantised have it too; that zero points stay what they are; and that a matrix whose columns
are sorted stays quantised, for its rows are sorted likewise (`matrices.project`), those of `down`
before any step: gate and up have their outputs in its order. Scales are kept once for the largest
span there is a layout for (`kernels.cuda.quantized_formats`) that the file's groups fill. A plan is
made from the files' headers, so that what does not fit is refused before any weight is read; then
each matrix goes from the file to the device by itself, and the host never holds the whole model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch

from compute_plane.cuda.experts import ExpertUses
from compute_plane.cuda.planned_feedforward import PlannedExperts, plan_feedforward
from compute_plane.cuda.planned_layer import PlannedLayer
from compute_plane.cuda.planned_layer_inputs import (
    PlannedLayerInputs,
    plan_layer_input,
    plan_layer_inputs,
)
from compute_plane.cuda.planned_matrix import (
    DENSE_FORMATS,
    PlannedMatrix,
    projection_of,
    values_of,
)
from compute_plane.cuda.planned_mixers import plan_mixer
from compute_plane.cuda.planned_recurrences import plan_recurrence
from compute_plane.cuda.weights import DTYPES, DeviceWeights
from compute_plane.executor.weight_formats import (
    AUTO,
    OWN_FORMAT,
    Conversion,
    describe_formats,
    measure_conversions,
)
from compute_plane.model import layout
from compute_plane.model.layer_scale import layer_scale
from compute_plane.model.tensor import IntArray, RawTensor, TensorFormat
from kernels.cuda.quantized_formats import FORMATS

if TYPE_CHECKING:
    from compute_plane.cuda.planned_adapters import PlannedAdapters
    from compute_plane.model.spec import ModelSpec
    from compute_plane.model.tensor import TensorSource

RUNS_AS: Final[Mapping[TensorFormat, TensorFormat]] = {
    **OWN_FORMAT,
    TensorFormat.IQ4_NL: TensorFormat.Q8_0,
    TensorFormat.IQ4_XS: TensorFormat.Q8_0,
    TensorFormat.MXFP4: TensorFormat.MXFP4,
    TensorFormat.FP8: TensorFormat.FP8,
    TensorFormat.UINT4: TensorFormat.Q4_Z,
    TensorFormat.UINT8: TensorFormat.Q8_Z,
}
"""What `auto` runs a file's format as, before it is asked whether there is a kernel."""


@dataclass(frozen=True, slots=True)
class QuantizedUses:
    """What quantised matrices there are: what kernels for them must be ready.

    `layers`, `lm_head`, `embedding`: labels of formats, by where they occur; `gates`: of those of
    layers that have a gate and what it gates in turns, mixtures' too; `biased`: of those that one
    bias is added to, mixtures' not. `num_outputs`, `num_weights`: of the largest matrix that rows
    are multiplied with.
    """

    layers: frozenset[str] = frozenset()
    lm_head: frozenset[str] = frozenset()
    embedding: frozenset[str] = frozenset()
    gates: frozenset[str] = frozenset()
    biased: frozenset[str] = frozenset()
    num_outputs: int = 0
    num_weights: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class WeightPlan:
    """In which format each matrix of a model will run, and where it is read.

    `dtype`: of a step, by name. `lm_head` is `embedding` where they are tied. `adapters`: what will
    lie beside them (`planned_adapters`).
    """

    source: TensorSource
    dtype: str
    embedding: PlannedMatrix
    layers: tuple[PlannedLayer, ...]
    final_norm: PlannedMatrix
    lm_head: PlannedMatrix
    layer_inputs: PlannedLayerInputs | None = None
    adapters: PlannedAdapters | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        of_adapters = 0 if self.adapters is None else self.adapters.num_bytes
        return of_adapters + sum(planned.num_bytes for planned in self._everything())

    @property
    def layer_inputs_bytes(self) -> int:
        """Bytes of what the inputs of layers are made of."""
        inputs = self.layer_inputs
        return 0 if inputs is None else sum(planned.num_bytes for planned in inputs.everything)

    @property
    def is_quantised(self) -> bool:
        """Whether any matrix stays quantised."""
        return any(planned.is_quantised for planned in self._everything())

    @property
    def has_dense(self) -> bool:
        """Whether any matrix that rows are multiplied with is not quantised."""
        return not all(planned.is_quantised for planned in self._multiplied())

    @property
    def weight_format(self) -> str:
        """What the matrices are stored and run as: "Q4_1", or "Q4_K, F32 as BF16"."""
        return describe_formats(self.elements)

    @property
    def elements(self) -> Counter[tuple[TensorFormat, TensorFormat]]:
        """(stored, runs as) to the number of weights."""
        elements: Counter[tuple[TensorFormat, TensorFormat]] = Counter()
        for tensor, target in self._matrices():
            elements[tensor.format, target] += tensor.num_elements
        return elements

    @property
    def quantized(self) -> QuantizedUses:
        """What quantised matrices there are."""
        multiplied, inputs = self._multiplied(), self.layer_inputs
        sizes = [
            (part.num_outputs // part.num_stacked, part.num_inputs)
            for part in multiplied
            if part.is_quantised
        ]
        return QuantizedUses(
            layers=_formats(*multiplied[1:]),
            lm_head=_formats(self.lm_head),
            embedding=_formats(self.embedding, *([] if inputs is None else [inputs.embedding])),
            gates=_formats(*(part for part in multiplied if part.in_turns)),
            biased=_formats(
                *(
                    part
                    for layer in self.layers
                    if layer.mixer is not None and layer.mixer.o_bias is not None
                    for part in layer.mixer.o
                )
            ),
            num_outputs=max((n for n, _ in sizes), default=0),
            num_weights=max((n * k for n, k in sizes), default=0),
        )

    @property
    def experts(self) -> ExpertUses:
        """How the experts of mixtures lie."""
        stacks = [
            matrix
            for layer in self.layers
            if isinstance(layer.feedforward, PlannedExperts) and layer.feedforward.is_stacked
            for matrix in layer.feedforward.of_experts
        ]
        return ExpertUses(
            _formats(*stacks),
            _formats(*(stack for stack in stacks if stack.in_turns)),
            has_dense=not all(stack.is_quantised for stack in stacks),
        )

    def place(self, device: torch.device, num_threads: int = 2) -> DeviceWeights:
        """Copy everything to a device, so many matrices at a time; give the file's pages back.

        All of it is there when this returns, for whatever stream. Raises ModelFileError if a weight
        is not finite or too large for its format, an adapter's too.
        """
        everything = self._everything()
        # NumPy lets go of the interpreter lock inside its loops, so threads pack side by side.
        with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
            matrices = pool.map(lambda planned: planned.place(device), everything)
            placed = dict(zip(everything, matrices, strict=True))
            converted = [pair for pair in self._matrices() if pair[0].format is not pair[1]]
            conversions = self._with_bytes(measure_conversions(converted, pool))
        self.source.forget_pages()

        layers = tuple(layer.at(placed.__getitem__) for layer in self.layers)
        weights = DeviceWeights(
            dtype=DTYPES[self.dtype],
            embedding=placed[self.embedding],
            layers=layers,
            final_norm=values_of(placed[self.final_norm]).view(-1),
            lm_head=projection_of(placed.__getitem__, (self.lm_head,)),
            num_bytes=self.num_bytes,
            conversions=conversions,
            layer_inputs=None
            if self.layer_inputs is None
            else self.layer_inputs.at(placed.__getitem__),
            adapters=None if self.adapters is None else self.adapters.at(layers, device),
        )
        if device.type == "cuda":  # biases of experts, for one, have been put in order there
            torch.cuda.synchronize(device)
        return weights

    def _with_bytes(self, conversions: tuple[Conversion, ...]) -> tuple[Conversion, ...]:
        """Return conversions with the bytes that the matrices take as they are laid out here."""
        num_bytes: Counter[tuple[str, str]] = Counter()
        for planned in self._everything():
            num_elements = planned.num_outputs * planned.num_inputs
            for tensor in planned.tensors:
                if len(tensor.shape) == 1:  # a norm's weights: no matrix, and not in `conversions`
                    continue
                key = tensor.format.label, planned.target.label
                num_bytes[key] += planned.num_bytes * tensor.num_elements // num_elements
        return tuple(
            replace(one, num_bytes=num_bytes[one.stored, one.runs_as]) for one in conversions
        )

    def _everything(self) -> list[PlannedMatrix]:
        """Return all that is to be placed, what is tied once."""
        everything = [self.embedding, self.final_norm, self.lm_head]
        everything += [] if self.layer_inputs is None else self.layer_inputs.everything
        for layer in self.layers:
            everything += [*layer.vectors, *layer.matrices]
        return list(dict.fromkeys(everything))

    def _multiplied(self) -> list[PlannedMatrix]:
        """Return what rows are multiplied with, the head first."""
        of_inputs = () if self.layer_inputs is None else self.layer_inputs.projection
        of_layers = (part for layer in self.layers for part in layer.matrices)
        return [self.lm_head, *of_inputs, *of_layers]

    def _matrices(self) -> list[tuple[RawTensor, TensorFormat]]:
        """Return the tensors that are matrices, each with the format it runs in."""
        return [
            (tensor, planned.target)
            for planned in self._everything()
            for tensor in planned.tensors
            if len(tensor.shape) > 1
        ]


def plan_weights(
    spec: ModelSpec, source: TensorSource, dtype: str, configured: str = AUTO
) -> WeightPlan:
    """Plan the weights of a model's layers, of which `spec` may have fewer than `source`.

    `dtype`: of a step, by name. `configured`: what `--dtype` says, `auto` or that name.
    """

    def format_of(tensor: RawTensor) -> TensorFormat:
        own = RUNS_AS[tensor.format]
        return own if configured == AUTO and own.label in FORMATS else DENSE_FORMATS[dtype]

    def vector(*names: str, target: TensorFormat = DENSE_FORMATS[dtype]) -> PlannedMatrix:
        return PlannedMatrix(tuple(map(source.tensor, names)), target)

    def norm(name: str) -> PlannedMatrix:
        target = TensorFormat.F32 if spec.norms_need_float32 else DENSE_FORMATS[dtype]
        return PlannedMatrix((source.tensor(name),), target)

    def pair_of_norms(names: list[str]) -> tuple[PlannedMatrix, PlannedMatrix] | None:
        return (norm(names[0]), norm(names[1])) if names else None

    def kind_of(tensor: RawTensor) -> tuple[TensorFormat, bytes | None]:
        target, order = format_of(tensor), tensor.input_order
        return target, order.tobytes() if order is not None and target.label in FORMATS else None

    def joined(*tensors: RawTensor, row_order: IntArray | None = None) -> tuple[PlannedMatrix, ...]:
        runs = groupby(tensors, kind_of)
        return tuple(PlannedMatrix(tuple(run), target, row_order) for (target, _), run in runs)

    def layer(index: int) -> PlannedLayer:
        def name(role: str) -> str:
            return layout.layer_tensor(index, role)

        input_norms = {
            role: norm(name(role))
            for role in (layout.ATTN_NORM, layout.MLP_NORM)
            if name(role) in layout.input_norms(spec, index)
        }
        mixer = beside = None
        if spec.has_mixer(index):
            mixer = plan_mixer(spec, source, index, joined, vector, norm)
        recurrence = spec.recurrence_of(index)
        if recurrence is not None and spec.attends(index):
            beside = plan_recurrence(recurrence, source, index, joined, vector)
        return PlannedLayer(
            attn_norm=input_norms.get(layout.ATTN_NORM),
            mixer=mixer,
            mlp_norm=input_norms.get(layout.MLP_NORM),
            feedforward=plan_feedforward(spec, source, index, format_of, joined, vector),
            output_norms=pair_of_norms(layout.output_norms(spec, index)),
            layer_input=plan_layer_input(spec, source, index, joined, norm),
            scale=layer_scale(spec, source, index),
            beside=beside,
        )

    (embedding,) = joined(source.tensor(layout.EMBEDDING))
    lm_head = embedding
    if not spec.tie_embeddings:
        (lm_head,) = joined(source.tensor(layout.LM_HEAD))
    return WeightPlan(
        source=source,
        dtype=dtype,
        embedding=embedding,
        layers=tuple(layer(index) for index in range(spec.num_layers)),
        final_norm=norm(layout.FINAL_NORM),
        lm_head=lm_head,
        layer_inputs=plan_layer_inputs(spec, source, joined, norm),
    )


def _formats(*planned: PlannedMatrix) -> frozenset[str]:
    return frozenset(part.label for part in planned if part.is_quantised)
