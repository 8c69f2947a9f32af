"""What formats lose, on a tiny model: the logits are those of a prompt, the figures are right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.model.assets import ModelAssets
from compute_plane.model.loader import LoadedModel
from compute_plane.model.tensor import TensorFormat
from hetero_infer.bench import accuracy, plots
from hetero_infer.bench.logit_scores import Reference, Scores
from hetero_infer.bench.report import to_object, to_text
from hetero_infer.bench.settings import AccuracySettings, FormatPair
from hetero_infer.bench.text_logits import BLOCK_SIZE, WINDOW, TextLogits
from planes.errors import ConfigError, ExecutionError
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor, tiny_spec
from tests.compute_plane.executor.tiny_sources import ArraySource
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SPEC = tiny_spec(quantisable=True)
WEIGHTS = tiny_weights(SPEC)
TOKENS = np.random.default_rng(1).integers(0, SPEC.vocab_size, 2 * WINDOW + 22, dtype=np.int32)
EXACT = FormatPair("float32", "float32")


def source_of(kind: TensorFormat) -> ArraySource:
    return ArraySource(SPEC, WEIGHTS, {"": kind})


def compare(kind: TensorFormat, *pairs: FormatPair, pieces=(TOKENS,)):
    return accuracy.compare(SPEC, source_of(kind), pieces, pairs, num_threads=2)


def test_the_logits_of_windows_are_bit_for_bit_those_of_a_prompt():
    weights = pack_weights(SPEC, source_of(TensorFormat.F32), "float32")
    size = len(TOKENS)
    logits = TextLogits(SPEC, weights, "float32", max_tokens=size, num_threads=2)
    parts = [logits.of(TOKENS[at : at + WINDOW], at) for at in range(0, size, WINDOW)]
    logits.close()
    found = np.concatenate(parts)
    pool = pool_for(SPEC, 20, BLOCK_SIZE)
    with tiny_executor(
        SPEC, WEIGHTS, pool, dtype="float32", formats={"": TensorFormat.F32}, keep_logits=True
    ) as executor:
        driver = BatchDriver(executor, num_blocks=20, block_size=BLOCK_SIZE)
        for end in (1, 2, WINDOW, WINDOW + 1, size):
            sequence = DrivenSequence([int(token) for token in TOKENS[:end]])
            output = executor.execute(driver.batch([sequence]))
            driver.release(sequence)
            assert (output.logits[0] == found[end - 1]).all()
        batch = driver.batch([DrivenSequence(TOKENS[:-1].tolist())])
        asked = replace(batch, prompt_logprob_rows=[0], prompt_logprob_targets=[TOKENS[1:]])
        expected = executor.execute(asked).prompt_logprobs[0]
    scores = Reference.of(found[:-1], TOKENS[1:])
    np.testing.assert_allclose(-scores.nll, expected, rtol=1e-5, atol=1e-5)


def test_logits_that_are_not_finite_are_an_error_that_names_the_position():
    weights = pack_weights(SPEC, source_of(TensorFormat.F32), "float32")
    logits = TextLogits(SPEC, weights, "float32", max_tokens=8, num_threads=1)
    norm_at = weights.final_norm - weights.memory.ctypes.data
    weights.memory[norm_at : norm_at + 4] = 0xFF
    with pytest.raises(ExecutionError, match="position 3: the logits are not finite"):
        logits.of(TOKENS[:1], 3)
    logits.close()


def test_scores_are_those_of_the_textbook():
    p = np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    q = np.array([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]])
    targets = np.array([0, 1], np.int32)
    # Logits are probabilities' logarithms but for a constant of each row.
    reference = Reference.of((np.log(p) + 3).astype(np.float32), targets)
    scores = Scores.against(reference, (np.log(q) - [[2], [90]]).astype(np.float32), targets)
    np.testing.assert_allclose(scores.kl, (p * np.log(p / q)).sum(axis=1), rtol=1e-4)
    assert scores.perplexity == pytest.approx((0.25 * 0.2) ** -0.5, rel=1e-5)
    assert scores.ratio == pytest.approx((0.25 * 0.2 / (0.5 * 0.1)) ** -0.5, rel=1e-5)
    assert scores.ratio_error == pytest.approx(np.log(2), rel=1e-4)  # of -ln 2 and ln 2
    assert scores.top_differs.tolist() == [True, False]


def test_float32_loses_nothing_and_coarser_formats_lose_more():
    pairs = [FormatPair(*pair.split(":")) for pair in ("auto:float32", "auto:int8")]
    exact, fine, coarse = (result.scores for result in compare(TensorFormat.Q8_0, EXACT, *pairs))
    assert exact.ratio == 1
    assert exact.kl.max() == 0
    assert not exact.top_differs.any()
    assert 0 < fine.kl.mean() < coarse.kl.mean() < 0.5
    assert len(exact.nll) == len(TOKENS) - 1


def test_the_reference_is_of_the_files_weights_dequantised():
    (stored,) = compare(TensorFormat.Q4_1, EXACT)
    (original,) = compare(TensorFormat.F32, EXACT)
    assert stored.scores.perplexity != pytest.approx(original.scores.perplexity, rel=1e-3)


def test_each_piece_of_a_long_text_begins_anew():
    pieces = accuracy.cut(TOKENS, 50)
    assert [len(piece) for piece in pieces] == [50, 50, 50]
    together = compare(TensorFormat.F32, EXACT, pieces=pieces)[0].scores
    alone = [compare(TensorFormat.F32, EXACT, pieces=[piece])[0].scores for piece in pieces]
    assert (together.nll == Scores.joined(alone).nll).all()


def test_what_foretells_nothing_is_left_out_and_a_text_of_that_alone_is_refused():
    assert [len(piece) for piece in accuracy.cut(TOKENS[:7], 3)] == [3, 3]
    with pytest.raises(ConfigError, match="text must be at least 2 tokens, got 1"):
        accuracy.cut(TOKENS[:1], 50)


def test_windows_cover_every_token_that_has_a_next():
    piece = np.arange(WINDOW + 2, dtype=np.int32)
    found = [(t.tolist(), n.tolist(), first) for t, n, first in accuracy.windows([piece])]
    assert found == [
        (list(range(WINDOW)), list(range(1, WINDOW + 1)), 0),
        ([WINDOW], [WINDOW + 1], WINDOW),
    ]


def test_a_text_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        accuracy.read_text(str(tmp_path / "missing"))
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 3"):
        accuracy.read_text(str(tmp_path / "latin"))


def test_the_own_text_has_several_subjects_and_code():
    text = accuracy.read_text(None)
    assert len(text.split()) > 900
    assert "def merge_intervals" in text


def test_formats_named_twice_are_one():
    settings = AccuracySettings(formats="auto:int8, bfloat16:float32,auto:int8")
    assert [str(pair) for pair in settings.pairs] == ["auto:int8", "bfloat16:float32"]


def tiny_model() -> LoadedModel:
    """A model whose words are w0, w1, …"""
    words = {f"w{number}": number for number in range(SPEC.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    assets = ModelAssets(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template="",
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=None,
        add_bos_token=True,
        model_name=SPEC.name,
    )
    return LoadedModel(SPEC, assets, source_of(TensorFormat.Q8_0), Path("memory"), None)


@pytest.mark.wide
def test_results_of_accuracy_are_a_table_json_and_a_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "load_model", lambda _: tiny_model())
    (tmp_path / "text").write_text("w5 w7 w9 w5 w7 w9 w5 w7 w9", encoding="utf-8")
    settings = AccuracySettings(text=str(tmp_path / "text"), piece_tokens=6, num_threads=2)
    result = accuracy.run(settings)
    assert "other top token" in to_text(result)
    assert result.data["text"]["pieces"] == [6, 4]  # with the token that begins a text
    assert [r["format"] for r in result.data["results"]] == settings.formats.split(",")
    for found in result.data["results"]:
        nll, kl = found["samples"]["nll"], found["samples"]["kl"]
        assert len(nll) == len(kl) == result.data["text"]["positions"] == 8
        assert found["perplexity"] == pytest.approx(np.exp(np.mean(nll)))
        reference = result.data["reference"]["perplexity"]
        assert found["perplexity_ratio"] == pytest.approx(found["perplexity"] / reference)
        assert found["max_kl"] == max(kl) > found["mean_kl"] > 0
    origin = {
        "machine": {"usable_cpus": 2, "cpu": "any"},
        "date": "2020-01-01",
        "commit": None,
        "tree_has_changes": None,
    }
    whole = to_object("accuracy", result, origin=origin, settings={}, share_of_others=None)
    json.dumps(whole, allow_nan=False)
    plots.draw_accuracy(whole, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 1000
