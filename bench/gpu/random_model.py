"""A Llama of a given shape with random weights, written as a Hugging Face directory on the spot.

Speed does not depend on what weights are, so nothing is downloaded. A stretch of random numbers is
repeated through the tensors: billions of draws would take minutes. The tokenizer has a token for
each byte and names that no text contains for all the other ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from compute_plane.model import layout
from compute_plane.model.spec import ModelSpec

STRETCH = (1 << 22) + 3
"""Numbers before they repeat; odd, so that no two rows of a matrix are alike."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The numbers of a Llama; its head size is hidden_size / num_heads."""

    name: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    intermediate_size: int
    context_length: int
    tie_embeddings: bool = True

    @property
    def head_dim(self) -> int:
        """Of a query head."""
        return self.hidden_size // self.num_heads

    def spec(self) -> ModelSpec:
        """Return it as a model file would say it."""
        return ModelSpec(
            name=self.name,
            architecture="llama",
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            context_length=self.context_length,
            rope_theta=500_000.0,
            rope_scaling=None,
            rms_norm_eps=1e-5,
            tie_embeddings=self.tie_embeddings,
            num_parameters=0,
            weight_format="BF16",
        )

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each tensor, by its name in the directory."""
        return layout.tensor_shapes(self.spec())

    @property
    def num_parameters(self) -> int:
        """Tied matrices count once."""
        return sum(int(np.prod(shape)) for shape in self.tensor_shapes().values())

    def kv_bytes_per_token(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes of the keys and values of one token; `scale_bytes`: beside each head."""
        heads = 2 * self.num_layers * self.num_kv_heads
        return heads * (self.head_dim * element_bytes + scale_bytes)

    def step_weight_bytes(self, element_bytes: int) -> int:
        """Return the bytes of weights that a decode step must read.

        All of them but an embedding that is not the head too: of that it reads a row a token.
        """
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size
        return (self.num_parameters - embedding) * element_bytes

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": self.context_length,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "bfloat16",
        }


ONE_BILLION = LlamaShape("random-llama-1b", 128256, 16, 32, 8, 2048, 8192, 8192)
EIGHT_BILLION = LlamaShape(
    "random-llama-8b", 128256, 32, 32, 8, 4096, 14336, 8192, tie_embeddings=False
)
TINY = LlamaShape("random-llama-tiny", 320, 2, 2, 1, 128, 96, 512)


def write_model(shape: LlamaShape, directory: Path, *, seed: int = 0) -> Path:
    """Write the model into a directory, which is made, as bfloat16; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config()))
    (directory / "tokenizer.json").write_text(_tokenizer(shape.vocab_size).to_str())
    _write_tensors(shape, directory / "model.safetensors", seed)
    return directory


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer; ids from 256 on have names of several bytes, and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = alphabet + [f"<{number}>" for number in range(len(alphabet), vocab_size)]
    vocab = {name: number for number, name in enumerate(names[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_tensors(shape: LlamaShape, path: Path, seed: int) -> None:
    """Write a safetensors file: the header's length in 8 bytes, the header, the tensors."""
    shapes = shape.tensor_shapes()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, of_tensor in shapes.items():
        begin, end = end, end + 2 * int(np.prod(of_tensor))
        header[name] = {"dtype": "BF16", "shape": of_tensor, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(seed)
    stretch = _bfloat16(random.standard_normal(STRETCH, dtype=np.float32) * np.float32(0.05))
    one = _bfloat16(np.ones(1, dtype=np.float32))
    place = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for of_tensor in shapes.values():
            left = int(np.prod(of_tensor))
            if len(of_tensor) == 1:  # a norm's weights
                file.write(np.repeat(one, left).tobytes())
                continue
            while left:
                part = stretch[place : place + left]
                file.write(part.tobytes())
                left -= len(part)
                place = (place + len(part)) % STRETCH


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the upper halves of float32 values, which is near enough here."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
