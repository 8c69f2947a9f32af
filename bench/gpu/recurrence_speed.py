"""How fast tokens go through layers with states, beside what must be read and written for them.

Of a layer this is what stands between its two products: all launches of Gated DeltaNet, of a gated
convolution, of Mamba-2. Several layers, so that states have left the second cache when they are
read again, follow one another in a graph, as in a model without its products; each has states and
weights of its own, all have the same projections, which a product would have left in that cache.
Bytes are those of states, which are read and written, of projections, results and weights. What
kernels hand to each other stays in the second cache and does not count.

Launches begin early, as in a step (ADR 0031), and must give the bits that they give one after the
other, results and states: `step_ways.LATE` says how those are launched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from bench.gpu.device import as_graph
from bench.gpu.matmul_bandwidth import REPEATS, with_rate
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.short_convolution import ShortConvolution
from compute_plane.model.spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.gpu.decode_bandwidth import Timer
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.cuda.operands import LayerConvolution, LayerDeltaNet, LayerMamba2
    from compute_plane.cuda.recurrence_kernels import RecurrenceKernels
    from compute_plane.model.recurrence import Recurrence

Tensor: TypeAlias = Any  # torch.Tensor; torch is imported where a device is known to be there
FLOAT_BYTES: Final = 4
EPS: Final = 1e-6
WORKING_SET_BYTES: Final = 1 << 29
"""Of states: several times an H200's second cache."""
LAYERS: Final = (4, 128)
"""At least and at most: states of one row of convolutions are few whatever there is."""
ROUNDS: Final = 10
"""So often a graph is compared with the same launches in turn."""


@dataclass(frozen=True, slots=True)
class RecurrenceShape:
    """`num_rows` of `num_tokens` each through layers of a model. `architecture`: of those sizes."""

    model: str
    architecture: str
    sizes: Recurrence
    num_rows: int
    num_tokens: int = 1

    @property
    def name(self) -> str:
        """Model, rows and tokens of each."""
        return f"{self.model}, {self.num_rows} × {self.num_tokens} tokens"

    @property
    def num_layers(self) -> int:
        """Layers that follow one another: as many as have states for the working set.

        In a prompt states are not what is waited for.
        """
        of_layer = self.num_rows * self.sizes.state_floats * FLOAT_BYTES
        least, most = LAYERS
        if self.num_tokens > 1:
            return least
        return max(least, min(most, math.ceil(WORKING_SET_BYTES / of_layer)))

    def spec(self) -> ModelSpec:
        """Return a model that has such layers."""
        return ModelSpec(
            name=self.model, architecture=self.architecture, vocab_size=32, num_layers=1,
            num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512, intermediate_size=512,
            context_length=64, rope_theta=1e4, rope_scaling=None, rms_norm_eps=EPS,
            tie_embeddings=True, num_parameters=0, weight_format="BF16", recurrence=self.sizes,
        )  # fmt: skip

    def kernels(self, launcher: Launcher) -> RecurrenceKernels:
        """Return the kernels of such layers."""
        from compute_plane.cuda.recurrence_kernels import RecurrenceKernels

        return RecurrenceKernels(launcher, self.spec(), "bfloat16")


FIRST: Final = frozenset({0})
MODELS: Final[tuple[tuple[str, str, Recurrence], ...]] = (
    ("Qwen3.5 4B", "qwen35", DeltaNet(16, 32, 128, 128, 4, FIRST)),
    ("Granite 4 H Tiny", "granitehybrid", Mamba2(48, 64, 128, 4, 1e-5, FIRST)),
    ("Nemotron Nano 9B v2", "nemotron_h", Mamba2(128, 80, 128, 4, 1e-5, FIRST, num_groups=8)),
    ("LFM2 1.2B", "lfm2", ShortConvolution(2048, 3, FIRST)),
)
SHAPES: Final = tuple(
    RecurrenceShape(*model, *rows) for model in MODELS for rows in ((1,), (8,), (64,), (1, 2048))
)


def measure_recurrence(
    shape: RecurrenceShape,
    launcher: Launcher,
    timer: Timer,
    *,
    late: Launcher,
    device: str = "cuda",
) -> dict[str, Any]:
    """Measure one shape; return times and rates, `microseconds` of a layer.

    `late`: another launcher, for launches in turn only.
    """
    problem = Problem(shape, launcher, device)
    visit = as_graph(problem.visit, device)
    figures = with_rate(timer(visit, REPEATS), problem.bytes_moved, shape.num_layers)
    figures["microseconds"] = figures.pop("microseconds_per_product")
    tokens = shape.num_rows * shape.num_tokens
    return {
        "shape": shape.name,
        "layers": shape.num_layers,
        **figures,
        "microseconds_per_token": figures["microseconds"] / tokens,
        "faults": problem.faults(visit, late),
    }


class Problem:
    """The tensors of one shape: projections [T, …], states [R, floats], what comes out [T, …]."""

    def __init__(self, shape: RecurrenceShape, launcher: Launcher, device: str) -> None:
        import torch

        from compute_plane.cuda.operands import StateRows

        self.shape = shape
        self._device = device
        self._kernels = self._prepared(launcher)
        sizes, rows, length = shape.sizes, shape.num_rows, shape.num_tokens
        num_tokens, layers = rows * length, shape.num_layers
        self._inputs: Tensor = torch.randn(
            num_tokens, sizes.num_inputs, dtype=torch.bfloat16, device=device
        )
        self._out: Tensor = torch.full(
            (num_tokens, sizes.out_size), math.nan, dtype=torch.bfloat16, device=device
        )
        self._states: Tensor = torch.randn(rows, layers * sizes.state_floats, device=device)
        self._first_states: Tensor = self._states.clone()
        row = torch.arange(rows, dtype=torch.int32, device=device)
        lengths, olds = torch.full_like(row, length), torch.zeros_like(row)
        self._rows = StateRows(
            rows=torch.stack([row * length, lengths, row, olds], dim=1).contiguous(),
            token_rows=row.repeat_interleave(length),
            num_long=rows if length > 1 else 0,
        )
        self._layers = [drawn(sizes, device) for _ in range(layers)]
        of_layer = 2 * rows * sizes.state_floats * FLOAT_BYTES + weight_bytes(self._layers[0])
        of_layer += self._inputs.nbytes + self._out.nbytes
        self.bytes_moved = layers * of_layer

    def visit(self) -> None:
        """Queue all layers once."""
        self._go_through(self._kernels)

    def faults(self, visit: Callable[[], None], late: Launcher) -> list[str]:
        """Say what is wrong with what a visit gives, beside the same launches in turn by `late`."""
        import torch

        from bench.gpu.step_ways import LATE

        with LATE.taken():
            kernels = self._prepared(late)
            self._states.copy_(self._first_states)
            self._go_through(kernels)
        in_turn = self._out.clone().view(torch.int16), self._states.clone().view(torch.int32)
        wrong = torch.zeros((), dtype=torch.int32, device=self._device)
        for _ in range(ROUNDS):
            self._states.copy_(self._first_states)
            visit()
            wrong += (self._out.view(torch.int16) != in_turn[0]).any() | (
                self._states.view(torch.int32) != in_turn[1]
            ).any()  # the host does not wait
        is_finite = self._out.isfinite().all() and self._states.isfinite().all()
        faults = [] if is_finite else ["what came out is not finite"]
        if wrong:
            faults.append(
                f"{int(wrong)} of {ROUNDS} runs of launches that begin early gave other bits than "
                "launches in turn"
            )
        return faults

    def _prepared(self, launcher: Launcher) -> RecurrenceKernels:
        kernels = self.shape.kernels(launcher)
        launcher.prepare(kernels.variants)
        return kernels

    def _go_through(self, kernels: RecurrenceKernels) -> None:
        sizes = self.shape.sizes
        go_through: Callable[..., None] = kernels.gated_convolution
        if isinstance(sizes, DeltaNet):
            go_through = kernels.delta_net
        elif isinstance(sizes, Mamba2):
            go_through = kernels.mamba2
        for number, own in enumerate(self._layers):
            go_through(self._out, self._states, number, self._inputs, self._rows, own)


def drawn(sizes: Recurrence, device: str) -> LayerDeltaNet | LayerConvolution | LayerMamba2:
    """Return what a layer has of its own, float32; states neither die out nor grow."""
    import torch

    from compute_plane.cuda.operands import LayerConvolution, LayerDeltaNet, LayerMamba2

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).mul_(0.5)

    convolution = floats(sizes.kernel_size, sizes.channels)
    if isinstance(sizes, ShortConvolution):
        return LayerConvolution(convolution)
    heads = sizes.num_value_heads if isinstance(sizes, DeltaNet) else sizes.num_heads
    rates = torch.rand(heads, device=device).mul_(-2)
    if isinstance(sizes, DeltaNet):
        norm = torch.rand(sizes.value_dim, device=device) + 0.5
        return LayerDeltaNet(convolution, rates, floats(heads), norm, EPS, sizes)
    norm = torch.rand(sizes.inner_size, device=device) + 0.5
    return LayerMamba2(
        convolution, floats(sizes.channels), rates, floats(heads), floats(heads), norm, sizes
    )


def weight_bytes(own: LayerDeltaNet | LayerConvolution | LayerMamba2) -> int:
    """Return the bytes of what a layer has of its own."""
    import torch

    values = (getattr(own, name) for name in own.__dataclass_fields__)
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
