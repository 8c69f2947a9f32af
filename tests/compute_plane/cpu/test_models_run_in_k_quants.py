"""Models in the formats that files mostly have: what they say is what their weights say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from bench.gpu.k_blocks import k_blocks
from compute_plane.executor import weight_formats
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.executor.tiny_llama import (
    KERNEL_HEAD_DIM,
    pool_for,
    tiny_executor,
    tiny_spec,
)
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SPEC = replace(
    tiny_spec(head_dim=KERNEL_HEAD_DIM), num_heads=4, hidden_size=256, intermediate_size=512
)
PROMPTS = [[5, 17, 40, 41, 42, 9, 100, 77, 3, 88, 120, 121], [101, 8, 99]]
Q4_K, Q5_K, Q6_K = TensorFormat.Q4_K, TensorFormat.Q5_K, TensorFormat.Q6_K
IQ4_NL, Q8_0 = TensorFormat.IQ4_NL, TensorFormat.Q8_0


@pytest.mark.parametrize(
    ("label", "error"),
    [
        ("Q2_K", 0.42), ("Q3_K", 0.2), ("Q4_K", 0.09), ("Q5_K", 0.045), ("Q6_K", 0.025),
        ("IQ4_NL", 0.11), ("IQ4_XS", 0.11),
    ],
)  # fmt: skip
def test_numbers_become_blocks_that_hold_nearly_the_same(label: str, error: float) -> None:
    values = np.random.default_rng(2).standard_normal((7, 512), dtype=np.float32)
    decoded = gguf.quants.dequantize(k_blocks(label, values), GgmlType[label])
    lost = np.linalg.norm(decoded - values) / np.linalg.norm(values)
    assert error / 4 < lost < error


def logits_of(formats: Mapping[str, TensorFormat], dtype: str) -> tuple[np.ndarray, list[int]]:
    """Return the logits of both prompts' last tokens, and how many tokens were generated alike."""
    pool = pool_for(SPEC, 24, 16, "float32")
    with tiny_executor(
        SPEC, tiny_weights(SPEC), pool, dtype=dtype, formats=formats, keep_logits=True
    ) as executor:
        driver = BatchDriver(executor, num_blocks=24, block_size=16)
        sequences = [DrivenSequence(list(prompt)) for prompt in PROMPTS]
        batch = driver.batch(sequences, None)
        output = executor.execute(batch)
        assert output.logits is not None
        return output.logits.copy(), output.next_tokens.tolist()


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    "formats",
    [
        {"": Q4_K},
        {"": Q5_K},
        {"": Q6_K},
        {"embed": Q6_K, "v_proj": Q6_K, "down": Q6_K, "": Q4_K},
        {"embed": Q6_K, "gate": TensorFormat.Q2_K, "": TensorFormat.Q3_K},
        {"embed": IQ4_NL, "": TensorFormat.IQ4_XS},
    ],
    ids=["Q4_K", "Q5_K", "Q6_K", "Q4_K_M", "Q3_K", "IQ4"],
)
def test_a_model_says_what_its_decoded_weights_say(formats: Mapping[str, TensorFormat]) -> None:
    exact, exact_tokens = logits_of(formats, "float32")
    logits, tokens = logits_of(formats, "auto")
    # Rows have eight bits: of these weights in Q8_0 the logits differ by 0.05, in Q4_1 by 0.06.
    assert np.linalg.norm(logits - exact) < 0.06 * np.linalg.norm(exact)
    assert tokens == exact_tokens


def test_codes_of_four_bits_give_what_the_same_weights_give_in_eight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """IQ4_NL becomes Q8_0 exactly, so not a bit of the logits differs: of tiles, neither."""
    as_stored, tokens = logits_of({"": IQ4_NL}, "auto")
    monkeypatch.setitem(weight_formats.OWN_FORMAT, IQ4_NL, Q8_0)
    in_eight_bits, same_tokens = logits_of({"": IQ4_NL}, "auto")
    assert as_stored.tobytes() == in_eight_bits.tobytes()
    assert tokens == same_tokens
