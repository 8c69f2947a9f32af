"""How the samples of a step are drawn: a sequence of `SamplingRow` that is made only where read.

What a row says is its slot's, but for the position, and slots keep it from start to start. So steps
share the *keys* of their samples as long as those are the same, and an executor that has seen them
needs the positions only; one that reads rows gets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from compute_plane.executor.interface import Int32Array, Penalties, SamplingRow, UInt8Array
from compute_plane.executor.step import Int64Array, SamplingKey


class SamplingKeys:
    """The keys of the samples of a step, in order; the same object as long as they are the same.

    `asked`: the samples whose log-probabilities are wanted, and how many most likely tokens each.
    """

    __slots__ = ("asked", "have_penalties", "keys")

    def __init__(self, keys: tuple[SamplingKey, ...]) -> None:
        self.keys = keys
        self.have_penalties = any(key.has_penalties for key in keys)
        self.asked = _asked(keys)


class SamplingRows(Sequence[SamplingRow]):
    """The samples of a step, K of them.

    `positions` [K]: of the tokens to be drawn. `histories`: where there are penalties, the memory
    of tokens, the line of each sample in it, and its tokens that are prompt. `masks`: what samples
    may be, by sample, where the step constrains any; that is no part of the keys. Rows are made
    together when the first one is read.
    """

    __slots__ = ("_histories", "_rows", "keys", "masks", "positions")

    def __init__(
        self,
        keys: SamplingKeys,
        positions: Int64Array,
        histories: tuple[Int32Array, list[int], list[int]] | None,
        masks: Mapping[int, UInt8Array] | None = None,
    ) -> None:
        self.keys = keys
        self.positions = positions
        self.masks = masks
        self._histories = histories
        self._rows: list[SamplingRow] | None = None

    def __len__(self) -> int:
        return len(self.keys.keys)

    def penalties(self, sample: int) -> Penalties | None:
        """Return what the row of a sample would say."""
        return self._penalties(sample, self.keys.keys[sample], int(self.positions[sample]))

    def __iter__(self) -> Iterator[SamplingRow]:
        return iter(self._made())

    @overload
    def __getitem__(self, index: int) -> SamplingRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SamplingRow]: ...
    def __getitem__(self, index: int | slice) -> SamplingRow | Sequence[SamplingRow]:
        return self._made()[index]

    def _made(self) -> list[SamplingRow]:
        if self._rows is None:
            masks = self.masks or {}
            self._rows = [
                SamplingRow(
                    key.temperature,
                    key.top_p,
                    key.seed,
                    key.sample_index,
                    position,
                    key.top_k,
                    key.min_p,
                    self._penalties(sample, key, position),
                    key.logit_bias,
                    key.num_logprobs,
                    masks.get(sample),
                )
                for sample, (key, position) in enumerate(
                    zip(self.keys.keys, self.positions.tolist(), strict=True)
                )
            ]
        return self._rows

    def _penalties(self, sample: int, key: SamplingKey, position: int) -> Penalties | None:
        if self._histories is None or not key.has_penalties:
            return None
        tokens, lines, num_prompts = self._histories
        return Penalties(
            key.repetition_penalty,
            key.presence_penalty,
            key.frequency_penalty,
            tokens[lines[sample], :position],
            num_prompts[sample],
        )


def logprobs_asked(sampling: Sequence[SamplingRow]) -> list[tuple[int, int]]:
    """Return the samples whose log-probabilities are wanted, and how many most likely tokens."""
    return sampling.keys.asked if isinstance(sampling, SamplingRows) else _asked(sampling)


def _asked(ways: Sequence[SamplingRow | SamplingKey]) -> list[tuple[int, int]]:
    return [
        (sample, way.num_logprobs)
        for sample, way in enumerate(ways)
        if way.num_logprobs is not None
    ]
