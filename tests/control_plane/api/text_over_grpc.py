"""A control plane with a chat template, on a fake plane, and what tests of its text ask of it."""

from __future__ import annotations

import pytest

from protos.hetero.inference.v1 import inference_pb2 as pb

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}({{ c.function.arguments.x }})"
    "{% endfor %}{% endfor %}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def fake_plane(fake_plane_class, tmp_path_factory):
    plane = fake_plane_class(f"unix:{tmp_path_factory.mktemp('plane')}/compute.sock")
    plane.features = ("copies", "sampled_slots", "logprobs", "prompt_logprobs")
    plane.start()
    yield plane
    plane.kill()


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def control_plane(fake_plane, start_control_plane, template):
    process = start_control_plane(fake_plane, f"--chat-template={template}")
    process.ready()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def _calm_plane(fake_plane):
    yield
    fake_plane.calm()


def ask(text, *, max_tokens=12, **sampling):
    sampling.setdefault("seed", 0)
    params = pb.SamplingParams(max_tokens=max_tokens, **sampling)
    return pb.GenerateRequest(text=text, sampling=params)


def events_of(stream):
    """The events by kind; the deltas in order."""
    found = {}
    for message in stream:
        kind = message.WhichOneof("event")
        found.setdefault(kind, []).append(getattr(message, kind))
    return found


def text_of(events):
    return "".join(delta.text for delta in events["delta"])
