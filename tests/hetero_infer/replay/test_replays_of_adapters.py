"""A recording made with adapters replays where they are, and is refused where they are not."""

from __future__ import annotations

import re

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from hetero_infer.replay.fitting import check_adapters
from hetero_infer.replay.recording_reader import RecordingError
from planes.errors import ConfigError
from protos.hetero.compute.v1 import compute_pb2
from tests.compute_plane.rpc.plane_harness import Harness
from tests.hetero_infer.replay.replay_bench import RecordedRun, replay

POET = compute_pb2.AdapterDescription(name="poet", sha256="ab" * 32)
LAWYER = compute_pb2.AdapterDescription(name="lawyer", sha256="cd" * 32)


@pytest.fixture
def harness(tmp_path):
    """Makes a plane with adapters."""
    made = []

    def make(lora):
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Harness(directory, lora=lora))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_it_replays_on_a_plane_with_the_same_ones_and_on_no_other(harness, tmp_path):
    run = RecordedRun(harness("poet=x,lawyer=y"), tmp_path / "run")
    params = GenerationParams(max_tokens=14, seed=1, ignore_eos=True)
    prompt = list(b"a prompt of some blocks")
    run.ask(requests=[Request(n + 1, prompt, params, adapter=n % 2) for n in range(4)])
    run.close()
    same = replay(harness("poet=elsewhere,other=z"), tmp_path / "run")
    assert (same.num_differences, same.rules.is_exact) == (0, True)
    assert same.num_tokens == 4 * 14
    for lora, there in (("lawyer=y,poet=x", "'lawyer'"), (None, "none")):
        told = f"was recorded with 'poet' as adapter 1, the compute plane has {there} there"
        with pytest.raises(ConfigError, match=re.escape(told)):
            replay(harness(lora), tmp_path / "run")


def test_an_adapter_is_another_one_if_its_file_is():
    batch = compute_pb2.ExecutionBatch(step_id=7)
    batch.starts.add(adapter=2)
    batch.starts.add()
    recorded = compute_pb2.DescribeResponse(adapters=[POET, LAWYER])
    check_adapters(batch, recorded, recorded)
    changed = compute_pb2.DescribeResponse(adapters=[POET, LAWYER])
    changed.adapters[1].sha256 = "ef" * 32
    with pytest.raises(ConfigError, match=r"^lora: step 7 .* 'lawyer' \(sha256 cdcdcdcdcdcd…\) as "
                       r"adapter 2, .* has 'lawyer' \(sha256 efefefefefef…\) there$"):  # fmt: skip
        check_adapters(batch, recorded, changed)
    check_adapters(compute_pb2.ExecutionBatch(), recorded, changed)
    with pytest.raises(RecordingError, match="damaged: step 7 starts a slot with adapter 2 of 0"):
        check_adapters(batch, compute_pb2.DescribeResponse(), recorded)
