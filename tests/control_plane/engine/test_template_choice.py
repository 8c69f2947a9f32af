"""Whether there is a chat template, and what is told of a model that has none, or a broken one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from control_plane.engine.template_choice import TemplateChoice
from control_plane.text.assets import ModelAssets
from control_plane.text.chat_template import MAX_TEMPLATE_CHARACTERS, NO_TEMPLATE
from control_plane.text.simple_tokenizer import SimpleTokenizer


def chosen(source: str | None):
    assets = ModelAssets("m", simple_vocab_size=259, chat_template=source)
    connected = SimpleNamespace(assets=assets, tokenizer=SimpleTokenizer())
    return TemplateChoice(None).make(connected)


def test_a_model_without_a_template_has_none():
    assert chosen(None) == (None, NO_TEMPLATE)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for m in %}", "the model's chat template is invalid: Expected an expression"),
        ("{{ messages }", "the model's chat template is invalid: unexpected '}'"),
        ("x" * (MAX_TEMPLATE_CHARACTERS + 1), "the chat template has at most 1048576 characters"),
    ],
)
def test_one_that_is_none_is_told_from_none(source, why):
    template, refusal = chosen(source)
    assert template is None
    assert refusal.startswith(why)


def test_one_that_is_one_is_used():
    template, refusal = chosen("{{ messages }}")
    assert template.source == "{{ messages }}"
    assert refusal == ""
