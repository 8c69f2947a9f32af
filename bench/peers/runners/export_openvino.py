"""Write OpenVINO IRs of a Hugging Face directory: `python export_openvino.py SOURCE NAME=PATH …`.

Names: `f32`, `int8_sym` (a scale for each output channel), `int4_ch` (likewise, symmetric). It
runs in an environment of its own: the exporter pins other versions than the peer.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

WEIGHTS: dict[str, dict[str, Any] | None] = {
    "f32": None,
    "int8_sym": {"bits": 8, "sym": True},
    "int4_ch": {"bits": 4, "sym": True, "group_size": -1, "ratio": 1.0},
}


def main(source: str, targets: list[str]) -> None:
    intel: Any = importlib.import_module("optimum.intel")
    convert: Any = importlib.import_module("optimum.exporters.openvino.convert")
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    for target in targets:
        name, _, path = target.partition("=")
        weights = WEIGHTS[name]
        model = intel.OVModelForCausalLM.from_pretrained(
            source,
            export=True,
            compile=False,
            quantization_config=weights and intel.OVWeightQuantizationConfig(**weights),
            load_in_8bit=None if weights else False,
        )
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        convert.export_tokenizer(tokenizer, path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
