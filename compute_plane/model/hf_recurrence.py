"""The layers with a state that a config.json describes."""

from __future__ import annotations

from compute_plane.model.hf_delta_net import config_delta_net
from compute_plane.model.hf_falcon_h1 import falcon_mamba2
from compute_plane.model.hf_granite4 import config_mamba2
from compute_plane.model.hf_lfm2 import config_convolution
from compute_plane.model.hf_model_types import FALCON_H1, GRANITE4, LFM2, LFM2_MOE, NEMOTRON_H
from compute_plane.model.hf_nemotron import nemotron_mamba2
from compute_plane.model.json_file import JsonObject
from compute_plane.model.recurrence import Recurrence


def config_recurrence(config: JsonObject, model_type: str, norm_eps: float) -> Recurrence | None:
    """Return what some layers have in place of attention, or beside it; None: there are no states.

    `norm_eps`: of the model's norms. Raises ModelFileError, UnsupportedModelError.
    """
    if model_type in (LFM2, LFM2_MOE):
        return config_convolution(config)
    if model_type == GRANITE4:
        return config_mamba2(config, norm_eps)
    if model_type == NEMOTRON_H:
        return nemotron_mamba2(config, norm_eps)
    if model_type == FALCON_H1:
        return falcon_mamba2(config, norm_eps)
    return config_delta_net(config, model_type)
