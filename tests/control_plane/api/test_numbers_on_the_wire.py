"""Counts keep their names when they become messages."""

from __future__ import annotations

import dataclasses

from control_plane.api.convert_numbers import metrics_to_proto
from control_plane.telemetry import EngineMetrics


def test_every_count_of_the_engine_is_told_under_its_own_name() -> None:
    names = [field.name for field in dataclasses.fields(EngineMetrics)]
    told = metrics_to_proto(EngineMetrics(**{name: 3 + i for i, name in enumerate(names)}))
    fields = {field.name for field in told.DESCRIPTOR.fields}
    missing = set(names) - fields
    assert not missing
    assert [getattr(told, name) for name in names] == [3 + i for i in range(len(names))]
