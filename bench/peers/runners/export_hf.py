"""Write a GGUF model as Hugging Face directories: `python export_hf.py GGUF FLOAT32_DIR BF16_DIR`.

transformers dequantises the file; it runs in that peer's environment.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def main(gguf: Path, float32_directory: str, bfloat16_directory: str) -> None:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    source, name = str(gguf.parent), gguf.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):  # it would be written out with plain weights
        del config.quantization_config
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    for directory, dtype in (
        (float32_directory, torch.float32),
        (bfloat16_directory, torch.bfloat16),
    ):
        plain.to(dtype).save_pretrained(directory)
        tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
