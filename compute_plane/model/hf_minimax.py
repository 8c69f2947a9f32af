"""What config.json of a MiniMax-M2 has of its own."""

from __future__ import annotations

from compute_plane.model.errors import UnsupportedModelError, printable
from compute_plane.model.json_file import JsonObject


def minimax_rotary_share(config: JsonObject, head_dim: int) -> float:
    """Return which share of a head's elements turns: files say how many do."""
    turning = config.optional_integer("rotary_dim")
    return 1.0 if turning is None else turning / max(head_dim, 1)


def refuse_other_minimax(config: JsonObject) -> None:
    """Refuse what the release could have been, and is not. Raises UnsupportedModelError."""
    if config.boolean("use_qk_norm") is False:
        raise UnsupportedModelError(config.path, "use_qk_norm = false is not supported")
    kind = config.text("qk_norm_type") or "per_layer"
    if kind != "per_layer":
        raise UnsupportedModelError(
            config.path, f"qk_norm_type must be per_layer, got {printable(kind)}"
        )
    kinds = config.raw("attn_type_list")
    if kinds is not None and not (isinstance(kinds, list) and all(each == 1 for each in kinds)):
        raise UnsupportedModelError(
            config.path, "attn_type_list must be 1 of all layers: others are not supported"
        )
