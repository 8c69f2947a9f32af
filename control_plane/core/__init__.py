"""What is decided, and nothing else: no I/O, no clock, no log, no threads, no chance.

    what a request is    request, generation_params, request_options, structured_outputs,
                         tool_calls, embedding, embedding_params, limits
    who waits, who runs  queue, running, giving_way (to a lower priority number)
    deciding a step      scheduler → composer → step → batch; arrivals,
                         drafting → prompt_lookup, guesses (of a draft model), draft_pause
    taking a result      results → beams → beam; failures, request_table (that have not ended)
    memory               kv_cache = block_pool + prefix_cache; filled_blocks, host_pool, slots,
                         states
    what may be said     constraint, token_masks
    borders              interface, kv_interface, errors

Whoever waits and talks is `control_plane.engine`.
"""
