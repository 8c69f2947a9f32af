"""Every parameter of a generation has a flag, a variable and a key, and the flag counts most."""

from __future__ import annotations

import dataclasses
import json

import pytest

from control_plane.core.generation_params import GenerationParams
from hetero_infer.cli import ALL_OPTIONS, main
from hetero_infer.commands.client_options import NOT_CHATTED, chat_options, complete_options
from hetero_infer.config import Settings
from hetero_infer.generation_config import GenerationConfig
from planes.errors import ConfigError
from planes.settings import settings_of

PARAMS = {field.name for field in dataclasses.fields(GenerationParams)}
FLAG_OF = {name: name.removeprefix("num_") for name in PARAMS - {"structured_outputs"}}
FLAGS = {*FLAG_OF.values(), "json_schema", "regex"}
"""A structure has two; a line of `complete` says all kinds."""


@pytest.fixture(autouse=True)
def _no_own_environment(monkeypatch):
    for item in settings_of(GenerationConfig):
        monkeypatch.delenv(item.env, raising=False)


def names_of(options):
    return {option.name for option in options}


def test_every_parameter_has_a_flag_wherever_it_means_something():
    assert names_of(ALL_OPTIONS) >= FLAGS
    assert names_of(complete_options(lambda _: "")) >= FLAGS
    assert FLAGS - names_of(chat_options(lambda _: "")) == NOT_CHATTED & FLAGS
    for name in PARAMS:
        assert getattr(GenerationConfig().params, name) == getattr(GenerationParams(), name)


def params_of(monkeypatch, tmp_path, *, flags=None, environ=None, file=None):
    (tmp_path / "c.json").write_text(json.dumps(file or {}))
    for name, value in (environ or {}).items():
        monkeypatch.setenv(name, value)
    settings = Settings({**(flags or {}), "config": str(tmp_path / "c.json")})
    return settings.resolve(GenerationConfig).params


WHOLE = GenerationParams(
    max_tokens=7, temperature=0.5, top_p=0.8, seed=3, ignore_eos=True, top_k=40, min_p=0.1,
    repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.5,
    logit_bias={5: 1.5, 7: -100.0}, num_logprobs=2, n=2, stop=("a,b", "[c]"),
    stop_token_ids=(1, 2), include_stop=True, num_prompt_logprobs=0, min_tokens=6,
)  # fmt: skip


def spelled(value):
    """As it stands on the command line."""
    if isinstance(value, dict):
        return [f"{token}={bias}" for token, bias in value.items()]
    return [str(each) for each in value] if isinstance(value, tuple) else str(value)


def test_each_layer_can_say_all_of_it_and_the_flag_counts_most(monkeypatch, tmp_path):
    values = {}
    for name in FLAG_OF.keys() - {"beam_width", "length_penalty", "early_stopping"}:
        values[FLAG_OF[name]] = getattr(WHOLE, name)
    file = {**values, "logit_bias": {"5": 1.5, "7": -100}}
    assert params_of(monkeypatch, tmp_path, file=file) == WHOLE
    flags = {name: spelled(value) for name, value in values.items()}
    assert params_of(monkeypatch, tmp_path, flags=flags) == WHOLE
    environ = {f"HETERO_{name.upper()}": spelled(value) for name, value in values.items()}
    environ["HETERO_LOGIT_BIAS"] = "5=1.5, 7=-100"
    environ["HETERO_STOP_TOKEN_IDS"] = "1,2"
    environ["HETERO_STOP"] = '["a,b", "[c]"]'
    other = {"stop": "x", "logit_bias": {"9": 1}, "top_k": 1}
    assert params_of(monkeypatch, tmp_path, environ=environ, file=other) == WHOLE
    given = params_of(
        monkeypatch, tmp_path, flags={"stop": ["y"], "top_k": "2"}, environ=environ, file=other
    )
    assert given == dataclasses.replace(WHOLE, stop=("y",), top_k=2)
    monkeypatch.setenv("HETERO_STOP", "[INST]")  # no JSON: it is the text
    assert params_of(monkeypatch, tmp_path).stop == ("[INST]",)


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ({"stop": 5}, "must be text, or a list of texts, got 5"),
        ({"stop": {"a": 1}}, "must be text, or a list of texts, got {'a': 1}"),
        ({"stop_token_ids": [True]}, "must be token ids with commas between them, got True"),
        ({"stop_token_ids": "1,,2"}, "must be token ids with commas between them, got ''"),
        ({"logit_bias": ["5"]}, "must be TOKEN=BIAS, several with commas between them, got '5'"),
        ({"logit_bias": {"x": 1}}, "got 'x=1'"),
    ],
)
def test_what_is_no_such_list_is_named_with_its_origin(monkeypatch, tmp_path, file, what):
    with pytest.raises(ConfigError) as caught:
        params_of(monkeypatch, tmp_path, file=file)
    (name,) = file
    assert caught.value.message.startswith(f"{name} (from ")
    assert caught.value.message.endswith(what)


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--top-k=-1"], "top_k (from --top-k) must be at least 0, got -1"),
        (["--min-tokens=9", "--max-tokens=8"], "min_tokens must be at most max_tokens (8), got 9"),
        (["--min-p=2"], "min_p (from --min-p) must be at most 1, got 2"),
        (["--presence-penalty=3"], "must be at most 2.0, got 3"),
        (["--stop="], "stop must be texts of 1 to 256 characters, got one of 0"),
        (["--stop=a"] * 17, "stop must have at most 16 texts, got 17"),
        (["--logit-bias=5=101"], "logit_bias must be in -100.0 to 100.0, got 101.0 for token 5"),
        (["--logit-bias=5"], "logit_bias (from --logit-bias) must be TOKEN=BIAS"),
        (["--logprobs=21", "--json"], "logprobs (from --logprobs) must be at most 20, got 21"),
        (["--json-schema=nowhere.json"], "json_schema: must be an object as JSON, or a file"),
        (['--json-schema={"type":'], "json_schema: not valid JSON: Expecting value: line 1"),
        (["--json-schema={}", "--regex=a"], "got json and regex"),
        (["--logprobs=1"], "--logprobs is told with --json only"),
    ],
)
def test_a_parameter_out_of_range_is_one_line_and_status_2(capsys, argv, what):
    assert main(["--input", "x", *argv]) == 2
    printed = capsys.readouterr()
    assert what in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_a_structure_reaches_the_server(server, capsys, tmp_path):
    prompt, schema = tmp_path / "prompt", tmp_path / "schema.json"
    prompt.write_text("hello")
    schema.write_text('{"type": "array", "items": {"enum": ["x", "yz"]}, "minItems": 2}')
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"prompt": "hello", "structured_outputs": {"choice": ["maybe"]}}\n'
        '{"prompt": "hello", "structured_outputs": {"json": {"const": 5}}}\n'
        '{"prompt": "hello", "structured_outputs": {"yaml": "x"}}\n'
    )

    def texts(*argv):
        main(["complete", f"--target={server}", "--seed=3", "--max-tokens=90", *map(str, argv)])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    (found,) = texts("--regex=[a-c]{3}!", prompt)
    assert (len(found["text"]), found["finish_reason"]) == (4, "stop")
    (found,) = texts(f"--json-schema={schema}", prompt)
    assert set(json.loads(found["text"])) <= {"x", "yz"}
    found = sorted(texts("--input-file", lines), key=lambda result: result["id"])
    first, second, wrong = found
    assert (first["text"], second["text"]) == ("maybe", "5")
    assert "structured_outputs must be an object with one of" in wrong["error"]["message"]


def test_flags_reach_the_server(server, capsys, tmp_path):
    prompt = tmp_path / "prompt"
    prompt.write_text("hello")
    asked = [f"--target={server}", "--seed=3", "--ignore-eos", "--max-tokens=40", str(prompt)]

    def result(*argv):
        assert main(["complete", *asked, *argv]) == 0
        return json.loads(capsys.readouterr().out)

    plain = result()
    first, second = plain["text"][10:12], plain["text"][20:22]
    stopped = result(f"--stop={second}", f"--stop={first}", "--logprobs=1")
    assert plain["text"].startswith(stopped["text"] + first)
    assert (stopped["finish_reason"], stopped["matched_stop"]) == ("stop", first)
    assert len(stopped["logprobs"][0]["top_logprobs"]) == 1
    assert result(f"--stop-token-ids={plain['token_ids'][3]}")["finish_reason"] == "stop"
