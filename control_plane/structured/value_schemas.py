"""The schema of one value of a call, as a document of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from control_plane.text.answers.parameter_kinds import ALL_BUT_TEXT, SAYS_NOTHING

OPTIONS: Final = "x-guidance"
"""Under this name a schema tells the library how to compile it."""

_ROOT: Final = "the-root"


def of_value(root: Mapping[str, object], schema: object, is_no_text: bool) -> str:
    """Return the schema of a value that is JSON, as a document of its own.

    `root`: the document that it is part of. `is_no_text`: the value is none.
    """
    found: dict[str, object] = {"not": {}}
    if isinstance(schema, Mapping):
        found = {key: schema[key] for key in schema if key not in SAYS_NOTHING}
    if is_no_text and "type" not in found:
        found["type"] = sorted(ALL_BUT_TEXT)
    rebased = _rebased(found)
    if rebased != found:
        found = {**rebased, "$defs": {_ROOT: _rebased(root)}}
    if OPTIONS in root:
        found[OPTIONS] = root[OPTIONS]
    return json.dumps(found)


def _rebased(value: object) -> dict[str, object]:
    """Return a schema in which references lead into `$defs`, where the root is."""

    def walk(value: object) -> object:
        if isinstance(value, list):
            return [walk(one) for one in value]
        if not isinstance(value, dict):
            return value
        return {
            key: f"#/$defs/{_ROOT}{one[1:]}"
            if key == "$ref" and isinstance(one, str) and one.startswith("#")
            else walk(one)
            for key, one in value.items()
        }

    found = walk(value)
    assert isinstance(found, dict)
    return found
