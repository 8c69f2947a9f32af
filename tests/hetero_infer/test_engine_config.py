from __future__ import annotations

import dataclasses
import json
import math
import socket

import pytest

from compute_plane.config import KNOWN_ELSEWHERE as KNOWN_TO_COMPUTE
from compute_plane.config import ComputePlaneConfig
from compute_plane.config import load_config as load_compute_config
from control_plane.config import OTHER_KEYS as KNOWN_TO_CONTROL
from control_plane.config import ControlPlaneConfig
from control_plane.config import load_config as load_control_config
from hetero_infer.config import (
    ALL_CONFIGS,
    WIRING,
    EngineConfig,
    GenerationConfig,
    ServeConfig,
    Settings,
    child_environment,
)
from planes.address import Address
from planes.errors import ConfigError
from planes.settings import Layers, resolve, settings_of

SEED_DEFAULTS = {
    "block_size": 16,
    "max_num_blocks": 1024,
    "max_batch_size": 32,
    "max_num_seqs": 256,
    "max_model_len": 2048,
    "max_total_tokens": 4096,
    "memory_threshold": 0.9,
}


@pytest.fixture(scope="module", autouse=True)
def _no_own_environment():
    with pytest.MonkeyPatch.context() as patch:
        for cls in ALL_CONFIGS:
            for item in settings_of(cls):
                patch.delenv(item.env, raising=False)
        patch.delenv("HETERO_CONFIG", raising=False)
        yield


def test_the_defaults_are_those_of_the_documents():
    config = EngineConfig()
    assert {key: getattr(config, key) for key in SEED_DEFAULTS} == SEED_DEFAULTS
    generation = GenerationConfig()
    assert (generation.max_tokens, generation.temperature, generation.top_p) == (100, 1.0, 0.9)
    assert (ServeConfig().grpc_host, ServeConfig().grpc_port) == ("127.0.0.1", 50051)
    for cls in (EngineConfig, ServeConfig):
        cls().validate()


def test_some_values_are_given_and_the_others_keep_their_defaults():
    config = EngineConfig(block_size=32, max_num_blocks=2048, max_batch_size=64)
    config.validate()
    assert (config.block_size, config.max_num_blocks, config.max_batch_size) == (32, 2048, 64)
    assert config.max_model_len == 2048
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 8


def test_a_file_may_have_any_of_the_keys(tmp_path):
    path = tmp_path / "config.json"
    values = {"block_size": 16, "max_num_blocks": 1024, "max_batch_size": 32}
    path.write_text(json.dumps({**values, "memory_threshold": 0.9}))
    assert EngineConfig.from_file(path) == EngineConfig()
    path.write_text('{"block_size": 8, "model": "m.gguf"}')
    assert EngineConfig.from_file(str(path)) == EngineConfig(block_size=8, model="m.gguf")
    path.write_text("{}")
    assert EngineConfig.from_file(path) == EngineConfig()


def test_the_example_file_holds_the_defaults(request):
    path = request.config.rootpath / "config.example.json"
    assert json.loads(path.read_text()) == SEED_DEFAULTS
    assert EngineConfig.from_file(path) == EngineConfig()


def test_an_unknown_key_of_a_file_is_a_warning_with_its_name(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"block_sise": 8, "block_size": 32, "max_tokens": 5, "grpc_port": 1}')
    with pytest.warns(UserWarning, match="'block_sise' is ignored: did you mean 'block_size'"):
        assert EngineConfig.from_file(path).block_size == 32


NUMERIC_SETTINGS = {
    (item.name): (cls, item)
    for cls in (ServeConfig, GenerationConfig)
    for item in settings_of(cls)
    if item.kind in (int, float)
}


def bad_values(item):
    yield from ("many", "", [], {}, True, math.nan, math.inf, -math.inf)
    if item.rule.minimum is None or item.rule.minimum >= 0:
        yield -1
    if item.rule.above == 0 or (item.rule.minimum or 0) > 0:
        yield 0
    if item.kind is int:
        yield 1.5
    if item.rule.maximum is not None:
        yield item.rule.maximum + 1
    if not item.optional:
        yield None


BAD_CASES = [
    pytest.param(cls, item, value, id=f"{name}={value!r}")
    for name, (cls, item) in NUMERIC_SETTINGS.items()
    for value in bad_values(item)
]


@pytest.mark.parametrize(("cls", "item", "value"), BAD_CASES)
def test_every_numeric_key_of_a_file_refuses_every_kind_of_bad_value(cls, item, value):
    with pytest.raises(ConfigError) as caught:
        resolve(cls, Layers(file={item.name: value}, file_name="c.json"))
    message = caught.value.message
    assert message.startswith(f"{item.name} (from c.json) must ")
    assert value is None or message.endswith((f"got {value!r}", f"got {value}"))


@pytest.mark.parametrize("text", ["0x10", "nan", "inf", "-3000000000", "1e", "None"])
@pytest.mark.parametrize("name", NUMERIC_SETTINGS)
def test_every_numeric_flag_refuses_bad_text(name, text):
    cls, item = NUMERIC_SETTINGS[name]
    with pytest.raises(ConfigError, match=rf"^{name} \(from {item.flag}\) must .*got '?{text}'?$"):
        resolve(cls, Layers(flags={name: text}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size"),
        ({"memory_threshold": math.nan}, "memory_threshold"),
        ({"memory_threshold": 1.5}, "memory_threshold"),
        ({"max_num_blocks": "1024"}, "max_num_blocks"),
        ({"dtype": "int3"}, "dtype .* one of auto, float32, bfloat16, float16, got 'int3'"),
        ({"device": "tpu"}, "device"),
        (
            {"executor": "quantum"},
            "executor must be auto, cpu, cuda, simulated or module:attribute",
        ),
        ({"model": None}, "model"),
    ],
)
def test_validate_names_the_key_of_a_bad_value(changes, message):
    config = EngineConfig(**changes)
    with pytest.raises(ConfigError, match=message):
        config.validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grpc_host": "0.0.0.0"}, "0.0.0.0:50051 can be reached from other machines"),
        ({"listen": "nowhere"}, "listen: expected unix:PATH or HOST:PORT, got 'nowhere'"),
        ({"compute": "10.0.0.1:1"}, "10.0.0.1:1 can be reached from other machines"),
        ({"grpc_port": 65536}, "grpc_port"),
    ],
)
def test_serve_checks_addresses_before_anything_is_started(changes, message):
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**changes).validate()


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        ({"http_host": "nohost.invalid"}, "nohost.invalid"),
        ({"grpc_host": "nohost.invalid"}, "nohost.invalid"),
        ({"listen": "nohost.invalid:5"}, "nohost.invalid"),
        ({"compute": "nohost.invalid:5"}, "nohost.invalid"),
        ({"http_host": f"{'x' * 70}.invalid"}, f"{'x' * 70}.invalid"),
    ],
)
def test_a_host_that_nobody_knows_is_not_called_reachable(monkeypatch, changes, host):
    lookup = socket.getaddrinfo

    def unknown(name, *args, **options):
        if name == "nohost.invalid":  # whether there is a network or not
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return lookup(name, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=f": the host {host} is not known: "):
        ServeConfig(**changes).validate()


def test_serve_may_be_reached_from_other_machines_when_that_is_meant():
    ServeConfig(grpc_host="0.0.0.0", allow_insecure=True).validate()


def test_flag_beats_environment_beats_file_beats_default(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    path.write_text('{"block_size": 8, "max_num_seqs": 7, "max_tokens": 6, "top_p": 0.5}')
    monkeypatch.setenv("HETERO_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("HETERO_MAX_TOKENS", "10")
    settings = Settings({"config": str(path), "max_tokens": "11", "block_size": None})
    config, generation = settings.resolve(EngineConfig), settings.resolve(GenerationConfig)
    assert config == EngineConfig(block_size=8, max_num_seqs=9)
    assert (generation.max_tokens, generation.top_p) == (11, 0.5)
    assert settings.gives("block_size")
    assert settings.gives("max_num_seqs")
    assert not settings.gives("max_batch_size")


def test_the_environment_may_name_the_file(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    path.write_text('{"block_size": 8, "zebra": 1}')
    monkeypatch.setenv("HETERO_CONFIG", str(path))
    settings = Settings({})
    assert settings.resolve(EngineConfig).block_size == 8
    assert settings.in_vain() == [f"{path}: unknown key 'zebra' is ignored"]


def test_unknown_keys_and_variables_come_with_what_was_meant(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    path.write_text('{"grpcport": 1, "logprobs": 1}')
    monkeypatch.setenv("HETERO_CONFIG", str(path))
    monkeypatch.setenv("HETERO_API_TOKEN", "x")
    monkeypatch.setenv("HETERO_GRPCPORT", "1")
    monkeypatch.setenv("HETERO_ZEBRA", "1")
    assert Settings({}).in_vain() == [
        f"{path}: unknown key 'grpcport' is ignored: did you mean 'grpc_port'?",
        "HETERO_GRPCPORT is ignored, no setting is called so: did you mean HETERO_GRPC_PORT?",
        "HETERO_ZEBRA is ignored, no setting is called so",
    ]


def test_either_plane_names_variables_that_nobody_knows_and_none_of_the_other(monkeypatch):
    for name in ("GRPC_PORT", "BLOCK_SIZE", "TEMPERATURE", "API_TOKEN", "LOG_LEVL"):
        monkeypatch.setenv(f"HETERO_{name}", "1" if name != "API_TOKEN" else "x")
    line = "HETERO_LOG_LEVL is ignored, no setting is called so: did you mean HETERO_LOG_LEVEL?"
    control = load_control_config(["--compute=unix:a"])
    assert control.unknown_variables == (line,)
    assert load_compute_config(["--listen=unix:a"]).unknown_variables == (line,)


def names(cls):
    return {item.name for item in settings_of(cls)}


def test_the_front_door_has_every_setting_of_both_planes():
    missing = (names(ControlPlaneConfig) | names(ComputePlaneConfig)) - names(ServeConfig)
    assert missing == {"ready_fd", "lifeline_fd"}
    assert (names(ControlPlaneConfig) | names(ComputePlaneConfig)) - names(EngineConfig) == WIRING


def test_no_plane_takes_a_key_of_the_other_for_a_mistake():
    everything = set().union(*map(names, ALL_CONFIGS)) - WIRING
    assert everything <= names(ControlPlaneConfig) | KNOWN_TO_CONTROL
    assert everything <= names(ComputePlaneConfig) | KNOWN_TO_COMPUTE


def test_both_planes_get_on_their_command_lines_what_the_front_door_was_told():
    config = ServeConfig(
        block_size=8,
        max_num_blocks=99,
        max_num_seqs=5,
        memory_threshold=0.25,
        model="a b.gguf",
        verify_model=False,
        num_threads=3,
        grpc_port=0,
        http_port=0,
        shutdown_timeout=4.5,
        log_level="error",
    )
    socket = Address(path="/run/x/compute.sock")
    compute = load_compute_config(config.compute_plane_flags(socket)).config
    control = load_control_config(config.control_plane_flags(socket, *config.listen_flags())).config
    for plane in (compute, control):
        for name in names(type(plane)) & names(EngineConfig):
            assert getattr(plane, name) == getattr(config, name), name
    assert compute.listen_address == socket
    assert control.compute_addresses == (socket,)
    assert str(control.listen_address) == "127.0.0.1:0"
    assert str(control.http_address) == "127.0.0.1:0"
    own = load_control_config(config.control_plane_flags(socket)).config
    assert own.http_address is None  # what the front door starts for itself alone


def test_a_child_gets_the_environment_without_settings_and_imports_what_its_parent_does(
    monkeypatch,
):
    monkeypatch.setenv("HETERO_BLOCK_SIZE", "8")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    monkeypatch.setattr("sys.path", ["/a", "", "/a"])
    monkeypatch.chdir("/")
    environ = child_environment("/z")
    assert "HETERO_BLOCK_SIZE" not in environ
    assert environ["SOMETHING_ELSE"] == "1"
    assert environ["PYTHONPATH"] == "/a:/:/z"
