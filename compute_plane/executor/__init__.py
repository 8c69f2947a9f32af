"""What executors share, and the one thread that owns the device.

    contract           interface (what an executor is asked and answers), registry (by name, or
                       `module:attribute`), warm_up
    device thread      device_thread → steps_in_turn | step_pipeline (steps launched ahead);
                       sessions (who drives the plane), work (a batch on its way)
    sequences          slots → slot_state, slot_starts, row_stage, copy_stage
    from step to step  step (as on the wire), decode_run (a step that only goes on) →
                       block_tables (which grow in place),
                       samples_ahead (of a step under way), drafts (speculative decoding);
                       next_drafts → draft_model → draft_cache, draft_odds
    validation         batch_checks → copy_checks, sampling_checks, constraints (allowed tokens);
                       write_checks (who writes which block), decode_checks
    results            step_results → logprob_columns, embeddings (hidden states)
    for executors      token_layout (rows, KV places, attention), adapter_runs, sampling_rows,
                       logits_groups, weight_formats (what each matrix runs in)
    without a model    simulated

An executor runs one batch and owns nothing but what it is given: weights, pool, device. They are
`compute_plane.cpu`, `compute_plane.cuda`, or a user's own; nothing here but `registry` knows them.
"""
