"""`python -m control_plane`: the control plane process."""

from __future__ import annotations

import planes.lean_structlog  # noqa: F401 - before anything imports structlog

# isort: split
import asyncio
import sys
from collections.abc import Sequence

import structlog
import uvloop

from control_plane.app import ControlPlane
from control_plane.config import ControlPlaneConfig, load_config
from planes.descriptors import raise_descriptor_limit
from planes.errors import ConfigError
from planes.logs import configure_logging
from planes.ready import announce_failure

EXIT_BAD_CONFIG = 2

_log = structlog.get_logger(__name__)


def main(argv: Sequence[str] | None = None, *, prog: str = "control_plane") -> int:
    """Run until a signal; 0 after an orderly end, 1 after a fault, 2 for a bad configuration."""
    ready_fd = None
    try:
        loaded = load_config(sys.argv[1:] if argv is None else argv, prog=prog)
        config = loaded.config
        ready_fd = config.ready_fd
        raise_descriptor_limit()
        configure_logging(plane="control", level=config.log_level, log_format=config.log_format)
        if loaded.unknown_keys:
            _log.warning("unknown keys in the config file", keys=list(loaded.unknown_keys))
        for line in loaded.unknown_variables:
            _log.warning(line)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config))
    except ConfigError as error:
        print(f"{prog}: {error.message}\n", end="", file=sys.stderr)
        announce_failure(ready_fd, error.message)  # one that has served ends in another way
        return EXIT_BAD_CONFIG


async def _serve(config: ControlPlaneConfig) -> int:
    return await ControlPlane(config).run()


if __name__ == "__main__":
    sys.exit(main())
