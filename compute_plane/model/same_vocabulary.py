"""Whether two models mean the same texts by the same tokens."""

from __future__ import annotations

import json
from typing import Final

from compute_plane.model.assets import ModelAssets
from planes.errors import ConfigError

MOST_OTHERS: Final = 0.01
"""Share of tokens that may have other texts: reserved ones are named as each model likes."""


def check_same_vocabulary(assets: ModelAssets, others: ModelAssets, field: str) -> None:
    """Raise ConfigError for `field` unless nearly all tokens that both have are the same text."""
    if assets.tokenizer_json == others.tokenizer_json:
        return
    texts, other_texts = (_texts(each.tokenizer_json) for each in (assets, others))
    shared = texts.keys() & other_texts.keys()
    differing = sorted(token for token in shared if texts[token] != other_texts[token])
    if shared and len(differing) <= MOST_OTHERS * len(shared):
        return
    raise ConfigError(
        f"{field}: {others.model_name} must have the tokens of {assets.model_name}; "
        + (
            f"{len(differing)} of {len(shared)} differ, the first is {differing[0]}: "
            f"{other_texts[differing[0]]!r} instead of {texts[differing[0]]!r}"
            if differing
            else "they have none in common"
        ),
        field=field,
    )


def _texts(tokenizer_json: bytes) -> dict[int, str]:
    """Return the text of each token in a tokenizer.json, as far as it is said there."""
    tokenizer = json.loads(tokenizer_json)
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        texts = {token: text for text, token in vocabulary.items()}
    else:  # of the unigram kind: texts with their scores
        texts = {token: entry[0] for token, entry in enumerate(vocabulary)}
    for added in tokenizer.get("added_tokens", ()):
        texts[added["id"]] = added["content"]
    return texts
