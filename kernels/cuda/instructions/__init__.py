"""The machine instructions our kernels need and Numba does not offer by itself.

    emit            how an instruction is typed in Python and written as LLVM IR
    conversions     16-bit floats to and from float32, powers of two, reciprocals
    elements        16-byte vectors of a tensor's elements, as float32
    exact_float32   operations rounded once each, never fused
    exact_float64   the same in float64
    eight_bits      keys and values of eight bits, to 16-bit floats and from float32
    placed_bytes    the same to 16-bit floats by moving bits, units and offset left to the sums
    small_integers  four to eight bits to 16-bit floats
    small_floats    floats of four and eight bits to 16-bit floats, scales to float32
    whole_scales    scales that are bytes to float32
    vectors         16-byte reads and writes, as words
    addresses       places of 64 bits in one instruction, and not computed twice
    tiles           tensor cores: products of 16 × 16 by 16 × 8 tiles, and how tiles reach registers
    across_blocks   from block to block: a fence, a ticket, reads past the first cache
    early_launch    launches that begin before the one ahead has ended
    atomics         additions of integers by many threads
    async_copies    global to shared memory behind the arithmetic's back

An instruction is an intrinsic: no function call is left, nothing is linked. Everything else Numba
has natively: `cuda.shfl_xor_sync`, `cuda.syncthreads`, shared and local arrays.

*Registers.* A kernel keeps what a thread owns in small local arrays whose every index is known once
the loops over compile-time ranges are unrolled; the compiler then makes registers of them, which
`python -m kernels.cuda.check` proves (no local memory). Instructions that take or give several
registers work on a row of such an array: `load_vector(words, i, pool, element)` fills
words[i, 0 … 3].

*Pointers.* Memory is named by a pointer or a shared array and an index in its own elements, never
by an address, so that the simulator of the tests can run the same source and judge every access.
"""
