"""A decoder layer as it will lie on the device."""

from __future__ import annotations

from dataclasses import dataclass

from compute_plane.cuda.planned_feedforward import PlannedExperts, PlannedMlp
from compute_plane.cuda.planned_layer_inputs import PlannedLayerInput
from compute_plane.cuda.planned_matrix import Placed, PlannedMatrix
from compute_plane.cuda.planned_mixers import PlannedMixer, pair_of, vector_of
from compute_plane.cuda.planned_recurrences import PlannedRecurrence
from compute_plane.cuda.weights import DeviceLayer


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLayer:
    """One decoder layer, as in `DeviceLayer`."""

    attn_norm: PlannedMatrix | None
    mixer: PlannedMixer | None
    mlp_norm: PlannedMatrix | None
    feedforward: PlannedMlp | PlannedExperts | None
    output_norms: tuple[PlannedMatrix, PlannedMatrix] | None
    layer_input: PlannedLayerInput | None = None
    scale: float = 1.0
    beside: PlannedRecurrence | None = None

    @property
    def vectors(self) -> tuple[PlannedMatrix, ...]:
        """Everything else, and what chooses experts."""
        part = self.feedforward
        norms = self.attn_norm, self.mlp_norm, *(self.output_norms or ())
        of_experts = part.vectors if isinstance(part, PlannedExperts) else ()
        of_mixer = () if self.mixer is None else self.mixer.vectors
        of_state = () if self.beside is None else self.beside.vectors
        of_input = () if self.layer_input is None else self.layer_input.vectors
        alone = (norm for norm in norms if norm is not None)
        return (*alone, *of_mixer, *of_state, *of_experts, *of_input)

    @property
    def matrices(self) -> tuple[PlannedMatrix, ...]:
        """Everything that rows are multiplied with."""
        parts = self.mixer, self.beside, self.feedforward, self.layer_input
        return tuple(one for part in parts if part is not None for one in part.matrices)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(part.num_bytes for part in (*self.vectors, *self.matrices))

    def at(self, placed: Placed) -> DeviceLayer:
        """Return it where it lies."""
        norms = self.output_norms
        return DeviceLayer(
            attn_norm=vector_of(placed, self.attn_norm),
            mixer=None if self.mixer is None else self.mixer.at(placed),
            mlp_norm=vector_of(placed, self.mlp_norm),
            feedforward=None if self.feedforward is None else self.feedforward.at(placed),
            output_norms=None if norms is None else pair_of(placed, norms),
            layer_input=None if self.layer_input is None else self.layer_input.at(placed),
            scale=self.scale,
            beside=None if self.beside is None else self.beside.at(placed),
        )
