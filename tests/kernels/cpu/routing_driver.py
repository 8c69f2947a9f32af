"""Calls of the operations of mixtures of experts on NumPy arrays.

As a program, `python -m tests.kernels.cpu.routing_driver SET`, it prints the digest of what a
drawn mixture gives on an instruction set.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
BEHIND = 3
"""Entries behind each array that nothing may write."""
MARK = 77


@dataclass
class Mixture:
    """The arrays of T tokens that each go through C of E experts."""

    logits: Float32Array
    per_token: int
    normalises: bool = True
    is_sigmoid: bool = False
    correction: Float32Array | None = None
    scale: float | None = None
    num_groups: int = 0
    groups_per_token: int = 0
    expert_scales: Float32Array | None = None
    chosen: Int32Array = field(init=False)
    weights: Float32Array = field(init=False)
    places: Int32Array = field(init=False)
    tokens: Int32Array = field(init=False)
    runs: Int32Array = field(init=False)
    _scale: Float32Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tokens, num_experts = self.logits.shape
        shape = (tokens + BEHIND, self.per_token)
        self.chosen, self.places = (np.full(shape, MARK, np.int32) for _ in range(2))
        self.weights = np.full(shape, MARK, np.float32)
        self.tokens = np.full(tokens * self.per_token + BEHIND, MARK, np.int32)
        self.runs = np.full(1 + 3 * num_experts + BEHIND, MARK, np.int32)

    @property
    def num_tokens(self) -> int:
        return len(self.logits)

    def record(self, **operands: int) -> npt.NDArray[np.int64]:
        from kernels.cpu.operands import Routing
        from kernels.cpu.operation import RECORD_WORDS

        record = np.zeros(RECORD_WORDS, np.int64)
        record[Routing.NUM_EXPERTS] = self.logits.shape[1]
        record[Routing.PER_TOKEN], record[Routing.NORMALISES] = self.per_token, self.normalises
        for name in ("logits", "chosen", "weights", "places", "tokens", "runs"):
            record[Routing[name.upper()]] = getattr(self, name).ctypes.data
        record[Routing.IS_SIGMOID] = self.is_sigmoid
        if self.scale is not None:
            self._scale = np.float32([self.scale])
            record[Routing.SCALE] = self._scale.ctypes.data
        for name, value in operands.items():
            record[Routing[name.upper()]] = value
        return record

    def run(
        self, name: str, chunks: Iterable[int] = (0,), first_token: int = 0, **operands: int
    ) -> None:
        """Run an operation of the catalogue, the given chunks of as many as are given."""
        from kernels.cpu import catalogue
        from kernels.cpu.operation import StepWord
        from kernels.cpu.routing_sizes import routing_scratch_bytes
        from tests.kernels.cpu.operation_calls import run, step_header

        header, _ = step_header(self.num_tokens, 2048, first_token)
        header[StepWord.NUM_EXPERT_ROWS] = self.num_tokens * self.per_token
        width = operands.get("n", 0)
        size = routing_scratch_bytes(self.logits.shape[1], width)
        scratch = np.full(size + 64, 0xFF, np.uint8)
        header[StepWord.SCRATCH], header[StepWord.SCRATCH_BYTES] = scratch.ctypes.data, size
        if name == "route_tokens":  # others take these words for something else
            arrays = {"correction": self.correction, "expert_scales": self.expert_scales}
            operands |= {of: one.ctypes.data for of, one in arrays.items() if one is not None}
        run(getattr(catalogue, name), self.record(**operands), header, chunks)
        assert (scratch[size:] == 0xFF).all()

    def route(self, chunks: Iterable[int] = (0,)) -> None:
        """Choose experts."""
        self.run(
            "route_tokens", chunks, num_groups=self.num_groups,
            groups_per_token=self.groups_per_token,
        )  # fmt: skip

    def routed(self) -> Mixture:
        """Choose experts and sort the rows."""
        self.route()
        self.run("group_by_expert")
        return self

    def check_ends(self) -> None:
        """Check that nothing lies behind the arrays but what lay there."""
        for array in (self.chosen, self.weights, self.places, self.tokens):
            assert (array[-BEHIND:] == MARK).all()
        assert (self.runs[-BEHIND:] == MARK).all()


def drawn(tokens: int, experts: int, per_token: int, seed: int = 0) -> Mixture:
    random = np.random.default_rng([tokens, experts, per_token, seed])
    return Mixture(3 * random.standard_normal((tokens, experts), np.float32), per_token)


def digest() -> str:
    """Return a digest of weights, and of what they make of numbers."""
    found = hashlib.sha256()
    correction = np.random.default_rng(2).standard_normal(40, np.float32) / 4
    for normalises, is_sigmoid, corrects, has_groups in itertools.product((False, True), repeat=4):
        mixture = drawn(19, 40, 7)
        mixture.num_groups, mixture.groups_per_token = (5, 2) if has_groups else (0, 0)
        mixture.normalises, mixture.is_sigmoid = normalises, is_sigmoid
        mixture.correction, mixture.scale = (correction, 1.7) if corrects else (None, None)
        mixture.routed()
        given = np.random.default_rng(1).standard_normal((19 * 7, 50), np.float32)
        out = np.ones((19, 50), np.float32)
        mixture.run("add_experts", source=given.ctypes.data, out=out.ctypes.data, n=50)
        gates = mixture.logits[:, :1].copy()
        mixture.run(
            "add_shared", logits=gates.ctypes.data, source=given.ctypes.data,
            out=out.ctypes.data, n=50,
        )  # fmt: skip
        for array in (mixture.chosen, mixture.weights, mixture.places, mixture.runs, out):
            found.update(array.tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    from tests.amx import sets

    sets.use(sys.argv[1])
    sys.stdout.write(f"{digest()}\n")
