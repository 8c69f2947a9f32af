"""What all tests share: where compiled kernels are kept, signals, and which worker runs what."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from compute_plane.config import ComputePlaneConfig
from compute_plane.cpu.kernel_cache import prepare_kernel_cache
from tests import devices
from tests.devices import STAND_IN, Target
from tests.judging import Judge

# Tests load what the product has compiled, and keep for it what they compile.
prepare_kernel_cache(ComputePlaneConfig().kernel_cache_root)

# What a shell starts in the background may be deaf to Ctrl-C, and so would be the commands that
# tests start and interrupt: children inherit what is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):  # a machine that only runs the GPU's part may lack it
    import hypothesis

    # No test asserts how long something takes: a busy machine is no failure.
    hypothesis.settings.register_profile("unhurried", deadline=None)
    hypothesis.settings.load_profile("unhurried")

# Thousands of tests are made and all of them stay: nothing is worth collecting until then.
gc.disable()

GC_THRESHOLDS = (20_000, 20, 20)
"""In place of 700, 10, 10."""

LONGEST_FIRST = (
    # The first of each of three workers: where no kernel was compiled before, one of them has its
    # planes do it, while the others do what needs none. All three would compile the same.
    "integration/clients",
    "kernels/cuda/test_cuda_kernels_compile.py",
    "hetero_infer/test_command_line_runs.py",
    "integration", "faults", "golden", "amx", "kernels", "properties", "hetero_infer",
    "gpu", "test_readme_is_true.py", "compute_plane/test_compute_plane_process.py",
)  # fmt: skip
"""What takes long; a worker that gets one of these last keeps the others waiting."""

SHARING = (
    # PTX of the same kernels, each of which takes seconds to compile where none was kept before.
    (
        "kernels/cuda/test_cuda_kernels_compile.py",
        "kernels/cuda/test_compiled_attention.py",
        "kernels/cuda/test_compiled_kernels.py",
        "kernels/cuda/test_dense_matmul_traffic.py",
        "kernels/cuda/test_kernels_address_large_memories.py",
        "kernels/cuda/test_launches_that_begin_early.py",
        "kernels/cuda/test_weights_of_the_next_product.py",
    ),
    # Attention of the CPU to each type of pool, and products of each format of weights, likewise.
    (
        "kernels/cpu/test_attention_caps.py",
        "kernels/cpu/test_attention_operation.py",
        "kernels/cpu/test_attention_sinks.py",
        "kernels/cpu/test_attention_windows.py",
        "kernels/cpu/test_latent_attention.py",
    ),
    (
        "kernels/cpu/test_every_weight_is_the_files_to_the_bit.py",
        "kernels/cpu/test_int8_products.py",
        "kernels/cpu/test_int8_wide_products.py",
    ),
    # `exact_deployment` of tests/integration: the model in float32.
    (
        "integration/test_echoed_logprobs_equal_transformers.py",
        "integration/test_prompt_logprobs_equal_transformers.py",
        "integration/test_stop_strings_never_leak.py",
        "integration/test_text_through_both_planes.py",
    ),
    # `deployment`: the model as it is served by default.
    (
        "integration/hostile/test_fuzzed_protobufs_harm_nobody.py",
        "integration/hostile/test_raw_http_harms_nobody.py",
        "integration/test_cancelled_requests_leave_nothing.py",
        "integration/test_grpcurl_speaks_to_both_planes.py",
        "integration/test_streams_equal_whole_answers.py",
        "integration/test_structured_outputs.py",
    ),
)
"""Files that one worker runs, because they use the same servers or kernels. Any other worker would
start its own, or compile them at the same time."""


LEFT_OUT = pytest.StashKey[frozenset[str]]()
"""Marks of which the command line says that no test with one of them is to run."""


def marks_left_out(expression: str) -> frozenset[str]:
    """Return which marks `-m` leaves out whatever else a test has: of `not a and not b` both.

    None of anything that is more than such a conjunction.
    """
    terms = [term.split() for term in expression.split(" and ")]
    if any(len(term) != 1 + (term[:1] == ["not"]) or "(" in "".join(term) for term in terms):
        return frozenset()
    return frozenset(term[1] for term in terms if len(term) == 2)


def pytest_configure(config: pytest.Config) -> None:
    """Look at what is to run."""
    config.stash[LEFT_OUT] = marks_left_out(config.getoption("markexpr"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the suites be told what to run models on."""
    devices.add_options(parser)


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Make no cases of tests that `-m` leaves out as a whole: half of all are of slow grids.

    None, which has pytest make them, of all others.
    """
    left_out = collector.config.stash.get(LEFT_OUT, frozenset())
    marks = getattr(obj, "pytestmark", None) if callable(obj) else None
    if not left_out or not isinstance(marks, list):
        return None
    return [] if any(mark.name in left_out for mark in marks) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the long ones begin. Workers take files in this order (`--no-loadscope-reorder`)."""
    devices.skip_what_cannot_run(config, items)
    mark_what_spreads(items)
    root = Path(__file__).parent
    ranks = {root / name: rank for rank, name in enumerate(LONGEST_FIRST)}

    @functools.cache
    def rank(file: Path) -> int:
        return min((ranks[path] for path in (file, *file.parents) if path in ranks), default=99)

    items.sort(key=lambda item: rank(item.path))


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is missing there is one worker
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a worker whole files, as `--dist loadfile` does, and those that share things together.

    None, which is pytest-xdist's own way, if anything else is asked for.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    together = {f"tests/{name}": names[0] for names in SHARING for name in names}

    class TogetherScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return together.get(file, file)

    return TogetherScheduling(config, log)


def mark_what_spreads(items: list[pytest.Item]) -> None:
    """Mark as wide what a `spread` has beyond its first cases, those that are slow not counted."""
    seen: collections.Counter[str] = collections.Counter()
    for item in items:
        spread = item.get_closest_marker("spread")
        if spread is None or item.get_closest_marker("slow") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] > spread.args[0]:
            item.add_marker(pytest.mark.wide)


def pytest_collection_finish() -> None:
    """Let the collector look at what tests make, not at the tests themselves, and less often.

    By itself it takes a tenth of a worker's time. Tests of what it finds call it.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


@pytest.fixture(scope="session")
def target(pytestconfig: pytest.Config) -> Target:
    """What models run on."""
    return devices.chosen(pytestconfig)


@pytest.fixture(scope="session")
def cuda_target(target: Target) -> Target:
    """The CUDA executor: as the command line says, else on torch's CPU device."""
    return target if target.executor == "cuda" else STAND_IN


@pytest.fixture(scope="session")
def judge(target: Target) -> Iterator[Judge]:
    """Compares what the embedded model says on the target."""
    made = Judge(target)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def logs_as_by_default() -> Iterator[None]:
    """Undo what a test's engine says of logging: the next test captures log lines."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
