"""Checks and measures the CUDA kernels on a GPU and writes one report: `python -m bench.gpu`.

decode_case   a drawn decode attention problem and its float64 answer, in NumPy
numerics      every variant on drawn cases against that answer
bandwidth     decode attention beside a device copy and torch's attention
timing        how long work on the device takes
report        what machine and which versions a report is of
"""
