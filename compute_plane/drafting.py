"""The draft model of a plane: checked and built beside the model that it guesses for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.draft_model import MOST_ROWS, DraftLimits, DraftModel
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from compute_plane.model.loader import LoadedModel
from compute_plane.model.same_vocabulary import check_same_vocabulary
from planes.errors import ConfigError

MAX_TOKENS: Final = 512
"""Of a text that the draft model reads behind one step, for which its samples wait."""


def check_draft_model(draft: LoadedModel, model: LoadedModel | None) -> None:
    """Raise ConfigError unless one model can guess what another one says."""
    if model is None:
        raise ConfigError(
            "draft_model: the executor has no model to guess for", field="draft_model"
        )
    for each in (model, draft):
        if each.spec.recurrence is not None:
            raise ConfigError(
                f"draft_model: the layers of {each.spec.name} keep states of sequences, which "
                "cannot take back what was guessed",
                field="draft_model",
            )
    check_same_vocabulary(model.assets, draft.assets, "draft_model")


def build_drafter(
    draft: LoadedModel,
    context: ExecutorContext,
    beside: BuiltExecutor,
    limits: SlotLimits,
    least_chance: float,
    build: Callable[[ExecutorContext], BuiltExecutor],
) -> tuple[DraftModel, BuiltExecutor]:
    """Build a draft model beside an executor, and its own executor.

    `context`: what the other one was built from. `limits`: of the plane. `build` makes an executor
    of the same kind. Raises ConfigError for what it cannot make.
    """
    try:
        built = build(
            replace(
                context,
                spec=draft.spec,
                model=draft,
                num_blocks=limits.num_blocks + MOST_ROWS,
                max_tokens=MAX_TOKENS,
                max_rows=MOST_ROWS,
                swap_bytes=0,
                adapters=(),
                promised_bytes=beside.kv_pool_bytes + context.swap_bytes,
            )
        )
    except ConfigError as error:
        raise ConfigError(f"draft_model: {error.message}", field="draft_model") from error
    longest = draft.spec.context_length if built.context_length is None else built.context_length
    drafter = DraftModel(
        built.executor,
        DraftLimits(
            vocab_size=min(draft.spec.vocab_size, limits.vocab_size),
            context_length=min(longest, limits.max_sequence_tokens),
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_tokens=MAX_TOKENS,
            least_chance=least_chance,
        ),
    )
    return drafter, built
