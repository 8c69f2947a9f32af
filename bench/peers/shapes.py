"""Models of known shapes with random weights: speed depends on shapes, and few files are at hand.

Large ones are cut to some of their layers; all have the embedded model's vocabulary and tokenizer,
and their embedding is their head, too, but of gpt-oss. `runners/make_shape.py` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

VOCABULARY: Final = 49152

Tensors = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model.

    `keys`: of its GGUF file, without the architecture's name before them; those that all have are
    not among them. `layers`: tensors of each, by their names behind `blk.N.`, rows first.
    `formats`: what `llama-quantize` is told, the type last.
    """

    name: str
    title: str
    architecture: str
    hidden: int
    keys: Mapping[str, Any]
    layers: Sequence[Tensors]
    formats: Sequence[Sequence[str]] = (("--pure", "Q4_0"),)
    output_norm: str = "output_norm"
    is_tied: bool = True

    def file_of(self, words: Sequence[str]) -> str:
        """Return the name of the file in one of the formats."""
        return f"{self.name}-{words[-1]}.gguf"

    @property
    def source(self) -> str:
        """The name of the file with the weights that formats are made of."""
        return f"{self.name}-BF16.gguf"

    def all_keys(self) -> dict[str, Any]:
        """Return the keys of its file."""
        return {
            "context_length": 4096,
            "embedding_length": self.hidden,
            "block_count": len(self.layers),
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
            **self.keys,
        }

    def tensors(self) -> Tensors:
        """Return all tensors."""
        found: Tensors = {"token_embd.weight": (VOCABULARY, self.hidden)}
        for index, layer in enumerate(self.layers):
            found |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
        if not self.is_tied:
            found["output.weight"] = (VOCABULARY, self.hidden)
        return found | {f"{self.output_norm}.weight": (self.hidden,)}


def heads_keys(heads: int, kv_heads: int | list[int], dim: int, turning: int = 0) -> dict[str, Any]:
    """Return what files say of heads; `turning`: elements that RoPE turns, 0: all."""
    return {
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.dimension_count": turning or dim,
    }


def experts_keys(count: int, used: int, inner: int) -> dict[str, Any]:
    """Return what files say of experts."""
    return {
        "expert_count": count,
        "expert_used_count": used,
        "expert_feed_forward_length": inner,
        "feed_forward_length": inner,
    }


def attention(hidden: int, heads: int, kv_heads: int, dim: int, *, gates: bool = False) -> Tensors:
    """Return the matrices of attention; `gates`: queries have as many rows of gates beside them."""
    return {
        "attn_q.weight": ((1 + gates) * heads * dim, hidden),
        "attn_k.weight": (kv_heads * dim, hidden),
        "attn_v.weight": (kv_heads * dim, hidden),
        "attn_output.weight": (hidden, heads * dim),
    }


def norms(size: int, *names: str) -> Tensors:
    """Return norms of one size."""
    return {f"{name}.weight": (size,) for name in names}


def mlp(hidden: int, inner: int, kind: str = "", count: int = 0) -> Tensors:
    """Return a gated MLP, or `count` of them in one; `kind`: behind their names."""
    several = (count,) if count else ()
    return {
        f"ffn_gate{kind}.weight": (*several, inner, hidden),
        f"ffn_up{kind}.weight": (*several, inner, hidden),
        f"ffn_down{kind}.weight": (*several, hidden, inner),
    }


def experts(hidden: int, inner: int, count: int) -> Tensors:
    """Return a mixture's router and experts."""
    return {"ffn_gate_inp.weight": (count, hidden)} | mlp(hidden, inner, "_exps", count)


WITH_K_QUANTS: Final = ("--pure", "Q4_0"), ("Q4_K_M",)


def _llama() -> Shape:
    layer = norms(2048, "attn_norm", "ffn_norm") | attention(2048, 32, 8, 64) | mlp(2048, 8192)
    return Shape(
        "llama-1b", "Llama 3.2 1B's shape", "llama", 2048,
        {**heads_keys(32, 8, 64), "feed_forward_length": 8192}, [layer] * 16,
        (*WITH_K_QUANTS, ("IQ4_XS",), ("Q6_K",), ("Q8_0",)),
    )  # fmt: skip


def _granite_moe() -> Shape:
    layer = norms(1024, "attn_norm", "ffn_norm") | attention(1024, 16, 8, 64)
    scales = {
        "embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 1 / 64,
        "logit_scale": 6.0,
    }  # fmt: skip
    return Shape(
        "granite-moe", "Granite 3.1 1B-A400M's shape", "granitemoe", 1024,
        {**heads_keys(16, 8, 64), **experts_keys(32, 8, 512), **scales},
        [layer | experts(1024, 512, 32)] * 24, WITH_K_QUANTS,
    )  # fmt: skip


def _qwen3_moe() -> Shape:
    layer = norms(2048, "attn_norm", "ffn_norm") | norms(128, "attn_q_norm", "attn_k_norm")
    layer |= attention(2048, 32, 4, 128) | experts(2048, 768, 128)
    return Shape(
        "qwen3-moe", "4 layers of Qwen3 30B-A3B's", "qwen3moe", 2048,
        {**heads_keys(32, 4, 128), **experts_keys(128, 8, 768)}, [layer] * 4, WITH_K_QUANTS,
    )  # fmt: skip


def _qwen35() -> Shape:
    every = norms(2560, "attn_norm", "post_attention_norm") | mlp(2560, 9216)
    attending = every | norms(256, "attn_q_norm", "attn_k_norm")
    attending |= attention(2560, 16, 4, 256, gates=True)
    recurrent = every | {
        "attn_qkv.weight": (8192, 2560),
        "attn_gate.weight": (4096, 2560),
        "ssm_beta.weight": (32, 2560),
        "ssm_alpha.weight": (32, 2560),
        "ssm_conv1d.weight": (8192, 4),
        "ssm_a": (32,),
        "ssm_dt.bias": (32,),
        "ssm_norm.weight": (128,),
        "ssm_out.weight": (2560, 4096),
    }
    states = {
        "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16,
        "ssm.time_step_rank": 32, "ssm.inner_size": 4096, "full_attention_interval": 4,
        "rope.dimension_sections": [11, 11, 10, 0],
    }  # fmt: skip
    return Shape(
        "qwen35", "8 layers of Qwen3.5 4B's", "qwen35", 2560,
        {**heads_keys(16, 4, 256, 64), "feed_forward_length": 9216, **states},
        ([recurrent] * 3 + [attending]) * 2,
    )  # fmt: skip


def _lfm2() -> Shape:
    every = norms(2048, "attn_norm", "ffn_norm") | mlp(2048, 8192)
    attending = every | norms(64, "attn_q_norm", "attn_k_norm") | attention(2048, 32, 8, 64)
    convolving = every | {
        "shortconv.in_proj.weight": (6144, 2048),
        "shortconv.conv.weight": (2048, 3),
        "shortconv.out_proj.weight": (2048, 2048),
    }
    attends = [index in (2, 5, 8, 10, 12, 14) for index in range(16)]
    return Shape(
        "lfm2", "LFM2 1.2B's shape", "lfm2", 2048,
        {
            **heads_keys(32, [8 if it else 0 for it in attends], 64),
            "feed_forward_length": 8192, "shortconv.l_cache": 3,
        },
        [attending if it else convolving for it in attends],
        output_norm="token_embd_norm",
    )  # fmt: skip


def _granite_h() -> Shape:
    every = norms(2048, "attn_norm", "ffn_norm") | mlp(2048, 8192)
    attending = every | attention(2048, 32, 8, 64)
    recurrent = every | {
        "ssm_in.weight": (8512, 2048),
        "ssm_conv1d.weight": (4352, 4),
        "ssm_conv1d.bias": (4352,),
        "ssm_a": (64, 1),
        "ssm_dt.bias": (64,),
        "ssm_d": (64, 1),
        "ssm_norm.weight": (1, 4096),
        "ssm_out.weight": (2048, 4096),
    }
    others = {
        "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 1, "ssm.inner_size": 4096,
        "ssm.time_step_rank": 64, "rope.scaling.finetuned": False, "embedding_scale": 12.0,
        "residual_scale": 0.22, "attention.scale": 1 / 64, "logit_scale": 8.0,
    }  # fmt: skip
    attends = [index == 5 for index in range(10)]
    return Shape(
        "granite-h", "10 layers of Granite 4 H Micro's", "granitehybrid", 2048,
        {
            **heads_keys(32, [8 if it else 0 for it in attends], 64),
            "feed_forward_length": 8192, **others,
        },
        [attending if it else recurrent for it in attends],
    )  # fmt: skip


def _gemma3() -> Shape:
    of_layer = "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"
    layer = norms(2560, *of_layer) | norms(256, "attn_q_norm", "attn_k_norm")
    layer |= attention(2560, 8, 4, 256) | mlp(2560, 10240)
    return Shape(
        "gemma3", "12 layers of Gemma 3 4B's", "gemma3", 2560,
        {
            **heads_keys(8, 4, 256), "feed_forward_length": 10240,
            "attention.sliding_window": 1024, "rope.freq_base": 1e6,
        },
        [layer] * 12,
    )  # fmt: skip


def _glm_flash() -> Shape:
    every = norms(2048, "attn_norm", "ffn_norm") | norms(512, "attn_kv_a_norm")
    every |= norms(768, "attn_q_a_norm") | {
        "attn_q_a.weight": (768, 2048),
        "attn_q_b.weight": (5120, 768),
        "attn_kv_a_mqa.weight": (576, 2048),
        "attn_k_b.weight": (20, 512, 192),
        "attn_v_b.weight": (20, 256, 512),
        "attn_output.weight": (2048, 5120),
    }
    mixture = every | experts(2048, 1536, 64) | mlp(2048, 1536, "_shexp")
    mixture |= {"exp_probs_b.bias": (64,)}
    return Shape(
        "glm-flash", "4 layers of GLM-4.7-Flash's", "deepseek2", 2048,
        {
            "attention.head_count": 20, "attention.head_count_kv": 1,
            "attention.key_length": 576, "attention.value_length": 512,
            "attention.key_length_mla": 256, "attention.value_length_mla": 256,
            "attention.q_lora_rank": 768, "attention.kv_lora_rank": 512,
            "rope.dimension_count": 64, **experts_keys(64, 4, 1536), "feed_forward_length": 10240,
            "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_group_count": 1,
            "expert_group_used_count": 1, "expert_weights_scale": 1.8, "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
        [every | mlp(2048, 10240), *[mixture] * 3],
    )  # fmt: skip


def _gpt_oss() -> Shape:
    layer = norms(2880, "attn_norm", "post_attention_norm") | attention(2880, 64, 8, 64)
    layer |= experts(2880, 2880, 32)
    layer |= {
        "attn_q.bias": (4096,), "attn_k.bias": (512,), "attn_v.bias": (512,),
        "attn_output.bias": (2880,), "attn_sinks.weight": (64,), "ffn_gate_inp.bias": (32,),
        "ffn_gate_exps.bias": (32, 2880), "ffn_up_exps.bias": (32, 2880),
        "ffn_down_exps.bias": (32, 2880),
    }  # fmt: skip
    return Shape(
        "gpt-oss", "3 layers of gpt-oss 20B's", "gpt-oss", 2880,
        {
            **heads_keys(64, 8, 64), **experts_keys(32, 4, 2880), "rope.freq_base": 150000.0,
            "attention.sliding_window": 128, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
        },
        [layer] * 3,
        (("MXFP4_MOE",),), is_tied=False,
    )  # fmt: skip


SHAPES: Final = (
    _llama(), _granite_moe(), _qwen3_moe(), _qwen35(), _lfm2(), _granite_h(), _gemma3(),
    _glm_flash(), _gpt_oss(),
)  # fmt: skip
