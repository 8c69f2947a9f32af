"""AMX in software: operations made for tile registers run where the processor has none.

What runs is the machine code of the operations, unchanged. A processor without AMX answers each of
its instructions with a signal (SIGILL); its handler does what the manual says, on registers in
memory, and goes on behind the instruction. What the manual forbids ends the process with a line
that says what it was, and Python's traceback.

    products         what the two products of tiles compute, rounding and order and all
    registers        a thread's registers, and what the instructions do with them
    trap             the handler: takes instructions apart
    sets             chooses an instruction set, with software behind it where it must be
    plugin           `python -m pytest -p tests.amx.plugin …`: runs any tests on the set `amx`
    sapphire_rapids  the same, compiled for a processor that has it

The rest of the set (AVX-512 with VNNI and BF16) must be there. Intel's manual (Software Developer's
Manual, volume 2, TDPBF16PS and others) says what is rounded when; Bochs, an emulator of whole
processors, does the same. No processor with AMX has been compared with it yet:
`test_tiles_do_what_the_manual_says.py` does so where there is one.
"""
