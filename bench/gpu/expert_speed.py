"""How fast few tokens go through mixtures of experts, beside what their experts' weights take.

A layer's mixture is what a decode step has of it: norm, what all tokens share, router, choosing,
the products, adding up.
There are as many layers as make a gigabyte of weights, and a graph goes through all of them once,
one behind the other as in a model. Bytes are those of the experts that the tokens went through, and
of what they share, so what routing costs beside reading shows as a rate that is lower.

    torch    the same layers with torch's products of groups, where it has them

Kernels begin early, as in a step (ADR 0031), and must give the bits that they give one after the
other: `step_ways.LATE` says how those are launched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from bench.gpu.device import as_graph
from bench.gpu.matmul_bandwidth import REPEATS, WORKING_SET_BYTES, draw_packed, with_rate
from compute_plane.model.spec import Mixture, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.gpu.decode_bandwidth import Timer
    from compute_plane.cuda.expert_products import ExpertProducts
    from compute_plane.cuda.experts import (
        DeviceExperts,
        ExpertBiases,
        SharedExperts,
        StackedMatrix,
    )
    from compute_plane.cuda.kernel_operations import KernelOperations
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.cuda.matrices import Matrix

Tensor: TypeAlias = Any  # torch.Tensor; torch is imported where a device is known to be there
EPS: Final = 1e-5
ROUNDS: Final = 50
"""So often a graph is compared with the same launches in turn: a layer may be all that it has."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """`num_tokens` through a mixture; `weights`: the label of a format, None: dense bfloat16.

    `architecture`: with its gate, and biases if it has them.
    """

    num_tokens: int
    mixture: Mixture
    hidden_size: int
    inner_size: int
    weights: str | None = None
    architecture: str = "qwen3moe"

    @property
    def name(self) -> str:
        """Tokens, experts, sizes, format."""
        mixture = self.mixture
        beside = f" beside {mixture.shared_size}" if mixture.shared_size else ""
        return (
            f"{self.num_tokens} × {self.hidden_size} × {self.inner_size}{beside}, "
            f"{mixture.experts_per_token} of {mixture.num_experts} experts, "
            f"{self.weights or 'bfloat16'}"
        )

    def spec(self) -> ModelSpec:
        """Return a model that has such layers."""
        return ModelSpec(
            name=self.name, architecture=self.architecture, vocab_size=32, num_layers=1,
            num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=self.hidden_size,
            intermediate_size=self.inner_size, context_length=64, rope_theta=1e4,
            rope_scaling=None, rms_norm_eps=EPS, tie_embeddings=True, num_parameters=0,
            weight_format=self.weights or "BF16", mixture=self.mixture,
        )  # fmt: skip

    def operations(self, launcher: Launcher) -> KernelOperations:
        """Return the kernels of that model."""
        from compute_plane.cuda.experts import ExpertUses
        from compute_plane.cuda.kernel_operations import KernelOperations
        from compute_plane.cuda.weight_plan import QuantizedUses

        labels = frozenset() if self.weights is None else frozenset({self.weights})
        uses, shared = ExpertUses(labels, labels, has_dense=self.weights is None), QuantizedUses()
        if self.mixture.shared_size:
            num_outputs = max(2 * self.mixture.shared_size, self.hidden_size)
            shared = QuantizedUses(labels, gates=labels, num_outputs=num_outputs)
        return KernelOperations(launcher, self.spec(), "bfloat16", 16, shared, experts=uses)


QWEN3_30B: Final = (Mixture(128, 8), 2048, 768)
GPT_OSS_20B: Final = (Mixture(32, 4), 2880, 2880)
MIXTRAL: Final = (Mixture(8, 2), 4096, 14336)
ERNIE_21B: Final = (Mixture(64, 6, corrects_choice=True, shared_size=3072), 2560, 1536)
GLM_AIR: Final = (Mixture(128, 8, True, "sigmoid", 1.0, True, shared_size=1408), 4096, 1408)
SHAPES: Final = (
    *(
        ExpertShape(num_tokens, *sizes, weights)
        for sizes in (QWEN3_30B, MIXTRAL)
        for weights in (None, "Q4_1")
        for num_tokens in (1, 8, 32)
    ),
    *(ExpertShape(num_tokens, *QWEN3_30B, "FP8_G128") for num_tokens in (1, 8, 32)),
    *(ExpertShape(num_tokens, *GPT_OSS_20B, "MXFP4", "gpt-oss") for num_tokens in (1, 8, 32)),
    *(ExpertShape(num_tokens, *ERNIE_21B, None, "ernie4_5-moe") for num_tokens in (1, 8)),
    *(ExpertShape(num_tokens, *GLM_AIR, "Q4_1", "glm4moe") for num_tokens in (1, 8)),
)


def measure_experts(
    shape: ExpertShape,
    launcher: Launcher,
    timer: Timer,
    *,
    late: Launcher,
    device: str = "cuda",
    has_rivals: bool = True,
) -> dict[str, Any]:
    """Measure one shape; return times and rates, and torch's where its products do not wait.

    `late`: another launcher, for launches in turn only. Without `has_rivals` torch's are measured
    only where a step makes them.
    """
    problem = Problem(shape, launcher, device)
    takes = problem.operations.experts.takes(shape.num_tokens, problem.layers[0])

    def measured(visit: Callable[[], None]) -> dict[str, Any]:
        figures = with_rate(timer(visit, REPEATS), problem.bytes_moved, len(problem.layers))
        figures["microseconds_per_layer"] = figures.pop("microseconds_per_product")
        return figures

    result: dict[str, Any] = {
        "shape": shape.name,
        "layers": len(problem.layers),
        "experts_with_rows": problem.experts_with_rows,
        "faults": [],
        "rivals": {},
    }
    if takes:
        visit = as_graph(problem.visit, device)
        result |= measured(visit)
        result["faults"] = problem.faults(visit, late)
    if problem.torch_waits_for_nothing() and (has_rivals or not takes):
        problem.leave_it_to_torch()
        figures = measured(as_graph(problem.visit, device))
        if takes:
            result["rivals"]["torch"] = figures
        else:  # which is what a step does
            result |= figures
    return result


class Problem:
    """The tensors of one shape: tokens, and layers of experts."""

    def __init__(self, shape: ExpertShape, launcher: Launcher, device: str) -> None:
        import torch

        self.shape = shape
        self._launcher = launcher
        self.operations = shape.operations(launcher)
        self._products = self._products_by(self.operations)
        self._device = torch.device(device)
        size = shape.num_tokens, shape.hidden_size
        self._tokens: Tensor = torch.randn(size, dtype=torch.bfloat16, device=device)
        self._norm: Tensor = torch.ones(shape.hidden_size, dtype=torch.bfloat16, device=device)
        self._out: Tensor = self._tokens
        first = self._draw_layer()
        self.expert_bytes = sum(stack.values[0].nbytes for stack in first.stacks)
        self.shared_bytes = _shared_bytes(first)
        layer_bytes = self.expert_bytes * shape.mixture.num_experts + self.shared_bytes
        more = max(1, math.ceil(WORKING_SET_BYTES / layer_bytes)) - 1
        self.layers: list[DeviceExperts] = [first, *(self._draw_layer() for _ in range(more))]
        self.experts_with_rows = sum(map(self._experts_with_rows, self.layers))
        of_experts = self.experts_with_rows * self.expert_bytes
        self.bytes_moved = of_experts + len(self.layers) * self.shared_bytes

    def visit(self) -> None:
        """Queue all layers once."""
        self._out = self._through(self._products)

    def faults(self, visit: Callable[[], None], late: Launcher) -> list[str]:
        """Say what is wrong with what a visit gives, beside the same launches in turn by `late`."""
        import torch

        from bench.gpu.step_ways import LATE

        with LATE.taken():
            products = self._products_by(self.shape.operations(late))
            in_turn = self._through(products).view(torch.int16)
        wrong = 0
        for _ in range(ROUNDS):
            visit()
            wrong += (self._out.view(torch.int16) != in_turn).any()  # the host does not wait
        faults = [] if self._out.isfinite().all() else ["what the experts gave is not finite"]
        if wrong:
            faults.append(
                f"{int(wrong)} of {ROUNDS} runs of launches that begin early gave other bits than "
                "launches in turn"
            )
        return faults

    def torch_waits_for_nothing(self) -> bool:
        """Whether torch's products could be captured."""
        import torch

        from compute_plane.cuda.expert_products import has_grouped_products

        is_dense = self.shape.weights is None
        return is_dense and has_grouped_products(self._device, torch.bfloat16)

    def leave_it_to_torch(self) -> None:
        """Have the products made without our kernels from now on."""
        from compute_plane.cuda.expert_kernels import ExpertKernels

        # Of no stacks there are no kernels.
        self.operations.experts = ExpertKernels(self._launcher, self.shape.spec(), "bfloat16")

    def _products_by(self, operations: KernelOperations) -> ExpertProducts:
        from compute_plane.cuda.expert_products import ExpertProducts
        from compute_plane.cuda.layer_products import LayerProducts

        return ExpertProducts(operations, LayerProducts(operations, EPS), self.shape.mixture)

    def _through(self, products: ExpertProducts) -> Tensor:
        """Return what the tokens are behind all layers, [T, hidden]."""
        from compute_plane.cuda.layer_products import Hidden

        hidden = Hidden(self._tokens.clone())
        for layer in self.layers:
            products.add(hidden, self._norm, layer)
            if hidden.added is not None:  # as the next layer's norm does
                hidden.residual, hidden.added = hidden.residual + hidden.added, None
        return hidden.residual

    def _experts_with_rows(self, layer: DeviceExperts) -> int:
        """Return through how many experts of a layer the tokens go, as they are at first."""
        from compute_plane.cuda.expert_products import choose, router_logits

        logits = router_logits(self._tokens, layer.router, layer.biases)
        chosen, _ = choose(logits, self.shape.mixture, layer.correction)
        return len(chosen.unique())

    def _draw_layer(self) -> DeviceExperts:
        import torch

        from compute_plane.cuda.experts import DeviceExperts, ExpertMatrices

        shape, device = self.shape, self._device
        size = shape.mixture.num_experts, shape.hidden_size
        router = torch.randn(size, device=device).div_(math.sqrt(shape.hidden_size))
        gate_up = self._draw_stack(2 * shape.inner_size, shape.hidden_size, in_turns=True)
        down = self._draw_stack(shape.hidden_size, shape.inner_size)
        return DeviceExperts(
            router,
            ExpertMatrices.stacked([gate_up]),
            ExpertMatrices.stacked([down]),
            self._draw_biases(),
            self._draw_correction(),
            self._draw_shared(),
        )

    def _draw_correction(self) -> Tensor | None:
        import torch

        mixture = self.shape.mixture
        if not mixture.corrects_choice:
            return None
        spread = 1 / mixture.num_experts if mixture.scores == "softmax" else 0.1
        return torch.randn(mixture.num_experts, device=self._device).mul_(spread)

    def _draw_shared(self) -> SharedExperts | None:
        from compute_plane.cuda.experts import SharedExperts
        from compute_plane.cuda.matrices import Projection

        shape, size = self.shape, self.shape.mixture.shared_size
        if not size:
            return None
        gate_up = self._draw_matrix(2 * size, shape.hidden_size, in_turns=True)
        down = self._draw_matrix(shape.hidden_size, size)
        return SharedExperts(Projection((gate_up,)), Projection((down,)))

    def _draw_biases(self) -> ExpertBiases | None:
        import torch

        from compute_plane.cuda.experts import ExpertBiases

        shape = self.shape
        if not shape.spec().has_all_biases:
            return None
        widths = 2 * shape.inner_size, shape.hidden_size
        gate_up, down = (
            torch.randn(
                (shape.mixture.num_experts, width), dtype=torch.bfloat16, device=self._device
            )
            for width in widths
        )
        return ExpertBiases(torch.randn(len(gate_up), device=self._device), (gate_up,), down)

    def _draw_stack(
        self, num_outputs: int, num_inputs: int, *, in_turns: bool = False
    ) -> StackedMatrix:
        from compute_plane.cuda.experts import StackedMatrix

        num_experts = self.shape.mixture.num_experts
        matrix = self._draw_matrix(num_experts * num_outputs, num_inputs, in_turns=in_turns)
        return StackedMatrix.of(matrix, num_experts)

    def _draw_matrix(self, num_rows: int, num_inputs: int, *, in_turns: bool = False) -> Matrix:
        import torch

        from compute_plane.cuda.matrices import DenseMatrix, QuantizedMatrix

        weights = self.shape.weights
        if weights is None:
            values = torch.empty(num_rows, num_inputs, dtype=torch.bfloat16, device=self._device)
            return DenseMatrix(values.normal_(std=1 / math.sqrt(num_inputs)))
        packed = draw_packed(weights, num_rows, num_inputs, self._device)
        return QuantizedMatrix(weights, packed, num_rows, num_inputs, in_turns=in_turns)


def _shared_bytes(layer: DeviceExperts) -> int:
    """Return the bytes of what all tokens of a layer read."""
    shared = layer.shared
    if shared is None:
        return 0
    return shared.gate_up.num_bytes + shared.down.num_bytes
