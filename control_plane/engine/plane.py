"""What the control plane knows of its compute plane, and the limits that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from control_plane.config import SchedulingLimits
from control_plane.core.embedding import EMBEDDINGS
from control_plane.core.interface import MOST_DRAFTS, SchedulerConfig
from control_plane.errors import ModelNotFoundError, PlaneMismatchError
from planes.transport import PROTOCOL_VERSION

SWAP = "swap"
"""The feature of planes that execute `swap_out` and `swap_in`."""

DRAFTS = "drafts"
"""The feature of planes that keep the drafts of a row as far as they are right."""

DRAFT_MODEL = "draft_model"
"""The feature of planes with a draft model."""

SAMPLES = frozenset({"copies", "sampled_slots"})
"""What several samples of one prompt take."""

BEAMS = frozenset({"copies", "logprobs"})
"""What a beam search takes."""


CONSTRAINTS = "constraints"
"""The feature of planes that keep to what the rows of a batch may be."""

DRAFT_CONSTRAINTS = "draft_constraints"
"""The feature of planes that keep to it behind drafts, too."""

PROMPT_LOGPROBS = "prompt_logprobs"
"""The feature of planes that give log-probabilities of prompts."""

START_PREFIXES = "start_prefixes"
"""The feature of planes that start a slot with what another one has."""

_MAY_GROW = ("num_blocks", "max_slots", "num_states")
"""Facts of a plane of which more than before is no matter."""


MAX_TOLD_ADAPTERS: Final = 8
"""In one message; their names may be long, and there may be many."""


class AdapterDescription(NamedTuple):
    """An adapter of the plane, as in `hetero.compute.v1.AdapterDescription`."""

    name: str
    rank: int = 0
    num_parameters: int = 0
    sha256: str = ""

    def __str__(self) -> str:
        return f"{self.name} (sha256 {self.sha256[:12]}…)" if self.sha256 else self.name


@dataclass(frozen=True, slots=True)
class PlaneDescription:
    """The answer of `Describe`, as far as decisions depend on it.

    `num_host_blocks`, `tells_prompts_apart`, `features`, `num_states`: as in `DescribeResponse`;
    `pooling`: as in `ModelDescription`. `max_embeddings`: rows of a batch that may give hidden
    states, of `hidden_size` numbers each. `adapters`: adapter i is entry i − 1, 0 is the model as
    it is.
    """

    protocol_version: int
    model: str
    architecture: str
    dtype: str
    weight_format: str
    model_sha256: str
    num_parameters: int
    vocab_size: int
    context_length: int
    numerics_id: str
    executor: str
    device: str
    block_size: int
    num_blocks: int
    max_slots: int
    max_rows: int
    max_tokens: int
    preferred_prefill_chunk: int
    max_batches_in_flight: int
    software_version: str
    epoch: int
    current_session: int
    num_host_blocks: int = 0
    tells_prompts_apart: bool = False
    features: frozenset[str] = frozenset()
    hidden_size: int = 0
    max_embeddings: int = 0
    pooling: str = ""
    num_states: int = 0
    adapters: tuple[AdapterDescription, ...] = ()

    def check(self) -> None:
        """Raise PlaneMismatchError unless this control plane can work with the plane."""
        if self.protocol_version != PROTOCOL_VERSION:
            raise PlaneMismatchError(
                f"the compute plane speaks protocol version {self.protocol_version}, "
                f"this control plane {PROTOCOL_VERSION}",
                field="protocol_version",
            )
        for name in (
            "vocab_size",
            "context_length",
            "block_size",
            "num_blocks",
            "max_slots",
            "max_rows",
            "max_tokens",
            "max_batches_in_flight",
        ):
            if getattr(self, name) < 1:
                raise PlaneMismatchError(
                    f"the compute plane says {name} {getattr(self, name)}, it must be at least 1",
                    field=name,
                )
        if 0 < self.num_states < self.max_slots:
            raise PlaneMismatchError(
                f"the compute plane says num_states {self.num_states}, it must be 0 or at least "
                f"max_slots ({self.max_slots})",
                field="num_states",
            )
        names = self.models
        if len(set(names)) < len(names):
            raise PlaneMismatchError(
                "the compute plane has several of one name among the model and its adapters: "
                f"{_listed(names)}",
                field="adapters",
            )

    @property
    def models(self) -> list[str]:
        """Everything that requests may name: the model, then its adapters."""
        return [self.model, *(adapter.name for adapter in self.adapters)]

    def adapter_of(self, model: str) -> int:
        """Return the adapter of that name, 0: the model is called so. Raises ModelNotFoundError."""
        if model == self.model:
            return 0
        for number, adapter in enumerate(self.adapters, start=1):
            if adapter.name == model:
                return number
        names = [adapter.name for adapter in self.adapters]
        among = f", with the adapters {_listed(names)}" if names else ""
        raise ModelNotFoundError(
            f"model {model!r} is not loaded, {self.model!r} is{among}", field="model"
        )

    def name_of(self, adapter: int) -> str:
        """Return what an adapter is called, 0: the model."""
        return self.adapters[adapter - 1].name if adapter else self.model

    def check_continues(self, before: PlaneDescription) -> None:
        """Raise PlaneMismatchError unless requests begun on `before` may go on here.

        What was sized by free memory may have become larger.
        """
        for name in (
            "model",
            "model_sha256",
            "vocab_size",
            "context_length",
            "block_size",
            "num_blocks",
            "numerics_id",
            "max_slots",
            "max_rows",
            "max_tokens",
            "max_batches_in_flight",
            "num_host_blocks",
            "num_states",
            "tells_prompts_apart",
            "features",
            "adapters",
        ):
            old, new = getattr(before, name), getattr(self, name)
            if old != new and not (name in _MAY_GROW and new > old > 0):
                raise PlaneMismatchError(
                    f"the compute plane came back with another {name}: {said(new)}, it was "
                    f"{said(old)}; restart the control plane",
                    field=name,
                )

    def continuing(self, before: PlaneDescription | None) -> PlaneDescription:
        """Return this plane as those see it who knew `before`: with what they deal in."""
        if before is None:
            return self
        return replace(self, **{name: getattr(before, name) for name in _MAY_GROW})


def said(value: object) -> str:
    """Spell a fact of a plane the same way each time."""
    if isinstance(value, tuple):
        return _listed(value) or "none"
    return ", ".join(sorted(value)) if isinstance(value, frozenset) else repr(value)


def _listed(names: Sequence[object]) -> str:
    """List the first ones, and how many there are more."""
    num_more = len(names) - MAX_TOLD_ADAPTERS
    told = ", ".join(map(str, names[:MAX_TOLD_ADAPTERS]))
    return f"{told} and {num_more} more" if num_more > 0 else told


@dataclass(frozen=True, slots=True)
class Lowered:
    """A configured limit that the compute plane cannot reach."""

    name: str
    configured: int
    effective: int


def effective_limits(
    limits: SchedulingLimits, plane: PlaneDescription
) -> tuple[SchedulerConfig, list[Lowered]]:
    """Return the smaller of the own limits and the plane's, and which ones were lowered."""
    values: dict[str, int] = {}
    lowered: list[Lowered] = []
    for name, most in (
        ("max_batch_size", plane.max_rows),
        ("max_num_seqs", plane.max_slots),
        ("max_model_len", plane.context_length),
        ("max_total_tokens", plane.max_tokens),
    ):
        configured = getattr(limits, name)
        values[name] = min(configured, most)
        if values[name] < configured:
            lowered.append(Lowered(name, configured, values[name]))
    # A plane that prefers nothing says 0.
    prefill_chunk = limits.prefill_chunk or plane.preferred_prefill_chunk or None
    drafts_by_form = limits.grammar_drafts and {DRAFTS, DRAFT_CONSTRAINTS} <= plane.features
    config = SchedulerConfig(
        memory_threshold=limits.memory_threshold,
        max_slots=plane.max_slots,
        max_prefill_tokens=prefill_chunk,
        num_host_blocks=plane.num_host_blocks if SWAP in plane.features else 0,
        speculative_tokens=limits.speculative_tokens if DRAFTS in plane.features else 0,
        draft_model={DRAFTS, DRAFT_MODEL} <= plane.features,
        prompt_lookup_min=limits.prompt_lookup_min,
        grammar_drafts=drafts_by_form * MOST_DRAFTS,
        embedding_size=plane.hidden_size,
        max_embeddings=plane.max_embeddings if EMBEDDINGS in plane.features else 0,
        num_states=plane.num_states,
        start_prefixes=START_PREFIXES in plane.features,
        **values,
    )
    return config, lowered
