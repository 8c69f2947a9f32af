"""The kernels of the CPU engine, compiled with Numba, their inner tiles written as LLVM IR.

    how it works   instruction_set  which instructions the processor has; the choice of the process
                   operation        what a kernel is, what a step's record and header hold
                   machine_code     kept in files, loaded   compiled   made from Python
                   vector_ir        LLVM IR of vectors        emitted   from IR to Numba
                   atomics, step    threads that walk through a step together
    for tables     catalogue        the operations by name    operands  the words of their records
                   board, *_sizes   what else a table and a team of threads must know
    matrices       matrix_product   what products have in common
                   int8_*           Q4_1, Q4_0, Q8_0 weights and int8 rows
                   float_*, bf16_*  F32, F16, BF16 weights
                   row_*            the rows that products read: norm, gate, quantisation
                   embedding
    attention      kv_layout        how keys and values lie in the pool
                   eight_bits       int8 and float8: their codes, scales and bfloat16
                   rope_*           rotary positions, and the write into the pool
                   attention_*
    sampling       sampling*, sample_record, weight_search, logit_adjustments

A kernel is compiled when a table first names it, and kept under a name that changes with every
source (`compute_plane.cpu.kernel_cache`). Numba takes half a second to import, so what a table
is made with knows kernels by name only: modules "for tables" import no module that holds kernels.
"""
