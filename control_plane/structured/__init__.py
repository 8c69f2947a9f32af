"""Structured outputs: from the form that a caller wants to the tokens that may come next."""
