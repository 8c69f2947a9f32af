"""A model's weights in the form in which kernels read them: packed, in one region of huge pages.

    region    │ embedding │ layer 0: attn_norm, q·k·v, o, mlp_norm, gate·up, down │ layer 1 … │
              final norm │ lm_head, unless it is tied │       each part from a multiple of 64 bytes

Where a layer has them, the biases of q, k and v, as one vector, the norms of heads and those of
what attention and MLP give are behind it.

Matrices that see the same input are one: the rows of q, k and v follow each other, and those of
gate and up, so that one product computes them all. Where a file stores them in formats that run
differently, or wants their inputs in different orders, there are several, each with the column of
the product at which it begins.

Where down wants its inputs in an order of its own, the rows of gate and up are packed in it, and
what they give is what down wants. For other matrices the rows that meet them are sorted.

A mixture has its router and then its experts, one behind the other in the same form, so that any of
them is found by its number.

Of a model whose first layers run elsewhere the others are packed, without the embedding.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from compute_plane.cpu.layer_plan import plan_layer, plan_layer_inputs
from compute_plane.cpu.packed_layers import PackedWeights
from compute_plane.cpu.packing_jobs import PackingJob
from compute_plane.cpu.packing_plan import PackingPlan
from compute_plane.executor.weight_formats import measure_conversions
from compute_plane.memory.huge_pages import huge_page_array
from compute_plane.memory.sizing import available_memory_bytes, check_weights_fit
from compute_plane.model import layout
from compute_plane.model.errors import printable
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorSource


def pack_weights(
    spec: ModelSpec,
    source: TensorSource,
    dtype: str = "auto",
    *,
    num_threads: int = 2,
    first_layer: int = 0,
) -> PackedWeights:
    """Pack every tensor of a model, `num_threads` at a time, and give its file's pages back.

    `dtype`: auto, float32 or bfloat16 (`weight_formats`). `first_layer`: if not 0, embedding and
    layers before this one run elsewhere and are left out. Raises ModelFileError if a weight is not
    finite or does not fit its format, ConfigError for an unknown dtype, the family's MemoryError if
    there is no memory.
    """
    plan = PackingPlan(dtype)
    embedding = None if first_layer else plan.matrix([source.tensor(layout.EMBEDDING)])
    layer_inputs = plan_layer_inputs(plan, spec, source)
    layers = [
        plan_layer(plan, spec, source, layer) for layer in range(first_layer, spec.num_layers)
    ]
    final_norm = embedding_norm = plan.vector(source.tensor(layout.FINAL_NORM))
    if spec.logits_scale != 1:
        embedding_norm = plan.vector(source.tensor(layout.FINAL_NORM))
    lm_head = embedding if spec.tie_embeddings else None
    if lm_head is None:
        name = layout.EMBEDDING if spec.tie_embeddings else layout.LM_HEAD
        lm_head = plan.matrix([source.tensor(name)])

    check_weights_fit(plan.num_bytes, available_memory_bytes())
    memory = huge_page_array(plan.num_bytes, purpose=f"the weights of {printable(spec.name)}")
    jobs = sorted(plan.jobs(memory), key=lambda job: -job.num_bytes)
    # NumPy lets go of the interpreter lock inside its loops, so threads pack side by side.
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        for _ in pool.map(PackingJob.run, jobs):
            pass
        conversions = measure_conversions(plan.converted(), pool)
    source.forget_pages()
    if spec.logits_scale != 1:
        end = final_norm + 4 * spec.hidden_size
        memory[final_norm:end].view(np.float32)[:] *= np.float32(spec.logits_scale)

    base = memory.ctypes.data

    packed_head = lm_head.moved(base)
    packed_embedding = None if embedding is None else embedding.moved(base)
    if embedding is lm_head:
        packed_embedding = packed_head
    return PackedWeights(
        memory=memory,
        embedding=packed_embedding,
        layers=tuple(layer.moved(base) for layer in layers),
        final_norm=base + final_norm,
        embedding_norm=base + embedding_norm,
        lm_head=packed_head,
        elements=plan.elements,
        conversions=conversions,
        layer_inputs=None if layer_inputs is None else layer_inputs.moved(base),
        parts={base + address: parts for address, parts in plan.parts.items()},
    )
