"""When two answers to the same batch count as equal, and what a difference is."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from control_plane.engine.recording_tables import FilledPlace
from hetero_infer.replay.fitting import check_fit
from hetero_infer.replay.recorded_state import kept_drafts
from protos.hetero.compute.v1 import compute_pb2

FLOAT32_TOLERANCE: Final = 0.01
FLOAT16_TOLERANCE: Final = 0.1
BFLOAT16_TOLERANCE: Final = 0.5
QUANTISED_TOLERANCE: Final = 1.0
"""Of a log-probability, in nats, between planes of unequal numerics, by the coarsest type that one
of them computes in or keeps keys and values in. ADR 0011 says what they come from."""


_TOLERANCES: Final = {
    "float32": FLOAT32_TOLERANCE,
    "float16": FLOAT16_TOLERANCE,
    "bfloat16": BFLOAT16_TOLERANCE,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as recorded.

    `session`: the number of the recorded session in its file, from 1; `step`: of that session.
    `row`, `slot`: None where the whole step is meant. `what`: "token", "log-probability",
    "prompt log-probability", "hidden states", "KV block", "row failure" or "refusal". `block`: the
    id of the KV block; `note`: the place in words, the tokens of a block.
    """

    session: int
    step: int
    row: int | None
    slot: int | None
    what: str
    recorded: str
    replayed: str
    block: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """How exactly a plane must repeat what another one did.

    `is_exact`: both have the same numerics; then everything must be equal to the bit, unless a
    `tolerance` for log-probabilities is given, and a tolerance of 0 asks the same of unequal
    numerics. Else log-probabilities may differ by `tolerance`, a
    token may be another one where that explains it, and the bytes of KV blocks are not compared.
    """

    is_exact: bool
    tolerance: float

    def are_close(self, recorded: float, replayed: float) -> bool:
        """Whether two log-probabilities count as equal."""
        if recorded == replayed or (math.isnan(recorded) and math.isnan(replayed)):
            return True
        return abs(recorded - replayed) <= self.tolerance


def rules_for(
    recorded: compute_pb2.DescribeResponse,
    replaying: compute_pb2.DescribeResponse,
    tolerance: float | None = None,
) -> Rules:
    """Return how a recording of one plane is compared on another one.

    Raises ConfigError, naming the first thing, where the recording cannot run there at all.
    """
    check_fit(recorded, replaying)
    is_exact = tolerance == 0.0 or (
        recorded.numerics_id == replaying.numerics_id
        and recorded.model.name == replaying.model.name
        and recorded.model.weight_format == replaying.model.weight_format
    )
    if tolerance is None:
        unlike = max(_tolerance_of(recorded), _tolerance_of(replaying))
        tolerance = 0.0 if is_exact else unlike
    return Rules(is_exact, tolerance)


def _tolerance_of(plane: compute_pb2.DescribeResponse) -> float:
    """Return how far a plane may be from another one; only its numerics id tells the KV type."""
    dtype = plane.model.dtype
    named = {dtype, *re.findall(r"[a-z]+\d+", plane.numerics_id)}
    if dtype not in _TOLERANCES or named & {"int8", "float8"}:
        return QUANTISED_TOLERANCE
    return max(_TOLERANCES[name] for name in named & _TOLERANCES.keys())


@dataclass(frozen=True, slots=True)
class Answers:
    """A batch and both its answers; neither is a refusal.

    `places`: of the blocks that the batch fills, in the order of its digests.
    """

    session: int
    batch: compute_pb2.ExecutionBatch
    places: Sequence[FilledPlace]
    recorded: compute_pb2.ExecutionOutput
    replayed: compute_pb2.ExecutionOutput

    def difference(
        self, row: int | None, what: str, recorded: object, replayed: object, **more: object
    ) -> Difference:
        """Return a difference of this step."""
        slot = None if row is None else self.batch.slots[row]
        given = (row, slot, what, str(recorded), str(replayed))
        return Difference(self.session, self.batch.step_id, *given, **more)  # type: ignore[arg-type]

    def tokens(self, output: compute_pb2.ExecutionOutput) -> list[list[int]]:
        """Return the tokens that each sample brought: the drafts kept and its own."""
        kept = kept_drafts(self.batch, output)
        return [[*kept[k], token] for k, token in enumerate(output.sampled_token_ids)]

    def is_failed(self, row: int) -> bool:
        """Whether a row failed on either plane, so that its answers mean nothing."""
        outputs = (self.recorded, self.replayed)
        return any(failure.row == row for output in outputs for failure in output.row_failures)


def other_tokens(answers: Answers) -> list[int]:
    """Return the samples that are not the recorded ones: another token, or behind other drafts."""
    pairs = zip(answers.tokens(answers.recorded), answers.tokens(answers.replayed), strict=True)
    rows = answers.batch.sampled_rows
    return [
        k for k, (was, now) in enumerate(pairs) if was != now and not answers.is_failed(rows[k])
    ]


def row_failures(answers: Answers) -> Iterator[Difference]:
    """Yield the rows that failed on one plane only."""
    was = {failure.row: failure for failure in answers.recorded.row_failures}
    now = {failure.row: failure for failure in answers.replayed.row_failures}
    for row in sorted(was.keys() | now.keys()):
        if row >= len(answers.batch.slots):
            continue
        if (row in was) == (row in now):
            continue
        if row in was and was[row].reason == compute_pb2.ROW_FAILURE_REASON_POISONED:
            continue  # what poisoned the slot came before
        before, after = (
            failures[row].message if row in failures else "none" for failures in (was, now)
        )
        yield answers.difference(row, "row failure", before, after)


def logprobs(answers: Answers, rules: Rules) -> Iterator[Difference]:
    """Yield the samples of the same token whose log-probabilities are too far apart."""
    now = {entry.sample: entry for entry in answers.replayed.sample_logprobs}
    tokens = answers.recorded.sampled_token_ids
    others = set(other_tokens(answers))
    for entry in answers.recorded.sample_logprobs:
        replayed = now.get(entry.sample)
        if replayed is None or entry.sample >= len(tokens) or entry.sample in others:
            continue
        row = answers.batch.sampled_rows[entry.sample]
        if answers.is_failed(row):
            continue
        note = f"of token {tokens[entry.sample]}"
        if not rules.are_close(entry.logprob, replayed.logprob):
            yield answers.difference(
                row, "log-probability", entry.logprob, replayed.logprob, note=note
            )
        elif rules.is_exact and not rules.tolerance and not _same_top(entry, replayed):
            yield answers.difference(
                row, "log-probability", _top(entry), _top(replayed), note="of the likeliest tokens"
            )


def draft_logprobs(answers: Answers, rules: Rules) -> Iterator[Difference]:
    """Yield the samples one of whose kept drafts, the same ones, has another log-probability."""
    others = set(other_tokens(answers))
    was, now = (
        [entry for entry in output.draft_logprobs if entry.sample not in others]
        for output in (answers.recorded, answers.replayed)
    )
    for entry, replayed in zip(was, now, strict=False):
        row = answers.batch.sampled_rows[entry.sample]
        is_failed = answers.is_failed(row)
        if not is_failed and not rules.are_close(entry.logprob, replayed.logprob):
            yield answers.difference(
                row, "log-probability", entry.logprob, replayed.logprob, note="of a draft"
            )


def prompt_logprobs(answers: Answers, rules: Rules) -> Iterator[Difference]:
    """Yield the rows that give prompt tokens other log-probabilities."""
    now = {entry.row: entry for entry in answers.replayed.prompt_logprobs}
    for entry in answers.recorded.prompt_logprobs:
        replayed = now.get(entry.row)
        if replayed is None or entry.row >= len(answers.batch.slots):
            continue
        if answers.is_failed(entry.row):
            continue
        pairs = zip(entry.logprobs, replayed.logprobs, strict=False)
        for index, (before, after) in enumerate(pairs):
            if not rules.are_close(before, after):
                position = entry.first_position + index
                yield answers.difference(
                    entry.row,
                    "prompt log-probability",
                    before,
                    after,
                    note=f"of the token at position {position}",
                )
                break


def embeddings(answers: Answers, rules: Rules) -> Iterator[Difference]:
    """Yield the rows that give other hidden states: relative to their length, by the tolerance."""
    now = {entry.row: entry.values for entry in answers.replayed.embeddings}
    for entry in answers.recorded.embeddings:
        replayed = now.get(entry.row)
        if replayed is None or replayed == entry.values or answers.is_failed(entry.row):
            continue
        was, values = (
            struct.unpack(f"<{len(data) // 8}d", data) for data in (entry.values, replayed)
        )
        gap = math.dist(was, values) / (math.hypot(*was) or 1.0)
        if gap > rules.tolerance:
            yield answers.difference(
                entry.row,
                "hidden states",
                f"{was[0]:.9g}, …",
                f"{values[0]:.9g}, …",
                note=f"{gap:.2g} of their length apart",
            )


def digests(answers: Answers) -> Iterator[tuple[FilledPlace | None, Difference]]:
    """Yield the filled blocks whose bytes differ, and where they are filled."""
    asked = answers.batch.digest_blocks
    was, now = answers.recorded.block_digests, answers.replayed.block_digests
    if not len(asked) == len(was) == len(now):
        return  # nothing ran, so there is nothing to compare
    has_places = len(answers.places) == len(asked)
    for index, (block, before, after) in enumerate(zip(asked, was, now, strict=True)):
        place = answers.places[index] if has_places else None
        if before == after or (place is not None and answers.is_failed(place.row)):
            continue
        row = None if place is None else place.row
        found = answers.difference(row, "KV block", f"{before:016x}", f"{after:016x}", block=block)
        yield place, found


def largest_gap(answers: Answers) -> float:
    """Return how far apart the log-probabilities of the same sampled tokens are at most."""
    others = set(other_tokens(answers))
    now = {entry.sample: entry.logprob for entry in answers.replayed.sample_logprobs}
    gaps = [
        abs(entry.logprob - now[entry.sample])
        for entry in answers.recorded.sample_logprobs
        if entry.sample in now and entry.sample not in others
    ]
    return max((gap for gap in gaps if math.isfinite(gap)), default=0.0)


def _same_top(a: compute_pb2.SampleLogprobs, b: compute_pb2.SampleLogprobs) -> bool:
    return list(a.top_token_ids) == list(b.top_token_ids) and list(a.top_logprobs) == list(
        b.top_logprobs
    )


def _top(entry: compute_pb2.SampleLogprobs) -> str:
    return ", ".join(
        f"{token}: {logprob:.9g}"
        for token, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=False)
    )
