"""Replay: a recorded stream of batches on another compute plane, compared answer by answer."""
