"""Adapters by their names: the engine in Python, the client, and what the command line asks."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest

from hetero_infer import (
    Client,
    EngineConfig,
    GenerationParams,
    InferenceEngine,
    ModelNotFoundError,
)
from hetero_infer.cli import main
from hetero_infer.commands.server import own_server
from planes.errors import ConfigError
from tests.hetero_infer.small_engine import SMALL

LORA = "poet=x,lawyer/v2=y"
NAMES = ("", "poet", "lawyer/v2")
PARAMS = GenerationParams(max_tokens=12, seed=3, temperature=0.7, ignore_eos=True)
PROMPT = "all begin with the same words"
FLAGS = ("--seed=3", "--max-tokens=12", "--ignore-eos", "--temperature=0.7")


@pytest.fixture(scope="module")
def engine():
    with InferenceEngine(dataclasses.replace(SMALL, lora=LORA)) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = EngineConfig(executor="simulated", max_model_len=200, lora=LORA)
    with own_server(config, lambda _: None, f"--chat-template={template}") as server:
        yield server.address


@pytest.fixture(scope="module")
def texts(server):
    """What each name answers."""
    with Client(server) as client:
        return [client.generate(PROMPT, PARAMS, model=name).text for name in NAMES]


@pytest.fixture
def command(server, capsys, monkeypatch):
    """Run a command in this process; what it printed, and what it said."""

    def run(*argv, status=0, stdin=""):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        assert main([argv[0], f"--target={server}", *argv[1:]]) == status
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


def test_side_by_side_in_python_each_has_the_text_that_it_has_alone(engine):
    alone = []
    for name in NAMES:
        engine.submit_request(PROMPT, PARAMS, model=name)
        alone += [done.output_text for done in engine.run()]
    assert len(set(alone)) == 3
    asked = {engine.submit_request(PROMPT, PARAMS, model=NAMES[n % 3]): n % 3 for n in range(12)}
    found = engine.run()
    assert len(found) == 12
    for done in found:
        assert done.output_text == alone[asked[done.request_id]]
        assert done.cached_tokens == 28  # all but the last token, in blocks of its own


def test_embeddings_in_python_are_those_of_the_adapter(engine):
    found = [engine.embed(["hello", "there"], model=name) for name in NAMES]
    assert len({tuple(one.values) for each in found for one in each}) == 6
    assert engine.embed(["hello", "there"], model="simulated")[1].values == found[0][1].values


def test_a_name_that_there_is_not_is_refused_in_python(engine):
    told = "'poems' is not loaded, 'simulated' is, with the adapters poet, lawyer/v2$"
    with pytest.raises(ModelNotFoundError, match=told):
        engine.submit_request(PROMPT, PARAMS, model="poems")
    with pytest.raises(ModelNotFoundError, match=told):
        engine.embed([PROMPT], model="poems")
    assert not engine.has_pending_work()


def test_what_is_no_list_of_adapters_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"lora must be NAME=PATH"):
        EngineConfig(executor="simulated", lora="poet").validate()


def test_the_client_lists_models_and_is_answered_in_the_adapters_name(server, texts):
    assert len(set(texts)) == 3
    with Client(server) as client:
        listed = client.list_models()
        assert [(one.model, one.base_model) for one in listed] == [
            ("simulated", ""), ("poet", "simulated"), ("lawyer/v2", "simulated"),
        ]  # fmt: skip
        assert client.model_info("poet") == listed[1]
        with client.stream(PROMPT, PARAMS, model="poet", resume=True) as stream:
            assert stream.answer().text == texts[1]
            assert stream.answer().started.model == "poet"


def test_complete_asks_the_adapter_of_a_line_or_that_of_the_command(command, texts, tmp_path):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": PROMPT}, {"prompt": PROMPT, "model": "lawyer/v2"},
             {"prompt": PROMPT, "model": "simulated"}]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, lines)))
    argv = ("complete", *FLAGS, f"--input-file={file}", "--ordered")
    _, said = command(*argv, "--adapter=poet", f"--output={out}")
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["text"] for one in answers] == [texts[1], texts[2], texts[0]]
    assert [one["model"] for one in answers] == ["poet", "lawyer/v2", "simulated"]
    plain = [json.loads(line) for line in command(*argv)[0].splitlines()]
    same = [one["request_hash"] == other["request_hash"]
            for one, other in zip(answers, plain, strict=True)]  # fmt: skip
    assert same == [False, True, True]
    assert "warning" not in said + command(*argv, "--adapter=poet", f"--output={out}")[1]


def test_chat_and_embed_ask_the_adapter_they_are_told(command, texts):
    printed, _ = command("chat", *FLAGS, "--adapter=lawyer/v2", stdin=f"{PROMPT}\n")
    assert printed == texts[2] + "\n"
    found = [command("embed", "--input=hi", *flags)[0] for flags in ([], ["--adapter=poet"])]
    assert len(set(found)) == 2


@pytest.mark.parametrize("argv", [("chat",), ("embed", "--input=hi"), ("complete", __file__)])
def test_commands_say_which_adapters_there_are_before_they_ask_anything(command, argv):
    printed, said = command(*argv, "--adapter=x", status=2)
    assert printed == ""
    told = "model 'x' is not loaded, 'simulated' is, with the adapters poet, lawyer/v2"
    assert said.splitlines()[-1] == f"hetero-infer: error: {told}"


@pytest.mark.wide
def test_one_text_is_asked_of_an_adapter_and_so_it_says(capsys, texts):
    argv = ["--input", PROMPT, *FLAGS, "--executor=simulated", f"--lora={LORA}", "--json"]
    assert main([*argv, "--adapter=poet"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["model"]) == (texts[1], "poet")
