"""The wire between the planes."""
