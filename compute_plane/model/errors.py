"""What can be wrong with a model reference or a model file."""

from __future__ import annotations

from pathlib import Path

from planes.errors import ConfigError

MAX_SHOWN = 200


class ModelReferenceError(ConfigError):
    """A `--model` value leads to no model: nothing there, not installed, or the hub is away."""

    reason = "MODEL_NOT_FOUND"

    def __init__(self, message: str) -> None:
        super().__init__(message, field="model")


class ModelFileError(ConfigError):
    """A model file is damaged, incomplete or contradicts itself.

    The message is one line, `<path>: <fault>`.
    """

    reason = "INVALID_MODEL_FILE"

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{printable(str(path), limit=4096)}: {fault}", field="model")
        self.path = path
        self.fault = fault


class UnsupportedModelError(ModelFileError):
    """A model file is sound, but asks for something this package does not do."""

    reason = "UNSUPPORTED_MODEL"


def printable(text: str, limit: int = MAX_SHOWN) -> str:
    """Return text from a file fit for one line of a message: escaped where needed, and bounded."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def system_fault(error: OSError) -> str:
    """Say in a few words why the operating system refused, without the path."""
    return error.strerror or type(error).__name__
