"""When two runs of a model say the same: the one rule for all black-box tests.

Where the executor promises a sequence the same bits in any company, tokens must be equal. Where it
does not, tokens may part at a near tie, and comparing texts past that says nothing. Then every
token of an answer must be one that could have been chosen there: the reference, the CPU executor in
float32, computes the logits before each of its tokens, and for some logits that are off by no more
than the tolerance the sampling rule must come to that very token (`could_choose`). So an answer is
found out that goes on from wrong keys and values, or loses, doubles or changes a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from compute_plane.model.loader import LoadedModel, load_model
from compute_plane.model.source import DEFAULT
from control_plane.core.generation_params import GenerationParams
from control_plane.text.huggingface_tokenizer import load_huggingface_tokenizer
from kernels.interface import Float32Array, Float64Array
from kernels.reference.philox import uniform
from kernels.reference.sampling import Choice, inverse
from tests.devices import Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

REFERENCE = Target("cpu", "cpu")
BLOCK_SIZE = 16
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Said:
    """An answer to a prompt: how its tokens were to be chosen, and what they are."""

    prompt: str | Sequence[int]
    params: GenerationParams
    tokens: Sequence[int]
    sample_index: int = 0

    def choice(self, position: int) -> Choice:
        """How the token at a position was to be chosen. There may be no adjustments."""
        params = self.params
        plain = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        assert plain == (1.0, 0.0, 0.0)
        assert not params.logit_bias
        assert params.seed is not None or params.temperature == 0.0
        return Choice(
            params.temperature,
            params.top_p,
            params.seed or 0,
            self.sample_index,
            position,
            params.top_k,
            params.min_p,
        )


class Judge:
    """Compares what a target says of a model, by default the embedded one.

    The reference is built when it is first needed.
    """

    def __init__(self, target: Target, model: LoadedModel | None = None) -> None:
        self.target = target
        self._model = model
        self._open = ExitStack()
        self._driver: BatchDriver | None = None

    def check(
        self, answers: Sequence[Said], expected: Sequence[Sequence[int]], dtype: str = "auto"
    ) -> None:
        """Check answers beside those of another run. `dtype`: what the target was told."""
        if self.target.keeps_bits:
            assert [list(said.tokens) for said in answers] == [list(one) for one in expected]
            return
        for said, other in zip(answers, expected, strict=True):
            if list(said.tokens) != list(other):
                self.check_valid(said, dtype)

    def check_valid(self, said: Said, dtype: str = "auto") -> None:
        """Check that each token could have been chosen after those before it."""
        tolerance = self.target.tolerance(dtype)
        prompt = self._tokens(said.prompt)
        logits = self._logits(prompt, said.tokens)
        for position, (row, token) in enumerate(zip(logits, said.tokens, strict=True), len(prompt)):
            assert could_choose(row, said.choice(position), token, tolerance), (
                f"token {token} at position {position} could not follow those before it: {said}"
            )

    def close(self) -> None:
        """End the reference."""
        self._open.close()

    def _logits(self, prompt: list[int], tokens: Sequence[int]) -> Iterator[Float32Array]:
        """Yield the reference's logits before each token, computed over those before it."""
        driver = self._reference()
        sequence = DrivenSequence(list(prompt))
        try:
            for token in tokens:
                while sequence.num_computed < len(sequence.tokens):
                    batch = driver.batch([sequence], CHUNK_TOKENS)
                    output = driver.executor.execute(batch)
                    sequence.num_computed = int(batch.seq_lens[0])
                assert output.logits is not None
                yield output.logits[0]
                sequence.tokens.append(token)
        finally:
            driver.release(sequence)

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = load_huggingface_tokenizer(self._loaded().assets.tokenizer_json)
        return list(tokenizer.encode(prompt))

    def _loaded(self) -> LoadedModel:
        if self._model is None:
            self._model = load_model(DEFAULT)
        return self._model

    def _reference(self) -> BatchDriver:
        if self._driver is None:
            model = self._loaded()
            num_blocks = model.spec.context_length // BLOCK_SIZE
            executor = self._open.enter_context(
                REFERENCE.running(
                    model, num_blocks=num_blocks, block_size=BLOCK_SIZE, keep_logits=True
                )
            )
            self._driver = BatchDriver(executor, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        return self._driver


def check_logits(target: Target, logits: bytes, expected: bytes, dtype: str) -> None:
    """Check the float32 logits [V] of a sequence beside those that it has in other company.

    Where bits are not promised, each may be off by the tolerance, in units of the row's spread.
    """
    if target.keeps_bits:
        assert logits == expected
        return
    ours, theirs = (np.frombuffer(one, dtype=np.float32) for one in (logits, expected))
    allowed = target.tolerance(dtype) * max(1.0, float(theirs.std()))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=allowed)


def could_choose(logits: Float32Array, choice: Choice, token: int, tolerance: float) -> bool:
    """Whether the sampling rule comes to `token` for some logits that are nearly these.

    `logits`: [V]; each may be off by `tolerance`, in either direction. The rule is that of
    `kernels.reference.sampling`; `choice` has no adjustments.
    """
    if choice.temperature == 0.0:
        return bool(logits[token] >= logits.max() - 2 * tolerance)
    scale = inverse(choice.temperature)
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) * scale)
    factor = math.exp(min(tolerance * scale, 300.0))
    always, perhaps = _kept(weights, choice, factor)
    if not perhaps[token]:
        return False
    # u · total must lie in the token's own part of the running sum over the kept tokens.
    u = uniform(choice.seed, choice.sample_index, choice.position)
    low, high = np.where(always, weights / factor, 0.0), np.where(perhaps, weights * factor, 0.0)
    before_at_least, behind_at_most = low[:token].sum(), high[token:].sum()
    before_at_most, behind_at_least = high[: token + 1].sum(), low[token + 1 :].sum()
    begins = before_at_least / (before_at_least + behind_at_most)
    ends = before_at_most / (before_at_most + behind_at_least)
    return bool(begins - ROUNDING <= u <= ends + ROUNDING)


ROUNDING = 1e-9
"""The rule's weights are whole numbers of 2⁻⁴⁰, and its sums are exact; here they are not."""


def _kept(weights: Float64Array, choice: Choice, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens top-k, top-p and min-p keep for all such weights, and for some.

    Each weight may be `factor` times as large or as small.
    """
    order = np.argsort(-weights, kind="stable")
    ordered = weights[order]
    running = np.concatenate([[0.0], np.cumsum(ordered)])
    total = running[choice.top_k or len(weights)] if choice.top_k < len(weights) else running[-1]
    # `total`: of what top-k leaves.
    # How many tokens are certainly before each one in the order of weight, and how many may be.
    surely = np.searchsorted(-ordered, -ordered * factor**2, side="left")
    possibly = np.searchsorted(-ordered, -ordered / factor**2, side="right") - 1
    always, perhaps = np.ones(len(weights), dtype=bool), np.ones(len(weights), dtype=bool)
    if choice.top_k:
        perhaps &= surely < choice.top_k
        always &= possibly < choice.top_k
    if choice.top_p < 1.0:
        before = running[surely] / factor
        rest = np.maximum(total - running[surely], 0.0) * factor
        perhaps &= before <= choice.top_p * (before + rest)
        mass = (running[possibly + 1] - ordered) * factor
        rest = np.maximum(total - running[possibly + 1] + ordered, 0.0) / factor
        always &= mass < choice.top_p * (mass + rest)
    if choice.min_p:
        perhaps &= ordered * factor**2 >= choice.min_p
        always &= ordered >= choice.min_p * factor**2
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return always[places], perhaps[places]
