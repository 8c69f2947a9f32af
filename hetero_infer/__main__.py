"""`python -m hetero_infer`: the same as the command `hetero-infer`."""

from __future__ import annotations

import sys

from hetero_infer.cli import main

if __name__ == "__main__":
    sys.exit(main())
