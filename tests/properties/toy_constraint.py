"""A grammar of hashes: what may follow depends on every token that a sample has said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from control_plane.core.constraint import Draft
from control_plane.core.request import Request

VOCABULARY = 11
EOS = 0


def may_follow(seed: int | None, output: Sequence[int]) -> list[int]:
    """The tokens that may come next, at least one, often no other; sometimes an end among them."""
    key = hash((seed, 17, *output))
    found = [token for token in range(1, VOCABULARY) if key >> token & 1]
    if key % 3 == 0:
        found = found[:1]
    if key % 5 == 0 or not found:
        found.append(EOS)
    return sorted(found)


def is_complete(seed: int | None, output: Sequence[int]) -> bool:
    return len(output) > 0 and hash((seed, 19, *output)) % 13 == 0


def is_broken(seed: int | None, output: Sequence[int]) -> bool:
    return len(output) > 0 and hash((seed, 23, *output)) % 61 == 0


@dataclass(frozen=True)
class Rule:
    """What a request's samples may say: by a grammar, and as long as nothing may end them."""

    seed: int | None
    is_constrained: bool
    num_held: int
    ends: frozenset[int]

    @classmethod
    def of(cls, request: Request) -> Rule:
        num_held = request.params.min_tokens if request.open_tokens else 0
        ends, is_constrained = request.end_token_ids, bool(request.constraints)
        return cls(request.params.seed, is_constrained, num_held, ends)

    def allowed(self, output: Sequence[int]) -> list[int] | None:
        """What may follow; None: anything. Where an end alone may, the grammar has its way."""
        found = may_follow(self.seed, output) if self.is_constrained else None
        if len(output) >= self.num_held:
            return found
        opens = [t for t in found or range(VOCABULARY) if t not in self.ends]
        return opens or found


def chosen(token: int, allowed: Sequence[int] | None) -> int:
    """The token that a plane samples where it would sample `token` if it might."""
    return token if allowed is None or token in allowed else allowed[token % len(allowed)]


def bits(tokens: Sequence[int]) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(-(-VOCABULARY // 8), "little")


@dataclass(eq=False)
class ToyConstraint:
    """Notes what it is told; it must be what its sample says."""

    seed: int | None
    output: list[int] = field(default_factory=list)

    @property
    def allowed_tokens(self) -> bytes:
        assert not self.is_complete
        assert self.error is None
        return bits(may_follow(self.seed, self.output))

    @property
    def is_complete(self) -> bool:
        return is_complete(self.seed, self.output)

    @property
    def error(self) -> str | None:
        return "a toy breaks" if is_broken(self.seed, self.output) else None

    @property
    def constrainer(self) -> ToyConstrainer:
        return ToyConstrainer()

    def draft(self, most: int) -> list[Draft]:
        """Right where nothing else may follow, and otherwise now and then."""
        assert most > 0
        drafts: list[Draft] = []
        output = list(self.output)
        while len(drafts) < most:
            allowed = may_follow(self.seed, output)
            output.append(allowed[hash((29, *output)) % len(allowed)])
            if is_complete(self.seed, output) or is_broken(self.seed, output):
                break
            drafts.append(Draft(output[-1], bits(may_follow(self.seed, output))))
        return drafts


class ToyConstrainer:
    def advance(self, taken: Sequence[tuple[ToyConstraint, Sequence[int]]]) -> None:
        for constraint, tokens in taken:
            for token in tokens:
                assert token in may_follow(constraint.seed, constraint.output)
                assert not constraint.is_complete
                assert constraint.error is None
                constraint.output.append(token)
