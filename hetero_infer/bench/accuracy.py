"""What a format loses: perplexity and the divergence of its logits from float32, on one text.

The reference is the same weights, dequantised to float32, with keys and values in float32. Both run
in this process, window by window of the text: the logits of one window are all that is ever kept.

Imported only once the instruction set is chosen and Numba knows where its cache is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np

from compute_plane.cpu.packed_layers import PackedWeights
from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.executor.interface import Int32Array
from compute_plane.model.assets import ModelAssets
from compute_plane.model.loader import load_model
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorSource
from control_plane.text.huggingface_tokenizer import load_huggingface_tokenizer
from hetero_infer.bench.logit_scores import Reference, Scores
from hetero_infer.bench.provenance import usable_cpus
from hetero_infer.bench.report import Result, Table
from hetero_infer.bench.settings import AccuracySettings, FormatPair
from hetero_infer.bench.text_logits import WINDOW, TextLogits
from kernels.cpu.instruction_set import selected_instruction_set
from planes.errors import ConfigError

REFERENCE: Final = FormatPair("float32", "float32")
OWN_TEXT: Final = "accuracy_text.txt"
FEWEST_TOKENS: Final = 2
"""One to begin with and one to be foretold."""


@dataclass(frozen=True, slots=True)
class FormatAccuracy:
    """A format and its scores. `weights_bytes`: of all its weights as they lie in memory."""

    pair: FormatPair
    numerics_id: str
    weights_bytes: int
    scores: Scores

    def to_object(self) -> dict[str, Any]:
        """Return it for JSON; losses and divergences in nats."""
        scores = self.scores
        return {
            "format": str(self.pair),
            "dtype": self.pair.dtype,
            "kv_cache_dtype": self.pair.kv_dtype,
            "numerics_id": self.numerics_id,
            "weights_bytes": self.weights_bytes,
            "perplexity": scores.perplexity,
            "perplexity_ratio": scores.ratio,
            "perplexity_ratio_standard_error": scores.ratio_error,
            "mean_kl": float(scores.kl.mean()),
            "max_kl": float(scores.kl.max()),
            "top_token_differs": float(scores.top_differs.mean()),
            "samples": {
                "nll": scores.nll.tolist(),
                "kl": scores.kl.tolist(),
                "top_token_differs": scores.top_differs.tolist(),
            },
        }


def run(settings: AccuracySettings) -> Result:
    """Load the model, read the text, compare; raises EngineError."""
    pairs = settings.pairs
    text = read_text(settings.text)
    model = load_model(settings.model)
    spec = model.spec
    context = min(settings.piece_tokens, spec.context_length)
    pieces = cut(tokens_of(text, model.assets), context)
    results = compare(
        spec,
        model.source,
        pieces,
        pairs,
        num_threads=settings.num_threads or usable_cpus(),
    )
    return to_result(spec, text, pieces, results)


def to_result(
    spec: ModelSpec, text: str, pieces: Sequence[Int32Array], results: Sequence[FormatAccuracy]
) -> Result:
    """Return results with what they are of."""
    instructions = selected_instruction_set().name
    num_positions = sum(len(piece) - 1 for piece in pieces)
    reference_nll = results[0].scores.reference_nll
    perplexity = float(np.exp(reference_nll.mean()))
    reference = {
        "format": str(REFERENCE),
        "perplexity": perplexity,
        "samples": {"nll": reference_nll.tolist()},
    }
    data = {
        "instruction_set": instructions,
        "model": {
            "model": spec.name,
            "weight_format": spec.weight_format,
            "dtype": ", ".join(str(result.pair) for result in results),
        },
        "text": {
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "pieces": [len(piece) for piece in pieces],
            "positions": num_positions,
        },
        "reference": reference,
        "results": [result.to_object() for result in results],
    }
    subject = (
        f"{spec.name} ({spec.weight_format}), {num_positions} tokens foretold, "
        f"instruction set {instructions}"
    )
    return Result(subject, data, [_table(perplexity, results)])


def read_text(file: str | None) -> str:
    """Return a file's text, or without one that of this package. Raises ConfigError."""
    if file is None:
        own = resources.files("hetero_infer.bench").joinpath(OWN_TEXT)
        return own.read_text(encoding="utf-8")
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"text {file}: {error.strerror}", field="text") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"text {file}: not UTF-8 at byte {error.start}", field="text") from None


def tokens_of(text: str, assets: ModelAssets) -> Int32Array:
    """Return a text's tokens, as the model gets them of a prompt. Raises TokenizationError."""
    tokenizer = load_huggingface_tokenizer(
        assets.tokenizer_json,
        bos_token_id=assets.bos_token_id,
        add_bos_token=assets.add_bos_token,
    )
    return np.array(tokenizer.encode(text), dtype=np.int32)


def cut(tokens: Int32Array, context: int) -> list[Int32Array]:
    """Cut tokens into pieces of at most `context`, each of which the model begins anew.

    A single token left over foretells nothing and is left out. Raises ConfigError if nothing is
    foretold at all.
    """
    pieces = [tokens[first : first + context] for first in range(0, len(tokens), context)]
    pieces = [piece for piece in pieces if len(piece) >= FEWEST_TOKENS]
    if not pieces:
        raise ConfigError(
            f"text must be at least {FEWEST_TOKENS} tokens, got {len(tokens)}", field="text"
        )
    return pieces


def compare(
    spec: ModelSpec,
    source: TensorSource,
    pieces: Sequence[Int32Array],
    pairs: Sequence[FormatPair],
    *,
    num_threads: int,
) -> list[FormatAccuracy]:
    """Run every piece in the reference and in each of `pairs`; raises EngineError.

    All of them are in memory at once; formats with the same weights share them.
    """
    longest = max(map(len, pieces))
    packed: dict[str, PackedWeights] = {}
    with ExitStack() as stack:

        def opened(pair: FormatPair) -> TextLogits:
            if pair.dtype not in packed:
                packed[pair.dtype] = pack_weights(spec, source, pair.dtype, num_threads=num_threads)
            logits = TextLogits(
                spec,
                packed[pair.dtype],
                pair.kv_dtype,
                max_tokens=longest,
                num_threads=num_threads,
            )
            stack.callback(logits.close)
            return logits

        exact = opened(REFERENCE)
        tested = [opened(pair) for pair in pairs]
        parts: list[list[Scores]] = [[] for _ in pairs]
        for tokens, targets, first in windows(pieces):
            reference = Reference.of(exact.of(tokens, first), targets)
            for logits, scores in zip(tested, parts, strict=True):
                scores.append(Scores.against(reference, logits.of(tokens, first), targets))
        return [
            FormatAccuracy(
                pair, logits.numerics_id, packed[pair.dtype].num_bytes, Scores.joined(scores)
            )
            for pair, logits, scores in zip(pairs, tested, parts, strict=True)
        ]


def windows(pieces: Sequence[Int32Array]) -> Iterator[tuple[Int32Array, Int32Array, int]]:
    """Yield tokens, the tokens that follow each, and the first's place in its piece."""
    for piece in pieces:
        for first in range(0, len(piece) - 1, WINDOW):
            end = min(first + WINDOW, len(piece) - 1)
            yield piece[first:end], piece[first + 1 : end + 1], first


def _table(reference_perplexity: float, results: Sequence[FormatAccuracy]) -> Table:
    rows = [[str(REFERENCE), f"{reference_perplexity:.4f}", "", "", "", "", ""]]
    for result in results:
        scores = result.scores
        rows.append(
            [
                str(result.pair),
                f"{scores.perplexity:.4f}",
                f"{100 * (scores.ratio - 1):+.3f} %",
                f"{100 * scores.ratio_error:.3f} %",
                f"{scores.kl.mean():.2e}",
                f"{scores.kl.max():.2e}",
                f"{100 * scores.top_differs.mean():.2f} %",
            ]
        )
    headers = ["weights:KV", "perplexity", "to float32", "± of that", "mean KL", "max KL"]
    return Table(
        [*headers, "other top token"],
        rows,
        "KL of the format from float32, in nats; ± is one standard error:",
    )
