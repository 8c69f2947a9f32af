"""The suites' own small models are such as a GPU's kernels are written for.

Without a GPU they run on reference operations, which take any shape: that a kernel refuses one
would be found where minutes are dear.
"""

from __future__ import annotations

import pytest

from bench.gpu.model_kernels import Nowhere
from bench.gpu.random_model import TINY
from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.model.spec import ModelSpec
from tests.compute_plane.executor.tiny_sources import model_in_memory
from tests.devices import STAND_IN, Target
from tests.integration import test_a_recording_replays_across_devices as replays
from tests.properties import test_cpu_results_do_not_depend_on_the_batch as companies
from tests.properties import test_real_models_give_each_request_its_own_text as crowds

ON_A_GPU = Target("cuda", "cuda")
SPECS = {"crowds": crowds.SPEC, "faults": TINY.spec(), "replays": replays.SPEC}


def kernels_of(spec: ModelSpec, dtype: str, block_size: int, *others: object) -> list[str]:
    """Return the names of all kernels of a model; raises UnsupportedVariantError."""
    operations = KernelOperations(Nowhere(), spec, dtype, block_size, *others)
    return [variant.name for variant in operations.variants]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_are_kernels_for_every_small_model(name, dtype):
    for wanted in (4, 16):
        assert kernels_of(SPECS[name], dtype, ON_A_GPU.block_size(wanted))


@pytest.mark.parametrize("kind", companies.KINDS)
def test_there_are_kernels_for_every_format_of_weights_and_pool(kind):
    configured, formats, kv_dtype = companies.KINDS[kind]
    spec, weights = companies.model_of(kind)
    model = model_in_memory(spec, weights, formats, companies.ORDERS.get(kind))
    dtype = "bfloat16" if configured == "auto" else configured
    plan = plan_weights(spec, model.source, dtype, configured)
    block_size = ON_A_GPU.block_size(companies.BLOCK_SIZES[kv_dtype])
    pool = kv_dtype if kv_dtype in ("int8", "float8") else dtype
    assert kernels_of(spec, dtype, block_size, plan.quantized, pool)


def test_blocks_are_as_large_as_asked_for_or_as_the_next_there_is():
    assert [ON_A_GPU.block_size(wanted) for wanted in (4, 16, 24, 32)] == [16, 16, 32, 32]
    assert [STAND_IN.block_size(wanted) for wanted in (4, 24)] == [4, 24]
    assert Target("cpu", "cpu").block_size(4) == 4
