"""The command line of a plane's own process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from planes.near_names import did_you_mean
from planes.settings import add_arguments, settings_of


class PlaneArguments(argparse.ArgumentParser):
    """One option per setting of a configuration class, and `--config`.

    What is wrong with them is one line and status 2, as with the commands of `hetero-infer`.
    """

    def __init__(self, cls: type, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.add_argument("--config", default=None, metavar="FILE", help="JSON file of settings")
        add_arguments(self, cls)
        self._known = ("--config", *(item.flag for item in settings_of(cls)))

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the text of each option, None where it is not given. Raises SystemExit."""
        found, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].partition("=")[0]
            self.error(f"there is no option {name}{did_you_mean(name, self._known)}")
        return vars(found)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the usage: of some fifty options it buries the reason."""
        self.exit(2, f"{self.prog}: {message}\n")
