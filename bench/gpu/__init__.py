"""Checks and measures the CUDA kernels on a GPU and writes one report: `python -m bench.gpu`.

case              a drawn problem for a kernel and its exact answer, in NumPy
cases/            how the problems of each operation are drawn
numerics          every variant on drawn cases against that answer
decode_bandwidth  decode attention beside a device copy
decode_rivals     others' decode attention on the same rows
prefill_speed     operations a second of prefill attention
prefill_rivals    others' prefill attention on the same rows
matmul_bandwidth  products with quantised weights beside the copy
matmul_rivals     torch's products of the same size
device            kernels on the device, and how long its work takes
provenance        what machine and which versions a report is of
"""
