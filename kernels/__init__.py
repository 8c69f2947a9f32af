"""Arithmetic: functions from arrays to a caller-provided `out`. No state, no I/O."""
