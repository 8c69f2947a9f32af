"""Under which heading of the help each setting stands."""

from __future__ import annotations

from control_plane.config import ControlPlaneConfig, SchedulingLimits
from hetero_infer.generation_config import GenerationConfig
from planes.settings import Setting, settings_of


def heading_of(item: Setting) -> str:
    """Say under which heading of the help a setting stands."""
    if item.kind is bool:
        return "Switches"
    for heading, cls in (
        ("Generation", GenerationConfig),
        ("Scheduling", SchedulingLimits),
        ("Serving and logs", ControlPlaneConfig),
    ):
        if any(item.name == other.name for other in settings_of(cls)):
            return heading
    return "Model, device and KV pool"
