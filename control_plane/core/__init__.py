"""The pure heart: what is computed when, in which blocks. No I/O, no clock, no randomness."""
