"""A draft model is refused where it cannot guess, or where memory is shared out without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from compute_plane.app import ComputePlane
from compute_plane.config import ComputePlaneConfig, load_config
from compute_plane.drafting import check_draft_model
from compute_plane.memory.sizing import Memory
from compute_plane.model.assets import ModelAssets
from compute_plane.model.loader import LoadedModel
from compute_plane.model.spec import ModelSpec
from planes.errors import ConfigError
from tests.compute_plane.executor.tiny_llama import (
    tiny_spec,
    with_convolutions,
    with_delta_net,
    with_mamba2,
    with_states_beside,
)

KINDS_WITH_STATES = [with_delta_net, with_convolutions, with_mamba2, with_states_beside]


def loaded(name: str, spec: ModelSpec | None = None, prefix: str = "word") -> LoadedModel:
    vocabulary = {f"{prefix}{token}": token for token in range(131)}
    assets = ModelAssets(
        tokenizer_json=json.dumps({"model": {"vocab": vocabulary}}).encode(),
        chat_template="",
        bos_token_id=None,
        eos_token_ids=(0,),
        pad_token_id=None,
        add_bos_token=False,
        model_name=name,
    )
    spec = replace(tiny_spec() if spec is None else spec, name=name)
    return LoadedModel(spec, assets, SimpleNamespace(), Path("nowhere"), None)


def refusal(draft: LoadedModel, model: LoadedModel | None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_draft_model(draft, model)
    assert caught.value.field == "draft_model"
    return caught.value.message


@pytest.mark.parametrize(
    ("field", "others"),
    [
        ("draft_model", {"executor": "simulated"}),
        ("max_num_blocks", {"max_num_blocks": "auto"}),
        ("gpu_memory_limit", {"gpu_memory_limit": 4.0}),
    ],
)
def test_what_does_not_go_with_a_draft_model_is_refused_beside_one_only(
    field: str, others: dict[str, object]
) -> None:
    ComputePlaneConfig(**others)
    with pytest.raises(ConfigError) as caught:
        ComputePlaneConfig(draft_model="small", **others)
    assert caught.value.field == field
    assert {"draft_model", *others} - {"executor"} <= set(
        caught.value.message.replace(":", " ").split()
    )


@pytest.mark.parametrize("executor", ["auto", "cpu", "cuda", "some.module:build"])
def test_a_draft_model_goes_with_executors_that_have_a_model(executor: str) -> None:
    config = ComputePlaneConfig(draft_model="small", executor=executor)
    assert config.draft_model == "small"


def test_no_model_guesses_unless_one_is_named() -> None:
    assert ComputePlaneConfig().draft_model is None
    assert load_config([]).config.draft_model is None


def test_a_draft_model_is_named_as_other_settings_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"draft_model": "of the file", "draft_p_min": 0.25}))
    config = load_config(["--config", str(file)]).config
    assert (config.draft_model, config.draft_p_min) == ("of the file", 0.25)
    monkeypatch.setenv("HETERO_DRAFT_MODEL", "of the environment")
    monkeypatch.setenv("HETERO_DRAFT_P_MIN", "0.5")
    config = load_config(["--config", str(file)]).config
    assert (config.draft_model, config.draft_p_min) == ("of the environment", 0.5)
    config = load_config(["--draft-model", "of the flag", "--draft-p-min", "0.75"]).config
    assert (config.draft_model, config.draft_p_min) == ("of the flag", 0.75)


@pytest.mark.parametrize("least", [-0.01, 1.01, 20, float("nan")])
def test_a_least_chance_that_is_none_is_refused(least: float) -> None:
    with pytest.raises(ConfigError) as caught:
        ComputePlaneConfig(draft_model="small", draft_p_min=least)
    assert caught.value.field == "draft_p_min"
    with pytest.raises(ConfigError, match=r"draft_p_min \(from --draft-p-min\)"):
        load_config([f"--draft-p-min={least}"])


@pytest.mark.parametrize("least", [0, 0.5, 1])
def test_a_least_chance_may_be_none_or_certainty(least: float) -> None:
    assert ComputePlaneConfig(draft_model="small", draft_p_min=least).draft_p_min == least


def test_beside_a_draft_model_the_pool_has_a_number_of_blocks_on_every_device() -> None:
    for device in ("cuda", "cuda:1"):
        assert ComputePlaneConfig().fills_memory_of(device)
        config = ComputePlaneConfig(draft_model="small")
        assert not config.fills_memory_of(device)
        assert config.num_blocks == 1024
        config = ComputePlaneConfig(draft_model="small", max_num_blocks=77)
        assert not config.fills_memory_of(device)
        assert config.num_blocks == 77
    assert not ComputePlaneConfig(draft_model="small").fills_memory_of("cpu")


def test_a_smaller_model_with_the_same_tokens_guesses() -> None:
    check_draft_model(loaded("small"), loaded("big"))


def test_without_a_model_there_is_nothing_to_guess_for() -> None:
    assert "no model to guess for" in refusal(loaded("small"), None)


@pytest.mark.parametrize("with_states", KINDS_WITH_STATES)
def test_models_whose_layers_keep_states_neither_guess_nor_are_guessed_for(
    with_states: Callable[[ModelSpec], ModelSpec],
) -> None:
    states = with_states(tiny_spec())
    for draft, model, at_fault in (
        (loaded("small", states), loaded("big"), "small"),
        (loaded("small"), loaded("big", states), "big"),
    ):
        assert f"the layers of {at_fault} keep states" in refusal(draft, model)


def test_a_model_with_other_tokens_is_refused() -> None:
    message = refusal(loaded("small", prefix="wort"), loaded("big"))
    assert "small must have the tokens of big" in message
    assert "131 of 131 differ, the first is 0: 'wort0' instead of 'word0'" in message


@pytest.mark.model
def test_a_draft_model_that_is_not_there_is_a_fault_of_its_own_setting(tmp_path: Path) -> None:
    config = ComputePlaneConfig(draft_model=str(tmp_path / "none.gguf"), listen="127.0.0.1:0")
    with pytest.raises(ConfigError, match=r"^draft_model: .*none\.gguf: no such file") as caught:
        ComputePlane(config)
    assert caught.value.field == "draft_model"


@pytest.mark.model
def test_a_draft_model_finds_no_room_where_the_engine_has_been_promised_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that a pool has and has not filled yet looks free."""
    from compute_plane.cpu import build

    config = ComputePlaneConfig(draft_model="default", listen="127.0.0.1:0", max_num_blocks=64)
    block_bytes = 16 * 30 * 2 * 3 * 64 * 2
    for num_free, is_refused in ((1.5 * 64, True), (64 + 64 + 60, False)):
        memory = Memory(1 << 40, int(num_free * block_bytes))
        monkeypatch.setattr(build, "host_memory", lambda memory=memory: memory)
        if is_refused:
            with pytest.raises(ConfigError, match=r"^draft_model: .*max-num-blocks") as caught:
                ComputePlane(config)
            assert caught.value.field == "draft_model"
        else:
            ComputePlane(config)
