"""OpenVINO GenAI in process: the continuous-batching pipeline over an IR or a GGUF file.

`settings`: properties of the CPU plugin, such as DYNAMIC_QUANTIZATION_GROUP_SIZE. The scheduler's
are those that were found best for these cases; with prefix caching nothing would be left to do.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.peers.runners.runner import Job

# By name: it is not installed where types are checked.
genai: Any = importlib.import_module("openvino_genai")
openvino: Any = importlib.import_module("openvino")

MAX_BATCHED_TOKENS = 2048
MAX_SEQUENCES = 64
CACHE_GIB = 1


class OpenVino:
    def __init__(self, job: Job) -> None:
        self._kind = job.kind
        self.versions = {"openvino-genai": str(genai.__version__)}
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        scheduler.max_num_seqs = MAX_SEQUENCES
        scheduler.cache_size = CACHE_GIB
        properties = {"INFERENCE_NUM_THREADS": job.threads, **job.settings}
        self._reads_gguf = job.model.endswith(".gguf")
        if self._reads_gguf:  # only this pipeline does
            self._pipeline = genai.LLMPipeline(
                job.model, "CPU", scheduler_config=scheduler, **properties
            )
        else:
            self._pipeline = genai.ContinuousBatchingPipeline(
                job.model, scheduler, "CPU", properties
            )

    def measure(self, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
        config = genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._kind == "decode":
            arrivals = self._stream(prompts[0], config)
            if len(arrivals) != output_tokens:
                raise RuntimeError(f"{len(arrivals)} of {output_tokens} tokens came")
            return output_tokens - 1, arrivals[-1] - arrivals[0]
        began = time.perf_counter()
        num_tokens = self._generate(prompts, config)
        seconds = time.perf_counter() - began
        if num_tokens != len(prompts) * output_tokens:
            raise RuntimeError(f"{num_tokens} of {len(prompts) * output_tokens} tokens came")
        return (len(prompts[0]) if self._kind == "prefill" else num_tokens), seconds

    def close(self) -> None:
        del self._pipeline

    def _generate(self, prompts: list[list[int]], config: Any) -> int:  # noqa: ANN401 - genai's
        if self._reads_gguf:
            ids = openvino.Tensor(_matrix(prompts))
            mask = openvino.Tensor(_matrix([[1] * len(prompt) for prompt in prompts]))
            results = self._pipeline.generate(genai.TokenizedInputs(ids, mask), config)
            return sum(len(tokens) for tokens in results.tokens)
        inputs = [openvino.Tensor(_matrix([prompt])) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(inputs))
        return sum(len(result.m_generation_ids[0]) for result in results)

    def _stream(self, prompt: list[int], config: Any) -> list[float]:  # noqa: ANN401 - genai's
        """Return when each token came."""
        if self._reads_gguf:
            streamer = _Arrivals()
            self._pipeline.generate(openvino.Tensor(_matrix([prompt])), config, streamer)
            return streamer.times
        times: list[float] = []
        handle = self._pipeline.add_request(0, openvino.Tensor(_matrix([prompt])), config)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                count = sum(len(output.generated_ids) for output in handle.read().values())
                times += [time.perf_counter()] * count
        return times


class _Arrivals(genai.StreamerBase):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, tokens: int | list[int]) -> object:
        count = len(tokens) if isinstance(tokens, list) else 1
        self.times += [time.perf_counter()] * count
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def _matrix(rows: list[list[int]]) -> Any:  # noqa: ANN401 - an array of the peer's NumPy
    return importlib.import_module("numpy").array(rows, dtype="int64")


def load(job: Job) -> OpenVino:
    return OpenVino(job)
