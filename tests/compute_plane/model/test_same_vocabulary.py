"""One model can guess for another if their tokens are the same texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from compute_plane.model.assets import ModelAssets
from compute_plane.model.same_vocabulary import check_same_vocabulary
from planes.errors import ConfigError

WORDS = [f"word{number}" for number in range(200)]


def assets(tokenizer_json: bytes, name: str = "big") -> ModelAssets:
    return ModelAssets(
        tokenizer_json=tokenizer_json,
        chat_template="",
        bos_token_id=None,
        eos_token_ids=(0,),
        pad_token_id=None,
        add_bos_token=False,
        model_name=name,
    )


def tokenizer(
    vocabulary: object, added: Mapping[int, str] | None = None, **fields: object
) -> bytes:
    value: dict[str, object] = {"model": {"vocab": vocabulary}, **fields}
    if added is not None:
        value["added_tokens"] = [{"id": token, "content": text} for token, text in added.items()]
    return json.dumps(value).encode()


def merged(texts: Sequence[str], added: Mapping[int, str] | None = None, first: int = 0) -> bytes:
    """Return a tokenizer of the BPE kind, whose vocabulary is an object."""
    return tokenizer({text: first + at for at, text in enumerate(texts)}, added)


def unigram(
    texts: Sequence[str], added: Mapping[int, str] | None = None, score: float = 0
) -> bytes:
    """Return a tokenizer of the unigram kind, whose vocabulary is a list."""
    return tokenizer([[text, score - at] for at, text in enumerate(texts)], added)


def renamed(texts: Sequence[str], tokens: Sequence[int]) -> list[str]:
    return [f"other{at}" if at in tokens else text for at, text in enumerate(texts)]


def check(model: bytes, draft: bytes, field: str = "draft_model") -> None:
    check_same_vocabulary(assets(model), assets(draft, "small"), field)


def refusal(model: bytes, draft: bytes, field: str = "draft_model") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(model, draft, field)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: small must have the tokens of big; ")
    return caught.value


def test_equal_bytes_are_the_same_whatever_they_say() -> None:
    check(merged(WORDS), merged(WORDS))
    check(b"", b"")
    check(b"{not even JSON", b"{not even JSON")


@pytest.mark.parametrize("kind", [merged, unigram])
def test_the_same_tokens_are_the_same_in_a_file_that_says_more_or_other_things(kind) -> None:
    model = json.loads(kind(WORDS))
    check(kind(WORDS), json.dumps({**model, "normalizer": None}, indent=1).encode())


def test_a_vocabulary_in_another_order_is_the_same_if_the_ids_are() -> None:
    other = {text: token for token, text in reversed(list(enumerate(WORDS)))}
    check(merged(WORDS), tokenizer(other))


def test_scores_are_no_part_of_a_text() -> None:
    check(unigram(WORDS), unigram(WORDS, score=-3.5))


def test_both_kinds_of_vocabulary_say_the_same() -> None:
    check(merged(WORDS), unigram(WORDS))
    check(unigram(WORDS), merged(WORDS))


@pytest.mark.parametrize("kind", [merged, unigram])
def test_tokens_with_other_ids_are_refused(kind) -> None:
    message = refusal(kind(WORDS), kind(WORDS[::-1])).message
    assert "200 of 200 differ, the first is 0: 'word199' instead of 'word0'" in message


@pytest.mark.parametrize("kind", [merged, unigram])
@pytest.mark.parametrize("tokens", [[], [5], [198, 199]])
def test_a_few_reserved_tokens_may_be_named_otherwise(kind, tokens: list[int]) -> None:
    check(kind(WORDS), kind(renamed(WORDS, tokens)))
    check(kind(renamed(WORDS, tokens)), kind(WORDS))


@pytest.mark.parametrize("kind", [merged, unigram])
@pytest.mark.parametrize("field", ["draft_model", "another"])
def test_more_than_a_few_are_refused_with_their_number_and_the_first(kind, field: str) -> None:
    message = refusal(kind(WORDS), kind(renamed(WORDS, [150, 30, 199])), field).message
    assert "3 of 200 differ, the first is 30: 'other30' instead of 'word30'" in message


def test_the_first_token_is_that_with_the_least_id_wherever_it_stands() -> None:
    ids = [*range(102_400, 1024, -1024), 1023]
    model, draft = ({f"{word}{token}": token for token in ids} for word in ("word", "other"))
    message = refusal(tokenizer(model), tokenizer(draft)).message
    assert "100 of 100 differ, the first is 1023: 'other1023' instead of 'word1023'" in message


def test_added_tokens_are_tokens_of_the_model() -> None:
    model = {200: "<user>", 201: "<tool>", 202: "<end>"}
    check(merged(WORDS, model), merged([*WORDS, *model.values()]))
    draft = {202: "<stop>", 201: "<call>", 200: "<human>"}
    for kind in (merged, unigram):
        message = refusal(kind(WORDS, model), kind(WORDS, draft)).message
        assert "3 of 203 differ, the first is 200: '<human>' instead of '<user>'" in message


def test_an_added_token_goes_before_that_of_the_vocabulary() -> None:
    given = {number: f"<{number}>" for number in range(3)}
    check(merged(WORDS, given), merged([*given.values(), *WORDS[3:]]))
    message = refusal(merged(WORDS), merged(WORDS, given)).message
    assert "3 of 200 differ, the first is 0: '<0>' instead of 'word0'" in message


def test_only_the_tokens_that_both_have_count() -> None:
    few = WORDS[:40]
    for kind in (merged, unigram):
        check(kind(WORDS), kind(few))
        check(kind(few), kind(WORDS))
        # One of 40 is too many, of 200 it would not be.
        message = refusal(kind(WORDS), kind(renamed(few, [39]))).message
        assert "1 of 40 differ, the first is 39: 'other39' instead of 'word39'" in message


def test_models_without_a_token_in_common_are_refused() -> None:
    model, draft = merged(WORDS), merged(WORDS, first=len(WORDS))
    assert refusal(model, draft).message.endswith("they have none in common")
    assert refusal(model, merged([])).message.endswith("they have none in common")
