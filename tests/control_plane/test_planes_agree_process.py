"""What the planes must agree on though they cannot import each other."""

from __future__ import annotations

import json

from compute_plane.config import ComputePlaneConfig
from control_plane.config import OTHER_KEYS, ControlPlaneConfig, load_config
from planes.settings import settings_of


def test_no_key_of_the_compute_plane_is_unknown_to_the_control_plane():
    own = {item.name for item in settings_of(ControlPlaneConfig)}
    compute = {item.name for item in settings_of(ComputePlaneConfig)}
    assert compute - own <= OTHER_KEYS


def test_the_seed_documents_file_loads_without_a_warning(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {"block_size": 16, "max_num_blocks": 1024, "max_batch_size": 32,
             "memory_threshold": 0.9}
        )
    )  # fmt: skip
    loaded = load_config([f"--config={file}", "--compute=unix:/x"])
    assert loaded.unknown_keys == ()
