"""`python -m hetero_infer`, and the command `hetero-infer`: the same.

What the command line is read with takes a fifth of a second to import. Ctrl-C within it must end
like any other, hence this entrance, which imports next to nothing itself.
"""

from __future__ import annotations

import os
import signal
import sys

EXIT_INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Run the command line and return the exit status."""
    # Where somebody else decides what Ctrl-C does (`nohup`, a shell's background), it stays so.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        # No exception: modules that are half imported may catch it, or turn it into another.
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        from hetero_infer import cli
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
