from __future__ import annotations

import subprocess
import sys

import pytest

import hetero_infer
import kernels

DOCUMENTED = [
    "InferenceEngine",
    "EngineConfig",
    "GenerationParams",
    "CompletedRequest",
    "EngineMetrics",
    "Request",
    "RequestState",
    "Sequence",
    "Scheduler",
    "SchedulerOutput",
    "SchedulerProtocol",
    "SchedulerStats",
    "StepBatch",
    "StepResult",
    "SlotStart",
    "KVCacheManager",
    "MemoryStats",
    "ExecutionBatch",
    "ExecutionOutput",
    "GPUExecutor",
    "ExecutorContext",
    "PlaneStartError",
    "QueueFullError",
    "SimpleTokenizer",
    "Tokenizer",
    "Client",
    "AsyncClient",
    "ClientFiles",
    "Message",
    "Answer",
    "ServerLostError",
    "DeadlineExceededError",
    "EngineError",
    "ConfigError",
    "MemoryError",
    "ValidationError",
    "ExecutionError",
    "SchedulerError",
    "TokenizationError",
]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_documented_name_is_there(name):
    assert name in hetero_infer.__all__
    assert name in dir(hetero_infer)
    assert getattr(hetero_infer, name).__name__ == name


def test_there_are_no_names_that_lead_nowhere():
    for name in hetero_infer.__all__:
        assert getattr(hetero_infer, name) is not None
    assert not hasattr(hetero_infer, "Nonsense")
    assert {*hetero_infer._HOME, "__version__"} == {*hetero_infer.__all__}


def test_all_families_are_engine_errors():
    for name in (name for name in hetero_infer.__all__ if name.endswith("Error")):
        assert issubclass(getattr(hetero_infer, name), hetero_infer.EngineError)


def test_our_kernels_are_not_somebody_elses():
    assert kernels.__file__ == hetero_infer.__file__.replace("hetero_infer", "kernels")


def loaded_by(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", program], text=True).split())


def test_importing_the_package_and_asking_for_the_version_loads_nothing_heavy():
    heavy = {"numpy", "numba", "torch", "grpc", "rich", "typer", "structlog", "tokenizers"}
    assert loaded_by("import hetero_infer; hetero_infer.__version__") & heavy == set()
    version = "import hetero_infer.cli as c; assert c.main(['--version']) == 0"
    assert loaded_by(version) & (heavy - {"typer", "rich", "structlog"}) == set()
