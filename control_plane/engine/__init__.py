"""The shell around the core: it waits, talks to the compute plane and feeds the streams."""
