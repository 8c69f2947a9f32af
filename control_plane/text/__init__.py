"""From text to tokens and back, per request; no wire, no scheduler."""
