"""transformers in process: the model called step by step, greedily, with its own cache.

`settings`: arguments of `from_pretrained`. The loop is `generate`'s without what it does around
each step, which favours the peer.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.peers.runners.runner import Job


class Transformers:
    def __init__(self, job: Job) -> None:
        # By name: their types are not those of the environment where types are checked.
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._kind = job.kind
        self.versions = {
            "transformers": str(transformers.__version__),
            "torch": str(self._torch.__version__),
        }
        self._torch.set_num_threads(job.threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(job.model, **job.settings)
        self._model = model.eval()

    def measure(self, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
        with self._torch.inference_mode():
            began = time.perf_counter()
            ids = self._torch.tensor(prompts)
            output = self._model(ids, use_cache=True, logits_to_keep=1)
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            first = time.perf_counter()
            for _ in range(output_tokens - 1):
                output = self._model(tokens, past_key_values=output.past_key_values, use_cache=True)
                tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            ended = time.perf_counter()
        if self._kind == "decode":
            return output_tokens - 1, ended - first
        if self._kind == "prefill":
            return len(prompts[0]), first - began
        return len(prompts) * output_tokens, ended - began

    def close(self) -> None:
        del self._model


def load(job: Job) -> Transformers:
    return Transformers(job)
