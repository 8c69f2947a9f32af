"""Variables of chat templates: bounded, JSON, and none that the server itself sets."""

from __future__ import annotations

import json

import pytest

from control_plane.config import ControlPlaneConfig
from control_plane.text.template_kwargs import (
    MAX_DEPTH,
    MAX_VARIABLES,
    OWN_VARIABLES,
    check_template_kwargs,
    read_template_kwargs,
)
from planes.errors import ConfigError, ValidationError
from planes.settings import Layers, resolve


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"enable_thinking": False, "budget": 3, "name": "é", "none": None, "share": 0.5},
        {"documents": [{"title": "a", "text": "b"}]},
        {"deep": nested(MAX_DEPTH - 1)},
        {str(number): 0 for number in range(MAX_VARIABLES)},
    ],
)
def test_a_few_values_are_taken(given):
    check_template_kwargs(given)
    assert json.loads(read_template_kwargs(given)) == given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({name: 1}, f"must not set '{name}': the server does") for name in sorted(OWN_VARIABLES)),
        ({"deep": nested(MAX_DEPTH)}, "not be nested more than 16 deep"),
        ({"deep": nested(100_000)}, "not be nested more than 16 deep"),
        ({"x": "é" * (16 << 10)}, "at most 32768 bytes as JSON, got 327"),
        ({str(number): 0 for number in range(MAX_VARIABLES + 1)}, "at most 64 entries, got 65"),
        ({"x": float("nan")}, "must be JSON values"),
        ({"x": {1, 2}}, "must be JSON values"),
    ],
)
def test_more_is_refused_by_name(given, said):
    with pytest.raises(ValidationError, match=said) as caught:
        check_template_kwargs(given)
    assert caught.value.field == "chat_template_kwargs"


def test_the_server_has_defaults_from_a_flag_a_variable_or_a_file():
    def read(**layers):
        given = Layers(**{name: {"compute": "unix:x", **layer} for name, layer in layers.items()})
        return resolve(ControlPlaneConfig, given).chat_template_kwargs

    variables = {"enable_thinking": False}
    text = json.dumps(variables)
    assert read(flags={"chat_template_kwargs": text}) == text
    assert read(file={"chat_template_kwargs": variables}) == text
    assert read(flags={"chat_template_kwargs": [text, '{"x": 1}']}) == json.dumps(
        {**variables, "x": 1}
    )
    layers = Layers(
        environ={"HETERO_CHAT_TEMPLATE_KWARGS": text},
        file={"compute": "unix:x", "chat_template_kwargs": {"x": 2}},
    )
    assert resolve(ControlPlaneConfig, layers).chat_template_kwargs == text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{enable_thinking: false}", "must be a JSON object, such as"),
        ("[1]", "must be a JSON object"),
        ('{"x": NaN}', "NaN is not in JSON"),
        ("[" * 100_000, "not nested so deeply"),
        (7, "must be a JSON object, got 7"),
        ('{"messages": []}', "must not set 'messages'"),
    ],
)
def test_defaults_that_are_none_are_refused_when_the_server_is_configured(given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        ControlPlaneConfig(compute="unix:x", chat_template_kwargs=given)
    assert caught.value.field == "chat_template_kwargs"
