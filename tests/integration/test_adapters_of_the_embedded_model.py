"""Requests with adapters, with others and with none, through both planes, against transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hetero_infer.local_planes import (
    compute_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import wait_all_ready
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.compute_plane.model.made_adapters import ALPHA, RANK, MadeAdapter
from tests.devices import Target
from tests.golden.record import load_model, model_path
from tests.integration.asking import Server

pytestmark = pytest.mark.model

HIDDEN, INNER, KV, LAYERS = 576, 1536, 192, 30
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
PROMPT = list(range(500, 560))


def drawn(seed: int, *roles: str) -> MadeAdapter:
    """An adapter of all layers, as PEFT saves them, that changes what the model says."""
    random = np.random.default_rng(seed)
    a, b = {}, {}
    for layer in range(LAYERS):
        for role in roles or SHAPES:
            n, k = SHAPES[role]
            module = f"model.layers.{layer}.{role}"
            a[module] = random.normal(0, 0.04, (RANK, k)).astype(np.float32)
            b[module] = random.normal(0, 0.04, (n, RANK)).astype(np.float32)
    return MadeAdapter(a, b)


ADAPTERS = {
    "all": drawn(1),
    "some": drawn(2, "self_attn.q_proj", "self_attn.v_proj"),
}


@contextmanager
def served(target: Target, directory: Path, **settings: object) -> Iterator[Server]:
    paths = {name: adapter.save(directory / name) for name, adapter in ADAPTERS.items()}
    lora = ",".join(f"{name}={path}" for name, path in paths.items())
    config = target.config(lora=lora, **settings)
    with private_directory() as private:
        compute = compute_socket(private)
        with (
            start_compute_plane(config, compute) as compute_plane,
            start_control_plane(config, compute, "--grpc-port=0") as control_plane,
        ):
            wait_all_ready([compute_plane, control_plane])
            assert control_plane.address is not None
            with Server(control_plane.address) as server:
                yield server


def ask(model: str, tokens: list[int] = PROMPT, **sampling: float) -> pb.GenerateRequest:
    sampling = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | sampling
    return pb.GenerateRequest(
        model=model, token_ids=pb.TokenIds(ids=tokens), sampling=pb.SamplingParams(**sampling)
    )


@pytest.mark.wide
def test_log_probabilities_of_a_prompt_are_those_of_merged_weights(
    target: Target, tmp_path: Path
) -> None:
    import torch

    found = {}
    with served(target, tmp_path, dtype="float32") as server:
        for name in ("", *ADAPTERS):
            answer = server.stub.Generate(ask(name, num_prompt_logprobs=0, max_tokens=1))
            found[name] = [entry.logprob for entry in answer.prompt_logprobs.logprobs]
    base = load_model(model_path())
    for name in found:
        model = base
        if name:
            model = copy.deepcopy(base)
            adapter, matrices = ADAPTERS[name], dict(model.named_parameters())
            with torch.no_grad():
                for module, up in adapter.b.items():
                    change = ALPHA / RANK * up @ adapter.a[module]
                    matrices[f"{module}.weight"] += torch.from_numpy(change)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([PROMPT])).logits[0, :-1].double()
        wanted = torch.log_softmax(logits, -1)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
        np.testing.assert_allclose(found[name], wanted.numpy(), atol=2e-3)
    assert np.abs(np.subtract(found["all"], found[""])).max() > 0.3
    assert np.abs(np.subtract(found["some"], found[""])).max() > 0.1


def test_answers_in_company_are_those_that_each_gives_alone(target: Target, tmp_path: Path) -> None:
    names = ["all", "", "some", "all", "some", ""] * 2
    requests = [
        ask(name, PROMPT[: 20 + 3 * number], temperature=0.8, seed=number)
        for number, name in enumerate(names)
    ]
    with served(target, tmp_path, dtype="auto" if target.keeps_bits else "float32") as server:
        alone = server.ask_in_turn(requests)
        together = server.ask_together(requests)
        again = server.ask_together(requests[::-1])[::-1]
    if target.keeps_bits:
        assert together == alone
        assert again == alone
    texts = {tuple(samples[0]) for samples in alone}
    assert len(texts) > len(names) / 2
