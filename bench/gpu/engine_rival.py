"""transformers' continuous batching on the same model, in a process of its own.

`python -m bench.gpu.engine_rival` reads a job as JSON from stdin and answers on stdout's last line.
It is given as much twice, and the second time counts: in the first it captures its graphs.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NO_END = -1
"""An end token that no model has: every answer is as long as it may be."""


def transformers_tokens_per_second(
    model: Path,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    *,
    device: str,
    dtype: str,
    seconds: float,
    settings: Mapping[str, object] | None = None,
) -> float:
    """Return output tokens a second. Raises RuntimeError with the reason where there are none.

    `settings`: of its `ContinuousBatchingConfig`; None: as it sizes itself for the device.
    """
    job = {
        "model": str(model),
        "prompts": [list(prompt) for prompt in prompts],
        "output_tokens": output_tokens,
        "device": device,
        "dtype": dtype,
        "settings": None if settings is None else dict(settings),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu.engine_rival"], input=json.dumps(job),
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done in {seconds:.0f} s") from None
    if done.returncode < 0:
        raise RuntimeError(f"ended by signal {-done.returncode}")
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode != 0 or not lines:
        raise RuntimeError(lines[-1] if lines else f"ended with status {done.returncode}")
    return float(json.loads(lines[-1])["output_tokens_per_second"])


def measure(job: dict[str, Any]) -> float:
    """Run a job in this process."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    model = model.to(job["device"]).eval()
    config = transformers.GenerationConfig(
        max_new_tokens=job["output_tokens"], do_sample=False, eos_token_id=NO_END, pad_token_id=0
    )
    options: dict[str, Any] = {"generation_config": config, "persistent_manager": True}
    if job["settings"] is not None:
        sizes = transformers.generation.ContinuousBatchingConfig(**job["settings"])
        options["continuous_batching_config"] = sizes
    # Others of the same length: what it has in its cache must not count.
    model.generate_batch(inputs=[prompt[::-1] for prompt in job["prompts"]], **options)
    began = time.perf_counter()
    outputs = model.generate_batch(inputs=job["prompts"], **options)
    took = time.perf_counter() - began
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    expected = len(job["prompts"]) * job["output_tokens"]
    if tokens != expected:
        raise RuntimeError(f"it gave {tokens} tokens of {expected}")
    return tokens / took


if __name__ == "__main__":
    answer = measure(json.load(sys.stdin))
    print(json.dumps({"output_tokens_per_second": answer}), flush=True)
    sys.stdout.flush()
    # Its background threads may keep the interpreter from ending.
    importlib.import_module("os")._exit(0)
