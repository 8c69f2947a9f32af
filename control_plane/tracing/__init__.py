"""Whose trace a request belongs to, and the spans that say how it went."""
