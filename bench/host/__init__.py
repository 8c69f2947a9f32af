"""What a step of the CUDA executor costs the host, with no GPU: `python -m bench.host`.

played_device  a device of which only the host's side is there
stages         the stages of a decode step on one thread: processor time of each
plane          a compute plane on the played device, as a process
serving        both planes and a client: how long the device would wait for the host
"""
