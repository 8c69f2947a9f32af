"""Speed of the engine on this machine, through gRPC: `python -m bench [--json]`.

Starts both planes as `hetero-infer serve` does and measures over the public API:
one stream's decode speed, the time to the first token of a long prompt, and the output of
concurrent streams. Every figure is the median of `--repeats` runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client import Delta, Finished, InferenceClient
from hetero_infer.config import EngineConfig
from hetero_infer.local_planes import (
    compute_socket,
    control_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import wait_all_ready

WORD = " river"
"""One token of the embedded model's vocabulary; a prompt of n words has about n tokens."""


def generate(client: InferenceClient, prompt: str, num_tokens: int) -> tuple[float, float, int]:
    """Generate greedily; (seconds to the first token, seconds from then on, tokens)."""
    params = GenerationParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    first = end = start
    count = 0
    for event in client.generate_stream(prompt, params):
        if isinstance(event, Delta) and event.token_ids:
            end = time.perf_counter()
            if count == 0:
                first = end
            count += len(event.token_ids)
        elif isinstance(event, Finished) and count != event.completion_tokens:
            raise SystemExit(f"counted {count} tokens, the server {event.completion_tokens}")
    return first - start, end - first, count


def measure(client: InferenceClient, repeats: int) -> dict[str, float]:
    """Run every measurement; figures by name."""
    generate(client, "Warm up.", 8)
    decode, first_token, concurrent = [], [], []
    for _ in range(repeats):
        _, seconds, count = generate(client, "The history of the river", 128)
        decode.append((count - 1) / seconds)
        seconds, _, _ = generate(client, WORD * 1024, 1)
        first_token.append(seconds)
        start = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            runs = pool.map(lambda i: generate(client, f"Story {i}:" + WORD * 64, 64), range(8))
        concurrent.append(sum(count for _, _, count in runs) / (time.perf_counter() - start))
    return {
        "one stream, decode, tokens/s": statistics.median(decode),
        "prompt of 1024 tokens, seconds to the first token": statistics.median(first_token),
        "8 streams of 64 + 64, output tokens/s": statistics.median(concurrent),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = EngineConfig(log_level="warning")
    with private_directory() as directory:
        compute, control = compute_socket(directory), control_socket(directory)
        with (
            start_compute_plane(config, compute) as compute_plane,
            start_control_plane(config, compute, f"--listen={control}") as control_plane,
        ):
            wait_all_ready([compute_plane, control_plane])
            with InferenceClient(control) as client:
                info = client.model_info()
                figures = measure(client, args.repeats)
    machine = f"{info.device}, {platform.system()} {platform.machine()}"
    if args.json:
        print(json.dumps({"machine": machine, "model": info.model, "figures": figures}))
    else:
        print(f"{info.model} ({info.weight_format} run as {info.dtype}) on {machine}")
        for name, value in figures.items():
            print(f"{value:10.2f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
