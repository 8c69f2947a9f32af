"""Scripts that run one engine each, inside the engine's own environment.

`runner.py` is the script; `run_*.py` are its engines. They import nothing but the standard library
and the engine they are named after (`run_engine`: this product), never one another.
`export_hf.py` and `export_openvino.py` turn the GGUF file into what the peers read.
"""
