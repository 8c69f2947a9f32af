"""A launch goes through NVIDIA's own bindings into a driver library; only the library is played.

What arrives is what the bindings make of grid, stream and arguments: that cannot be learnt from a
recorder in the bindings' place.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "played_driver.c"
ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys
from kernels.cuda.errors import DriverError
from kernels.cuda.launch import LoadedKernel
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.rms_norm import RmsNormVariant

fetched = (2**46, 301, 2**33, 144)
pointers = (0x7F0000000100, 0x7F0000000200, 0, 0x7F0000000300)
norm = LoadedKernel(RmsNormVariant("float32", 256), b"8 8 8 8 8 4 4 8 8 8 8")
norm.launch((7, 1, 1), 0x7FFF12345678, *pointers, 2**47, 1e-5, 0.75, *fetched)
print(norm.attributes())
product = LoadedKernel(QuantizedMatmulVariant("Q4_0", "bfloat16", 8), b"8 8 8 8 8 8 4 8 8")
product.launch((1, 2, 3), 0, 1, 2, 3, 2**40, -1, 5, -6, 7, 2**45)
product.launch((0, 2, 3), 0, 1, 2, 3, 4, 4, 5, 6, 7, 8)
early = LoadedKernel(RmsNormVariant("float32", 256), b"8 8 8 8 8 4 4 8 8 8 8", begins_early=True)
for tokens in 7, 8:
    early.launch((tokens, 1, 1), 0x7FFF12345678, *pointers, tokens, 1e-5, 0.75, *fetched)
try:
    norm.launch((1, 1, 1), 0xBAD, 1, 2, 3, 4, 5, 1.0, 1.0, *fetched)
except DriverError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The folder of the played library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / "libcuda.so.1"), str(SOURCE)]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.wide
def test_grid_block_stream_and_every_argument_arrive_as_the_kernel_takes_them(library):
    command = ["env", f"LD_LIBRARY_PATH={library}", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    attributes, fault = done.stdout.splitlines()
    # CUfunction_attribute: 0 threads, 1 shared, 3 local, 4 registers.
    assert attributes == str(
        {"registers": 104, "shared_bytes": 101, "local_bytes": 103, "max_threads": 100}
    )
    assert fault == "cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS"
    pointers = (0x7F0000000100, 0x7F0000000200, 0, 0x7F0000000300, 2**47)
    fetched = [struct.pack("<q", value).hex() for value in (2**46, 301, 2**33, 144)]
    numbers = [struct.pack("<f", 1e-5).hex(), struct.pack("<f", 0.75).hex(), *fetched]
    block, rest = "block {} 1 1", "shared 0 stream {} extra (nil)"

    def early_launch(tokens):
        yield "attribute 6: 1"  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        yield f"launch 0x2222 grid {tokens} 1 1 {block.format(64)} {rest.format('0x7fff12345678')}"
        for pointer in (*pointers[:4], tokens):
            yield struct.pack("<Q", pointer).hex()
        yield from numbers

    assert done.stderr.splitlines() == [
        "function rms_norm_add_float32_e256 of 0x1111",
        f"launch 0x2222 grid 7 1 1 {block.format(64)} {rest.format('0x7fff12345678')}",
        *(struct.pack("<Q", pointer).hex() for pointer in pointers),
        *numbers,
        "function quantized_matmul_q4_0_bfloat16_m8 of 0x1111",
        f"launch 0x2222 grid 1 2 3 {block.format(256)} {rest.format('(nil)')}",
        *(struct.pack("<q", value).hex() for value in (1, 2, 3, 2**40, -1, 5)),
        struct.pack("<i", -6).hex(),
        *(struct.pack("<q", value).hex() for value in (7, 2**45)),
        "function rms_norm_add_float32_e256 of 0x1111",
        *(line for tokens in (7, 8) for line in early_launch(tokens)),
    ]
