"""The small models of the suites that a GPU runs, and the kernels that these take.

`bench.gpu.needed_kernels` builds them ahead: on a device each suite would wait for the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.gpu.model_kernels import kernels_of
from bench.gpu.random_model import TINY
from compute_plane.model.loader import LoadedModel
from compute_plane.model.spec import ModelSpec
from kernels.cuda.variant import Variant
from tests.compute_plane.executor.tiny_sources import model_in_memory
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.devices import Target
from tests.integration import test_a_recording_replays_across_devices as replays
from tests.properties import test_cpu_results_do_not_depend_on_the_batch as companies
from tests.properties import test_real_models_give_each_request_its_own_text as crowds

ON_A_GPU = Target("cuda", "cuda")
EIGHT_BITS = ("int8", "float8")


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A model and how it is run. `configured`: what `--dtype` says. `dtype`: what that becomes."""

    name: str
    model: LoadedModel
    dtype: str
    configured: str
    block_size: int
    kv_dtype: str = ""

    def kernels(self) -> tuple[Variant, ...]:
        """Return its kernels."""
        return kernels_of(
            self.model, self.dtype, self.block_size, configured=self.configured,
            kv_dtype=self.kv_dtype,
        )  # fmt: skip


def small_models() -> Iterator[SmallModel]:
    """Yield all of them."""
    yield _plain("faults", TINY.spec(), "float32")
    yield _plain("crowds", crowds.SPEC, "float32")
    for name, made in crowds.RECURRENT.items():
        yield _plain(f"crowds, {name}", made(companies.SPEC), "float32")
    yield _plain("replays", replays.SPEC, "float32", replays.BLOCK_SIZE)
    for kv_dtype in ("", *EIGHT_BITS):
        yield _plain("replays", replays.SPEC, "bfloat16", replays.BLOCK_SIZE, kv_dtype)
    for kind, (configured, formats, kv_dtype) in companies.KINDS.items():
        spec, weights = companies.model_of(kind)
        yield SmallModel(
            kind,
            model_in_memory(spec, weights, formats, companies.ORDERS.get(kind)),
            "bfloat16" if configured == "auto" else configured,
            configured,
            ON_A_GPU.block_size(companies.BLOCK_SIZES[kv_dtype]),
            kv_dtype if kv_dtype in EIGHT_BITS else "",
        )


def variants() -> list[Variant]:
    """Return the kernels of all of them, each once."""
    found = (variant for small in small_models() for variant in small.kernels())
    return list(dict.fromkeys(found))


def _plain(
    name: str, spec: ModelSpec, dtype: str, block_size: int = 16, kv_dtype: str = ""
) -> SmallModel:
    """Return a model whose weights are stored in float32."""
    model = model_in_memory(spec, tiny_weights(spec))
    return SmallModel(name, model, dtype, dtype, ON_A_GPU.block_size(block_size), kv_dtype)
