"""The numbers of IQ4_NL and IQ4_XS: denser near zero, as weights are.

Source: ggml's `ggml-common.h` (`kvalues_iq4nl`).
"""

from __future__ import annotations

from typing import Final

CODES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What each nibble stands for."""
