"""The buckets: vLLM's, so that its dashboards and alerts fit, and finer ones below where needed.

A small model on a CPU makes a token in 3 ms and an answer in 100 ms; vLLM's first bucket of either
would hold everything.
"""

from __future__ import annotations

from typing import Final

TIME_TO_FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)

INTER_TOKEN_S: Final = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075),  # finer than vLLM's
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)

REQUEST_S: Final = (
    *(0.001, 0.003, 0.01, 0.03, 0.1),  # finer than vLLM's
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

ITERATION_TOKENS: Final = (*(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),)

STEP_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Ours: of one step, whose parts take from tenths of a millisecond to the seconds of a stall."""
