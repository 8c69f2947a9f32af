"""structlog, loaded without `rich`; to be imported first by a plane that is a process of its own.

Where `rich` is installed, structlog imports it to draw tracebacks. Ours are plain (`planes.logs`),
and a start would take a seventh longer. Programs that import the engine keep their `rich`.
"""

from __future__ import annotations

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # whoever imports it is told it is absent
    try:
        import structlog  # noqa: F401 - loaded for those that come after
    finally:
        del sys.modules["rich"]
