"""The adapters that a plane is told of: `--lora NAME=PATH,…`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from planes.errors import ConfigError

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
MAX_ADAPTERS: Final = 1024


class AdapterSource(NamedTuple):
    """Where an adapter is read from, and what it is called."""

    name: str
    path: Path


def adapter_sources(text: str | None) -> tuple[AdapterSource, ...]:
    """Read `NAME=PATH,…`. Raises ConfigError for what is no such list."""
    if text is None:
        return ()
    sources = []
    for item in text.split(","):
        name, equals, path = item.strip().partition("=")
        if not equals or not path:
            raise ConfigError(
                f"lora must be NAME=PATH, several with commas between them, got {item!r}",
                field="lora",
            )
        if not NAME.fullmatch(name):
            raise ConfigError(
                "lora: a name has at most 128 letters, digits and any of ._:/@+-, and begins with "
                f"a letter or a digit, got {name!r}",
                field="lora",
            )
        try:
            sources.append(AdapterSource(name, Path(path).expanduser()))
        except RuntimeError as error:  # no home directory
            raise ConfigError(f"lora: {name}: {error}", field="lora") from None
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"lora: {name!r} is there more than once", field="lora")
    if len(names) > MAX_ADAPTERS:
        raise ConfigError(f"lora: at most {MAX_ADAPTERS} adapters, got {len(names)}", field="lora")
    return tuple(sources)
