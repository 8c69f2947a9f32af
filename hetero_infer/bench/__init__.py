"""`hetero-infer bench`: numbers with their provenance, never asserted in tests.

    settings      what a benchmark can be told
    figures       medians, percentiles, ratios
    provenance    machine, versions, commit, command        report   JSON, tables, files
    server        planes started for a run, or a target     load     many streams from one client
    throughput · latency · memory · kernels · accuracy      one benchmark each: `run`
    plots         the PNG of each; the only module that needs matplotlib

Nothing here is imported before a benchmark is asked for, and only `kernels` and `accuracy` bring in
Numba.
"""
