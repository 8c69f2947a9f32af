"""vLLM's CPU build in process, from a Hugging Face directory. `settings`: arguments of `LLM`."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.peers.runners.runner import Job

MAX_MODEL_LEN = 2048
MAX_BATCHED_TOKENS = 4096
MAX_SEQUENCES = 64


class Vllm:
    def __init__(self, job: Job) -> None:
        # By name: it is not installed where types are checked.
        self._vllm: Any = importlib.import_module("vllm")
        self._kind = job.kind
        self.versions = {"vllm": str(self._vllm.__version__)}
        self._llm = self._vllm.LLM(
            model=job.model,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_num_seqs=MAX_SEQUENCES,
            enable_prefix_caching=False,
            disable_log_stats=False,  # they say when the first token came
            **job.settings,
        )

    def measure(self, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
        sampling = self._vllm.SamplingParams(
            temperature=0, max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if num_tokens != len(prompts) * output_tokens:
            raise RuntimeError(f"{num_tokens} of {len(prompts) * output_tokens} tokens came")
        if self._kind == "decode":
            metrics = outputs[0].metrics
            return output_tokens - 1, metrics.last_token_ts - metrics.first_token_ts
        return (len(prompts[0]) if self._kind == "prefill" else num_tokens), seconds

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def load(job: Job) -> Vllm:
    return Vllm(job)
