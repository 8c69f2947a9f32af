"""Rows with an adapter get what a model gives whose weights have it in them, on tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import TensorFormat, TensorSource
from tests.compute_plane.cuda.adapted_models import (
    ADAPTERS_OF_ROWS,
    Formats,
    adapted_plan,
    errors_of_rows,
    merged_logits,
    source_of,
    step_logits,
    two_adapters,
    with_adapters,
)
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import operations_on
from tests.compute_plane.cuda.torch_executors import torch_executor
from tests.compute_plane.executor.tiny_llama import (
    tiny_spec,
    with_delta_net,
    with_gemma4,
    with_single_layers,
    with_states_beside,
)
from tests.golden.batch_driver import BatchDriver, DrivenSequence

WIDE = tiny_spec(quantisable=True)
Q4_0, Q8_0 = TensorFormat.Q4_0, TensorFormat.Q8_0
SIZES = {"num_blocks": 60, "block_size": 4}


@dataclass(frozen=True)
class Case:
    """A model, and how its matrices are stored (`ArraySource`)."""

    spec: ModelSpec
    formats: Formats = field(default_factory=dict)
    orders: Mapping[str, int] = field(default_factory=dict)

    @property
    def source(self) -> TensorSource:
        return source_of(self.spec, self.formats, self.orders)


CASES: Mapping[str, Case] = {
    "llama": Case(tiny_spec()),
    "norms behind": Case(replace(WIDE, architecture="gemma3")),
    "gates in turns": Case(WIDE, {"proj": Q8_0}),
    "a mixture with biases": Case(
        replace(tiny_spec(), architecture="gpt-oss", mixture=Mixture(5, 2))
    ),
    "columns in orders": Case(WIDE, {"proj": Q8_0}, {"down_proj": 1, "o_proj": 2, "mlp": 3}),
    "norms of heads": Case(replace(WIDE, architecture="qwen3")),
    "biases": Case(replace(WIDE, architecture="qwen2")),
    "no norms ahead": Case(replace(WIDE, architecture="exaone4")),
    "gates of four bits": Case(WIDE, {"gate_proj": Q4_0, "up_proj": Q4_0}),
    "formats of three kinds": Case(WIDE, {"v_proj": Q8_0, "k_proj": Q4_0, "gate_proj": Q8_0}),
    "columns of dense matrices in orders": Case(WIDE, {}, {"down_proj": 1, "o_proj": 2}),
    "states beside": Case(with_states_beside(WIDE)),
    "gates of attention": Case(with_delta_net(WIDE)),
    "no gates": Case(with_single_layers(WIDE, "M-*-")),
    "keys of earlier layers": Case(with_gemma4(WIDE)),
}


def errors(
    case: Case, dtype: torch.dtype, chunk: int | None, adapters: Sequence[int]
) -> list[float]:
    """Return those of all rows. `adapters`: what the merged weights of each row have in them."""
    spec, source = case.spec, case.source
    drawn = two_adapters(source)
    plan = adapted_plan(spec, source, drawn, dtype)
    executor = torch_executor(spec, dtype=dtype, plan=plan, keep_logits=True, **SIZES)
    found = step_logits(executor, ADAPTERS_OF_ROWS, chunk=chunk)
    assert len(found) > 2
    return errors_of_rows(found, merged_logits(spec, source, drawn, chunk, **SIZES), adapters)


@pytest.mark.spread(12)
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("kind", CASES)
def test_rows_of_all_adapters_and_of_none_get_theirs_in_one_batch(
    kind: str, chunk: int | None
) -> None:
    """Prompts, whole and in chunks of few tokens, tokens that go on alone, and decodes."""
    assert max(errors(CASES[kind], torch.float32, chunk, ADAPTERS_OF_ROWS)) < 1e-4


def test_they_are_far_from_what_another_adapter_gives() -> None:
    others = [(adapter + 1) % 3 for adapter in ADAPTERS_OF_ROWS]
    assert min(errors(CASES["llama"], torch.float32, None, others)) > 0.2


@pytest.mark.spread(2)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.2), (torch.float16, 0.03)])
@pytest.mark.parametrize("kind", ["llama", "gates in turns", "norms behind"])
def test_in_sixteen_bits_they_get_about_that(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    found = errors(CASES[kind], dtype, None, ADAPTERS_OF_ROWS)
    assert max(found) < tolerance


ON_KERNELS = replace(
    WIDE, vocab_size=41, num_heads=2, num_kv_heads=1, head_dim=64, hidden_size=64,
    intermediate_size=64,
)  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("formats", [{}, {"proj": Q8_0}], ids=["dense", "quantised"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_they_get_it_from_kernels_too(architecture: str, formats: Formats) -> None:
    """In the simulator: two prompts of few tokens, and a decode of both."""
    spec = replace(ON_KERNELS, architecture=architecture)
    source, found = source_of(spec, formats), []
    plan = adapted_plan(spec, source, two_adapters(source), torch.bfloat16)
    for operations in (operations_on(SimulatedLauncher(), spec, formats, "bfloat16"), None):
        executor = torch_executor(
            spec, dtype=torch.bfloat16, num_blocks=12, block_size=16, operations=operations,
            keep_logits=True, plan=plan,
        )  # fmt: skip
        executor._pools.device.zero_()
        driver = BatchDriver(executor, num_blocks=12, block_size=16)
        rows = [DrivenSequence([4, 5, 6, 7]), DrivenSequence([11, 12]), DrivenSequence([9, 8])]
        for _ in range(2):
            output = executor.execute(with_adapters(driver.batch(rows), [2, 0, 1]))
            assert output.logits is not None
            found.append(output.logits)
            for row in rows:
                row.num_computed = len(row.tokens)
                row.tokens.append(13)
    for ours, expected in zip(found[:2], found[2:], strict=True):
        np.testing.assert_allclose(ours, expected, atol=0.1 * max(1, expected.std()))
