"""Engines of a few blocks, and what a request gets that is alone."""

from __future__ import annotations

from hetero_infer import EngineConfig

SMALL = EngineConfig(executor="simulated", block_size=4, max_num_blocks=64, max_batch_size=5)


def run_alone(engine, prompt, params):
    request_id = engine.submit_request(prompt, params)
    (result,) = engine.run()
    assert result.request_id == request_id
    return result
