from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from planes.default_int import DefaultInt
from planes.errors import ConfigError
from planes.settings import (
    MAX_CONFIG_FILE_BYTES,
    Layers,
    Rule,
    add_arguments,
    check,
    read_config_file,
    resolve,
    setting,
    settings_of,
    to_flags,
    unknown_keys,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    rows: int = setting(4, help="rows, 100 % of them", minimum=1, maximum=64)
    share: float = setting(0.5, help="share", above=0, maximum=1)
    name: str = setting("x", help="name")
    kind: str = setting("a", help="kind", choices=("a", "b"))
    path: str | None = setting(None, help="path")
    port: int | None = setting(None, help="port", minimum=0)
    is_loud: bool = setting(False, help="loud")
    undeclared: int = 7


def test_every_layer_beats_the_ones_below_it():
    flags, environ, file = {"rows": "1"}, {"HETERO_ROWS": "2"}, {"rows": 3}
    assert resolve(Sample, Layers(flags=flags, environ=environ, file=file)).rows == 1
    assert resolve(Sample, Layers(environ=environ, file=file)).rows == 2
    assert resolve(Sample, Layers(file=file)).rows == 3
    assert resolve(Sample, Layers()).rows == 4


def test_a_flag_not_given_and_an_empty_variable_do_not_hide_the_layers_below():
    layers = Layers(flags={"rows": None}, environ={"HETERO_ROWS": ""}, file={"rows": 9})
    assert resolve(Sample, layers).rows == 9


def test_text_of_flags_and_environment_becomes_the_declared_type():
    environ = {
        "HETERO_ROWS": " 8 ",
        "HETERO_SHARE": "2.5e-1",
        "HETERO_IS_LOUD": "Yes",
        "HETERO_PORT": "0",
        "HETERO_PATH": "p",
    }
    assert resolve(Sample, Layers(environ=environ)) == Sample(
        rows=8, share=0.25, is_loud=True, port=0, path="p"
    )


def test_an_integer_is_a_legal_float_and_a_null_a_legal_optional():
    assert resolve(Sample, Layers(file={"share": 1, "path": None})).share == 1.0


BAD_VALUES = [
    ("rows", 0, "at least 1, got 0"),
    ("rows", -3, "at least 1, got -3"),
    ("rows", 65, "at most 64, got 65"),
    ("rows", 1.0, "an integer, got 1.0"),
    ("rows", "four", "an integer, got 'four'"),
    ("rows", "4", "an integer, got '4'"),
    ("rows", True, "an integer, got True"),
    ("rows", None, "not be null"),
    ("rows", [1], "an integer, got [1]"),
    ("rows", math.nan, "an integer, got nan"),
    ("rows", math.inf, "an integer, got inf"),
    ("share", 0, "greater than 0, got 0"),
    ("share", -0.5, "greater than 0, got -0.5"),
    ("share", 1.01, "at most 1, got 1.01"),
    ("share", math.nan, "finite, got nan"),
    ("share", -math.inf, "finite, got -inf"),
    ("share", 10**400, "finite"),
    ("share", "half", "a number, got 'half'"),
    ("share", "0.5", "a number, got '0.5'"),
    ("share", False, "a number, got False"),
    ("name", 3, "a string, got 3"),
    ("name", "", "not be empty"),
    ("kind", "c", "one of a, b, got 'c'"),
    ("is_loud", 1, "true or false, got 1"),
    ("is_loud", "maybe", "true or false, got 'maybe'"),
    ("is_loud", "true", "true or false, got 'true'"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD_VALUES)
def test_a_bad_value_in_the_file_is_refused_by_key_file_and_value(key, value, message):
    with pytest.raises(ConfigError) as caught:
        resolve(Sample, Layers(file={key: value}, file_name="my.json"))
    assert caught.value.field == key
    assert caught.value.message.startswith(f"{key} (from my.json) must ")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("rows", "0"),
        ("rows", "1_0"),
        ("rows", "٣"),
        ("rows", ""),
        ("rows", "9" * 5000),
        ("share", "nan"),
        ("share", "-Infinity"),
        ("share", "0_1"),
        ("share", "1e400"),
        ("share", "٠.٥"),
    ],
)
def test_a_bad_text_is_refused_by_key_and_flag(key, text):
    with pytest.raises(ConfigError) as caught:
        resolve(Sample, Layers(flags={key: text}))
    assert caught.value.message.startswith(f"{key} (from --{key}) must ")


def test_all_problems_of_all_layers_are_reported_together():
    layers = Layers(flags={"rows": "0"}, environ={"HETERO_SHARE": "2"}, file={"kind": "z"})
    with pytest.raises(ConfigError) as caught:
        resolve(Sample, layers)
    for part in ("rows (from --rows)", "share (from HETERO_SHARE)", "kind (from config file)"):
        assert part in caught.value.message
    assert "\n" not in caught.value.message


def test_a_configuration_built_in_python_is_checked_by_type_and_range():
    check(Sample(share=1))
    for bad in (Sample(rows="5"), Sample(share="0.5"), Sample(rows=0), Sample(kind="z")):
        with pytest.raises(ConfigError):
            check(bad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    blocks: int | str = setting(
        DefaultInt(9), help="blocks", minimum=1, maximum=64, words=("auto",)
    )
    place: str = setting("a", help="place", choices=("a", "b:N"), pattern="b:[0-9]")


@pytest.mark.parametrize(("given", "value"), [("auto", "auto"), ("64", 64)])
def test_a_word_may_stand_in_place_of_a_number(given, value):
    for layers in (
        Layers(flags={"blocks": given}),
        Layers(environ={"HETERO_BLOCKS": given}),
        Layers(file={"blocks": value}),
    ):
        found = resolve(Sized, layers)
        assert (found.blocks, type(found.blocks)) == (value, type(value))
        check(found)
        flags = to_flags(found)
        assert flags == [f"--blocks={value}", "--place=a"]


@pytest.mark.parametrize("given", ["automatic", "1.5", "0", "65", "", True])
def test_another_word_than_those_is_refused_with_them(given):
    with pytest.raises(ConfigError, match=r"blocks \(from config file\) must be") as caught:
        resolve(Sized, Layers(file={"blocks": given}))
    with pytest.raises(ConfigError):
        check(Sized(blocks=given))
    if not str(given).isdigit():
        assert "an integer or auto" in caught.value.message


def test_a_default_that_nobody_said_is_known_and_left_to_a_child():
    found = resolve(Sized, Layers())
    assert found == Sized(blocks=9)
    assert isinstance(found.blocks, DefaultInt)
    assert to_flags(found) == ["--place=a"]
    assert not isinstance(resolve(Sized, Layers(flags={"blocks": "9"})).blocks, DefaultInt)
    assert to_flags(Sized(blocks=9)) == ["--blocks=9", "--place=a"]


def test_a_choice_may_have_a_number():
    assert resolve(Sized, Layers(flags={"place": "b:7"})).place == "b:7"
    check(Sized(place="b:0"))
    for bad in ("b:N", "b:", "b:77", "b", "c"):
        with pytest.raises(ConfigError, match=f"place .* must be one of a, b:N, got '{bad}'"):
            resolve(Sized, Layers(flags={"place": bad}))


def test_arguments_and_flags_are_each_others_inverse():
    sample = Sample(rows=3, share=0.25, name="a b", kind="b", path="-x", port=9, is_loud=True)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, Sample)
    for config in (sample, Sample()):
        flags = vars(parser.parse_args(to_flags(config)))
        assert resolve(Sample, Layers(flags=flags)) == config


def test_only_the_named_settings_are_spelled():
    assert to_flags(Sample(), {"rows", "is_loud"}) == ["--rows=4", "--no-is-loud"]


def test_the_help_of_every_declared_setting_can_be_shown():
    parser = argparse.ArgumentParser()
    add_arguments(parser, Sample)
    text = parser.format_help()
    assert "100 % of them" in text
    assert [item.flag in text for item in settings_of(Sample)] == [True] * 7
    assert "--undeclared" not in text


def test_unknown_keys_are_those_no_class_declares():
    @dataclass(frozen=True)
    class Other:
        depth: int = setting(1, help="depth")

    assert unknown_keys({"z": 1, "rows": 1, "depth": 1, "a": 1}, Sample, Other) == ["a", "z"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "expected a JSON object, got list"),
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b" " * (MAX_CONFIG_FILE_BYTES + 1), "at most"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config_file(path)
    assert str(path) in caught.value.message
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ('{"rows": 1, "depth": 2, "rows": 1}', "rows"),
        ('{"rows": 1, "bias": {"1": 2, "2": 3, "1": 2}}', "1"),
        ('{"a": {}, "\\u0061": 1}', "a"),
    ],
)
def test_a_key_that_is_in_a_file_twice_is_refused_by_its_name(tmp_path, content, key):
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_config_file(path)
    assert caught.value.message == f"config file {path}: the key {key!r} is there twice"
    assert caught.value.field == key


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            read_config_file(path)


def test_a_file_without_end_is_not_read_to_its_end():
    with pytest.raises(ConfigError, match="at most"):
        read_config_file(Path("/dev/zero"))


def test_nan_and_infinity_of_a_file_reach_the_check(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"share": math.nan}))
    with pytest.raises(ConfigError, match=r"share .* must be finite, got nan"):
        resolve(Sample, Layers(file=read_config_file(path)))


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({}, None),
        ({"minimum": 1, "maximum": 10}, "1 to 10"),
        ({"minimum": -2.5, "maximum": 2.0}, "-2.5 to 2"),
        ({"minimum": 0}, "at least 0"),
        ({"maximum": 86400}, "at most 86400"),
        ({"above": 0, "maximum": 1}, "greater than 0, at most 1"),
        ({"above": 0.5}, "greater than 0.5"),
        ({"minimum": -(2**31), "maximum": 2**31 - 1}, "-2^31 to 2^31 - 1"),
        ({"minimum": 1, "maximum": 1 << 20}, "1 to 2^20"),
        ({"minimum": 1, "maximum": 65536}, "1 to 65536"),
    ],
)
def test_a_range_is_put_into_words_for_the_help(bounds, text):
    assert Rule(help="", **bounds).range_text == text
