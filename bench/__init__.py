"""Numbers, never asserted in tests."""
