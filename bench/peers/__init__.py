"""Other CPU engines on the same prompts, machine and weights, in turns with this one.

    environments   a virtual environment for each peer      models     the model in their formats
    cases          what is measured, and against whom       contention who else uses the processors
    processes      a peer as a child                        own_server this product through gRPC
    turns          peer, ours, peer, ours, …                results    medians, ratios, one table
    runners/       the scripts that run inside the environments

`python -m bench.peers install`, then `python -m bench.peers run`.
"""
