"""What layers with Gated DeltaNet have in place of attention, and how it lies in files.

Letters are those of `kernels.reference.delta_net`; R = Hv / Hk. Canonical names are those of Qwen3.5's directories, but
for the rates.

    canonical, model.layers.N.…       in GGUF files, blk.N.…   shape
    linear_attn.in_proj_qkv.weight    attn_qkv.weight          [C, hidden]        rows of q, then k, then v
    linear_attn.in_proj_z.weight      attn_gate.weight         [Hv·Dv, hidden]
    linear_attn.in_proj_b.weight      ssm_beta.weight          [Hv, hidden]
    linear_attn.in_proj_a.weight      ssm_alpha.weight         [Hv, hidden]
    linear_attn.conv1d.weight         ssm_conv1d.weight        [C, K]             in directories [C, 1, K]
    linear_attn.rates                 ssm_a                    [Hv]               −e^A; directories have A as A_log
    linear_attn.dt_bias               ssm_dt.bias              [Hv]
    linear_attn.norm.weight           ssm_norm.weight          [Dv]               never less by 1, as other norms may be
    linear_attn.out_proj.weight       ssm_out.weight           [hidden, Hv·Dv]

  Qwen3-Next has rows of each key head together, in directories all, in GGUF files those of b and a:
    linear_attn.in_proj_qkvz.weight                            [C + Hv·Dv, hidden]   q [Dk], k [Dk], v [R·Dv], z [R·Dv]
    linear_attn.in_proj_ba.weight     ssm_ba.weight            [2·Hv, hidden]        b [R], a [R]

  Value heads of one key head are neighbours, but in GGUF files of Qwen3.5: there value head j has key head j mod Hk
  (`DeltaNet.value_heads_tiled`). Columns of ssm_out lie so, too, two heads in a block of 256, so they stay where they are.

  Layers that attend have gates; in files the rows of each head follow each other, those of q, then those of its gate:
    self_attn.q_proj.weight           attn_q.weight            [H·D, hidden]         of [2·H·D, hidden]
    self_attn.q_gate.weight                                    [H·D, hidden]
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor_parts import RowRuns, RowsOfPart

MIXER: Final = "linear_attn"
IN_QKV: Final = f"{MIXER}.in_proj_qkv"
IN_Z: Final = f"{MIXER}.in_proj_z"
IN_B: Final = f"{MIXER}.in_proj_b"
IN_A: Final = f"{MIXER}.in_proj_a"
CONVOLUTION: Final = f"{MIXER}.conv1d"
NORM: Final = f"{MIXER}.norm"
OUT: Final = f"{MIXER}.out_proj"
RATES: Final = "rates"
TIME_BIAS: Final = "dt_bias"
"""These two are parts of MIXER, without a weight: `layout.layer_tensor(layer, MIXER, RATES)`."""

_IN_QKVZ: Final = f"{MIXER}.in_proj_qkvz"
_IN_BA: Final = f"{MIXER}.in_proj_ba"
_QUERY: Final = "self_attn.q_proj"
QUERY_GATE: Final = "self_attn.q_gate"

GGUF_NAMES: Final = {
    IN_QKV: "attn_qkv",
    IN_Z: "attn_gate",
    IN_B: "ssm_beta",
    IN_A: "ssm_alpha",
    _IN_BA: "ssm_ba",
    CONVOLUTION: "ssm_conv1d",
    NORM: "ssm_norm",
    OUT: "ssm_out",
}
GGUF_VECTORS: Final = {RATES: "ssm_a", TIME_BIAS: "ssm_dt.bias"}
QWEN3_NEXT: Final = "qwen3next"
TILED_IN_GGUF: Final = ("qwen35", "qwen35moe")
"""Architectures whose GGUF files have value heads in the order of `value_heads_tiled`."""


def delta_net_shapes(spec: ModelSpec, delta_net: DeltaNet) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer, by name in the layer, and their shapes, in order of use."""
    hidden, heads = spec.hidden_size, delta_net.num_value_heads
    return {
        f"{IN_QKV}.weight": (delta_net.channels, hidden),
        f"{IN_Z}.weight": (delta_net.value_size, hidden),
        f"{IN_B}.weight": (heads, hidden),
        f"{IN_A}.weight": (heads, hidden),
        f"{CONVOLUTION}.weight": (delta_net.channels, delta_net.kernel_size),
        f"{MIXER}.{RATES}": (heads,),
        f"{MIXER}.{TIME_BIAS}": (heads,),
        f"{NORM}.weight": (delta_net.value_dim,),
        f"{OUT}.weight": (hidden, delta_net.value_size),
    }


def stored_delta_net(
    spec: ModelSpec, delta_net: DeltaNet, *, in_gguf: bool
) -> Iterator[tuple[str, RowsOfPart]]:
    """Yield the tensors of a layer that files of this kind hold in others, by name in the layer."""
    if spec.architecture != QWEN3_NEXT:
        return
    count, each = delta_net.num_key_heads, delta_net.num_value_heads // delta_net.num_key_heads

    def part(name: str, of: str, sizes: list[int], places: list[int]) -> tuple[str, RowsOfPart]:
        """Return what are the parts at some places of those of each key head."""
        step = sum(sizes)
        runs = [RowRuns(sum(sizes[:place]), sizes[place], step, count) for place in places]
        shape = count * step, spec.hidden_size
        return f"{name}.weight", RowsOfPart(f"{of}.weight", tuple(runs), shape)

    of_values = each * delta_net.value_dim
    sizes = [delta_net.key_dim, delta_net.key_dim, of_values, of_values]
    if not in_gguf:
        yield part(IN_QKV, _IN_QKVZ, sizes, [0, 1, 2])
        yield part(IN_Z, _IN_QKVZ, sizes, [3])
    yield part(IN_B, _IN_BA, [each, each], [0])
    yield part(IN_A, _IN_BA, [each, each], [1])


def stored_gates(spec: ModelSpec) -> Iterator[tuple[str, RowsOfPart]]:
    """Yield queries and their gates of a layer that attends, where attention has gates."""
    if not spec.gates_attention:
        return
    size, shape = spec.head_dim, (2 * spec.query_size, spec.hidden_size)
    for place, role in enumerate((_QUERY, QUERY_GATE)):
        runs = RowRuns(place * size, size, 2 * size, spec.num_heads)
        yield f"{role}.weight", RowsOfPart(f"{_QUERY}.weight", (runs,), shape)
