"""The shell around the core: it waits, talks to the compute plane and feeds the streams.

    engine thread    thread → loop → inbox, commands; plugins (the scheduler, the KV cache manager)
    steps in flight  steps_in_flight → deadlines; step_gauges
    lost planes      trials (requests computed one at a time), vain_losses
    the link         link (a Protocol); compute_client → compute_session → compute_stream;
                     convert (the core ↔ protobuf), link_errors
    the plane        plane (what is known of it, and limits that follow)
    from a client    frontend → engine_parts → admission, gate; text_service,
                     template_choice, asking
    to the client    stream_hub → events, streams → sample_text; generation, continued;
                     delivery_pace, send_patience
    embeddings       embedder → embedding
    books            ledger (what metrics are made of), watch (who looks on)
    starting         bring_up (from an address to a running engine)
    several planes   roster → fleet → member; one_of_several (its link); routing, moving, totals
    recording        recording → recording_file, recording_tables

The engine thread alone touches the scheduler; everything else reaches it by `inbox` and hears of it
by `events`.
"""
