"""A compute plane on the played device: `python -m bench.host.plane STEP_US WAKE_US FLAG…`.

`FLAG…`: those of `python -m compute_plane`. Only what builds the executor `cuda` is another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.host.played_device import build_played
from compute_plane.__main__ import main as serve
from compute_plane.executor import registry


def main(argv: Sequence[str]) -> int:
    """Serve until a signal; the exit status of a compute plane."""
    step_us, wake_us = (float(word) for word in argv[:2])
    registry.BUILT_IN["cuda"] = lambda context: build_played(context, step_us, wake_us)[0]
    return serve(argv[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
