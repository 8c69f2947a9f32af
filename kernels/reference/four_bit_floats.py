"""The four-bit floats of MXFP4: what codes and the bytes of scales stand for.

A code is a sign, two bits of exponent and one of fraction (E2M1): 0, ½, 1, 1½, 2, 3, 4 or 6, and
the same below zero. A byte s is the scale 2^(s − 127). Source: Open Compute Project, Microscaling
Formats (MX) 1.0.
"""

from __future__ import annotations

from typing import Final

DOUBLED: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What codes stand for, doubled: whole numbers."""
EXPONENT_BIAS: Final = 127
NOT_A_NUMBER: Final = 255
"""The byte of a scale that is none."""
