"""Running a recording on a compute plane and comparing what it answers.

The batches go there as they were recorded, one at a time, in a session of the replay's own. Where
the plane samples another token than the recorded one, its slot is led back: started with the
recorded tokens, and its last position computed again. So each step is compared on the recorded
context, however unlike the planes are. The same extra step tells what the plane thinks of the
recorded token, and which block of the slot no longer holds what it was filled with. Of a model with
states the slot is only started: they cannot go back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from control_plane.engine.recording_tables import FilledPlace
from hetero_infer.replay import comparison
from hetero_infer.replay.comparison import Answers, Difference, Rules, rules_for
from hetero_infer.replay.fitting import check_adapters, check_features
from hetero_infer.replay.recorded_state import RecordedSlot, RecordedState, sample_targets
from hetero_infer.replay.recording_reader import RecordedStep, SessionStart
from hetero_infer.replay.replay_plane import ReplayPlane
from protos.hetero.compute.v1 import compute_pb2

MAX_DIFFERENCES: Final = 1000
"""Kept in the report; the others are counted."""


@dataclass(slots=True)
class ReplayReport:
    """What a replay found.

    `num_compared`: log-probabilities; `largest_gap`: between any two of them. `num_near_ties`:
    tokens that are others than recorded because the planes' numerics differ, and no differences.
    `num_unanswered`: steps that were run but had no recorded answer. `num_skipped`: steps behind a
    refused one in the same session, not run. `is_stopped`: at the first difference.
    """

    num_sessions: int = 0
    num_steps: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_compared: int = 0
    num_blocks: int = 0
    num_near_ties: int = 0
    num_unanswered: int = 0
    num_skipped: int = 0
    num_differences: int = 0
    largest_gap: float = 0.0
    is_stopped: bool = False
    rules: Rules | None = None
    differences: list[Difference] = field(default_factory=list)

    def add(self, differences: Iterable[Difference]) -> None:
        """Count differences and keep the first ones."""
        for difference in differences:
            self.num_differences += 1
            if len(self.differences) < MAX_DIFFERENCES:
                self.differences.append(difference)


class _Probe(NamedTuple):
    """A slot computed again at its last position, over the recorded tokens.

    `logprob`: of the recorded token that follows; None if the plane cannot say. `wrong`: entries of
    the table whose blocks are not as they were filled: index → digest now.
    """

    logprob: float | None
    wrong: dict[int, int]


class Replayer:
    """Replays one recording.

    `report`: is filled as it goes on. `finds_all`: do not stop at the first step that differs.
    `tolerance`: of log-probabilities, in place of the one that the two planes' numerics give.
    """

    def __init__(
        self,
        plane: ReplayPlane,
        report: ReplayReport,
        *,
        finds_all: bool = False,
        tolerance: float | None = None,
    ) -> None:
        self._plane = plane
        self._finds_all = finds_all
        self._tolerance = tolerance
        self._described = plane.describe()
        self._session = SessionStart(0, 0, self._described)
        self._state = RecordedState(self._described)
        self._rules = Rules(is_exact=True, tolerance=0.0)
        self._is_refused = False
        self.report = report

    def run(self, recording: Iterable[SessionStart | RecordedStep]) -> None:
        """Replay a recording from its beginning to its end, or to the first difference.

        Raises RecordingError, ConfigError if the recording does not fit the plane, PlaneLostError.
        """
        for item in recording:
            if isinstance(item, SessionStart):
                self._begin(item)
            elif self._is_refused:
                self.report.num_skipped += 1
            else:
                self._replay(item)
            if self.report.num_differences and not self._finds_all:
                self.report.is_stopped = True
                break

    def _begin(self, session: SessionStart) -> None:
        self._rules = rules_for(session.plane, self._described, self._tolerance)
        self._session = session
        self._state = RecordedState(session.plane)
        self._is_refused = False
        self._plane.open()
        self.report.num_sessions += 1
        self.report.rules = self._rules

    def _replay(self, step: RecordedStep) -> None:
        batch, recorded = step.batch, step.output
        check_features(batch, self._described)
        check_adapters(batch, self._session.plane, self._described)
        places = self._state.apply(batch)
        leaves_digests = bool(batch.digest_blocks) and not self._rules.is_exact
        sent = batch
        if leaves_digests or batch.wanted_drafts:
            sent = compute_pb2.ExecutionBatch()
            sent.CopyFrom(batch)
            sent.ClearField("wanted_drafts")  # what was guessed is in the batches that follow
            if leaves_digests:
                sent.ClearField("digest_blocks")
        replayed = self._plane.run(sent)
        self.report.num_steps += 1
        self.report.num_rows += len(batch.slots)
        if recorded is None:
            self.report.num_unanswered += 1
            self._is_refused = replayed.HasField("refusal")
            return
        answers = Answers(self._session.number, batch, places, recorded, replayed)
        if recorded.HasField("refusal") or replayed.HasField("refusal"):
            self._compare_refusals(answers)
            return
        self._state.commit(batch, recorded)
        self._count(answers)
        self.report.add(sorted(self._compare(answers), key=lambda found: found.row or 0))

    def _compare_refusals(self, answers: Answers) -> None:
        """Compare why a batch was refused; the session ends with it."""
        self._is_refused = True
        was, now = answers.recorded.refusal, answers.replayed.refusal
        if was.reason != now.reason:
            self.report.add(
                [answers.difference(None, "refusal", was.message or "none", now.message or "none")]
            )

    def _count(self, answers: Answers) -> None:
        report, recorded = self.report, answers.recorded
        report.num_tokens += len(recorded.sampled_token_ids) + sum(recorded.kept_drafts)
        report.num_compared += len(recorded.sample_logprobs) + len(recorded.draft_logprobs)
        report.num_compared += sum(len(entry.logprobs) for entry in recorded.prompt_logprobs)
        if self._rules.is_exact:
            report.num_blocks += len(recorded.block_digests)
        report.largest_gap = max(report.largest_gap, comparison.largest_gap(answers))

    def _compare(self, answers: Answers) -> list[Difference]:
        """Return the differences of a step, and lead slots back that went another way."""
        rules = self._rules
        found = list(comparison.row_failures(answers))
        found += comparison.prompt_logprobs(answers, rules)
        found += comparison.embeddings(answers, rules)
        off = list(comparison.logprobs(answers, rules))
        off += comparison.draft_logprobs(answers, rules)
        if rules.is_exact:
            found += (
                self._describe_block(place, difference)
                for place, difference in comparison.digests(answers)
            )
        found += off
        found += self._misplaced_blocks(answers)
        named = {difference.block for difference in found}
        targets = sample_targets(answers.batch)
        others = comparison.other_tokens(answers)
        for k in others:
            found += self._judge(answers, k, named)
        if off and rules.is_exact:
            rows = {difference.row for difference in off}
            for k, row in enumerate(answers.batch.sampled_rows):
                if row in rows and k not in others:
                    found += self._wrong_blocks(answers, row, targets[k], named)
        failed_here = {failure.row for failure in answers.replayed.row_failures}
        for k, row in enumerate(answers.batch.sampled_rows):
            if row in failed_here:
                self._probe(targets[k])
        return found

    def _misplaced_blocks(self, answers: Answers) -> Iterator[Difference]:
        """Yield the blocks that the recording plane filled where this batch fills others.

        A digest alone would not show it if the right bytes are still there from another replay.
        """
        asked = answers.batch.digest_blocks
        blocks = self._state.blocks_at(answers.batch, list(answers.places))
        if len(asked) != len(blocks):
            return
        for place, was, now in zip(answers.places, asked, blocks, strict=True):
            if was != now and not answers.is_failed(place.row):
                found = answers.difference(
                    place.row, "KV block", "filled", f"block {now} in its place", block=was
                )
                yield self._describe_block(place, found)

    def _judge(self, answers: Answers, k: int, named: set[int | None]) -> list[Difference]:
        """Lead a slot back whose token is another one; return why that is no near tie."""
        row, target = answers.batch.sampled_rows[k], sample_targets(answers.batch)[k]
        probe = self._probe(target)
        was, now = answers.tokens(answers.recorded)[k], answers.tokens(answers.replayed)[k]
        recorded = _logprob_of(answers.recorded, k)
        replayed = _logprob_of(answers.replayed, k)
        if len(was) != len(now):  # behind other drafts: they are of other places
            replayed = recorded
        if not self._rules.is_exact and self._is_near_tie(target, recorded, replayed, probe):
            self.report.num_near_ties += 1
            return []
        position = self._first_sampled(answers, row)
        note = f"at position {position}"
        if probe.logprob is not None:
            note += f"; replayed log-probability of token {was[-1]}: {probe.logprob:.9g}"
        if self._rules.is_exact and not probe.wrong and not named:
            note += "; the full blocks of its table are as they were filled"
        difference = answers.difference(
            row, "token", _with_logprob(was, recorded), _with_logprob(now, replayed), note=note
        )
        return [difference, *self._name_blocks(answers, row, target, probe, named)]

    @staticmethod
    def _first_sampled(answers: Answers, row: int) -> int:
        """Return the position of the first token that a row brought."""
        batch = answers.batch
        num_drafts = batch.draft_counts[row] if batch.draft_counts else 0
        return int(batch.positions[row] + batch.query_lens[row] - num_drafts)

    def _is_near_tie(
        self, target: int, recorded: float | None, replayed: float | None, probe: _Probe
    ) -> bool:
        """Whether log-probabilities that are equal but for the tolerance explain another token.

        The replaying plane must give the recorded token nearly the recorded log-probability; and a
        greedy choice, made of these alone, must not be likelier than the recorded one was.
        """
        if recorded is None or replayed is None or probe.logprob is None:
            return False
        if not self._rules.are_close(recorded, probe.logprob):
            return False
        slot = self._state.slot(target)
        is_greedy = slot is not None and _is_greedy(slot.start.sampling)
        return not is_greedy or replayed <= recorded + self._rules.tolerance

    def _wrong_blocks(
        self, answers: Answers, row: int, target: int, named: set[int | None]
    ) -> list[Difference]:
        return self._name_blocks(answers, row, target, self._probe(target), named)

    def _name_blocks(
        self, answers: Answers, row: int, target: int, probe: _Probe, named: set[int | None]
    ) -> list[Difference]:
        """Return a difference for each block of a slot that no longer holds what it was given."""
        found = []
        known, table = self._state.known_digests(target), self._state.table(target)
        for index, digest in probe.wrong.items():
            if table[index] in named:
                continue
            named.add(table[index])
            difference = answers.difference(
                row, "KV block", f"{known[index]:016x}", f"{digest:016x}", block=table[index]
            )
            found.append(self._describe(difference, target, index, "changed since it was filled; "))
        return found

    def _describe_block(self, place: FilledPlace | None, difference: Difference) -> Difference:
        if place is None or difference.slot is None:
            return difference
        return self._describe(difference, difference.slot, place.entry, "")

    def _describe(self, difference: Difference, slot: int, index: int, what: str) -> Difference:
        """Say which tokens a block is to hold."""
        first = index * self._state.block_size
        tokens = self._state.block_tokens(slot, index)
        listed = " ".join(map(str, tokens))
        place = f"positions {first} to {first + self._state.block_size - 1}"
        note = f"{what}entry {index} of the table, {place}, tokens {listed}"
        return replace(difference, note=note)

    def _probe(self, number: int) -> _Probe:
        """Lead a slot back to the recorded tokens by computing its last position again."""
        slot = self._state.slot(number)
        if slot is None or not slot.is_sound or not self._can_start(slot):
            return _Probe(None, {})
        table = self._state.table(number)
        position = len(slot.tokens) - 2  # the last token is the one sampled there
        known = self._state.known_digests(number) if self._rules.is_exact else {}
        start = compute_pb2.SlotStart()
        start.CopyFrom(slot.start)
        del start.token_ids[:], start.block_ids[:]
        start.ClearField("prefix")
        start.token_ids.extend(slot.tokens)
        start.block_ids.extend(table)
        if self._described.num_states:  # the state is of all tokens but the last, as recorded
            self._plane.run(compute_pb2.ExecutionBatch(starts=[start]))
            return _Probe(None, {})
        batch = compute_pb2.ExecutionBatch(
            starts=[start],
            slots=[number],
            query_lens=[1],
            positions=[position],
            digest_blocks=[table[index] for index in known],
        )
        if "prompt_logprobs" in self._described.features:
            batch.prompt_logprobs.add(row=0)
        output = self._plane.run(batch)
        if output.HasField("refusal") or output.row_failures:
            return _Probe(None, {})
        digests = zip(known, output.block_digests, strict=False)
        return _Probe(
            output.prompt_logprobs[0].logprobs[0] if output.prompt_logprobs else None,
            {index: digest for index, digest in digests if digest != known[index]},
        )

    def _can_start(self, slot: RecordedSlot) -> bool:
        """Whether the plane can hold the tokens: the last one of a context has no successor."""
        limit = self._described.num_blocks * self._described.block_size
        return 2 <= len(slot.tokens) <= min(limit, self._described.model.context_length)


def _logprob_of(output: compute_pb2.ExecutionOutput, sample: int) -> float | None:
    for entry in output.sample_logprobs:
        if entry.sample == sample:
            return float(entry.logprob)
    return None


def _with_logprob(tokens: Sequence[int], logprob: float | None) -> str:
    listed = " ".join(map(str, tokens))
    return listed if logprob is None else f"{listed} (log-probability {logprob:.9g})"


def _is_greedy(sampling: compute_pb2.SamplingParams) -> bool:
    """Whether the likeliest token of the bare logits is the one taken."""
    has_adjustments = (
        sampling.repetition_penalty not in (0.0, 1.0)
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or len(sampling.logit_bias) > 0
    )
    return sampling.temperature == 0.0 and not has_adjustments
