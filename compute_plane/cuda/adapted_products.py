"""The products of a layer in a model that has adapters.

In a step without adapters, and where those of the step change nothing, they are as ever. Else

    normed (qkv)         as ever, then what adapters add to its outputs; where norm and product are
                         one launch the rows are normalised for that once more
    gated (gate, up)     norm, product, what adapters add, gate
    add (o, down)        as ever, then what adapters add: to the residual stream, if the product
                         went there (it is rounded twice), or to what is beside it, which the next
                         norm adds, and normalises before where the model does that

so rows of no adapter have what they had, but for gated ones of few rows: these come out of other
launches than a step without adapters has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compute_plane.cuda.adapters import DeviceAdapters, add_changes
from compute_plane.cuda.layer_products import Hidden, LayerProducts
from compute_plane.cuda.matrices import project

if TYPE_CHECKING:
    from torch import Tensor

    from compute_plane.cuda.matrices import Projection
    from compute_plane.cuda.operands import Writes
    from compute_plane.cuda.operations import DeviceOperations


class AdaptedProducts(LayerProducts):
    """Products with what the adapters of a stream's tokens (`Hidden.adapters`) add."""

    def __init__(
        self,
        operations: DeviceOperations,
        eps: float,
        adapters: DeviceAdapters,
        *,
        gates_mlps: bool = True,
    ) -> None:
        super().__init__(operations, eps, gates_mlps=gates_mlps)
        self._adapters = adapters

    def add(
        self,
        hidden: Hidden,
        x: Tensor,
        projection: Projection,
        norm: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Add as `LayerProducts` does, and what adapters add to the product, wherever it lies."""
        super().add(hidden, x, projection, norm, bias)
        outputs = hidden.residual if hidden.added is None else hidden.added
        if outputs.dim() > x.dim():
            outputs = outputs[0]  # of parts whose sum is the product
        add_changes(self._adapters.changes(projection, hidden.adapters), outputs, x)

    def _normed(
        self,
        hidden: Hidden,
        norm: Tensor | None,
        projection: Projection,
        writes: Writes,
        then: Projection | None = None,
        normalised: Tensor | None = None,
    ) -> Tensor:
        changes = self._adapters.changes(projection, hidden.adapters)
        if not changes:
            return super()._normed(hidden, norm, projection, writes, then, normalised)
        x = normalised
        if x is None:
            x = self.normalised(hidden, norm, self._of_library(len(hidden.residual), projection))
        if writes != "gated":
            outputs = super()._normed(hidden, norm, projection, writes, then, x)
            add_changes(changes, outputs, x)
            return outputs
        outputs = project(x, projection, self.operations, x.dtype)
        add_changes(changes, outputs, x)
        del x  # its memory serves what follows
        return self._gated(outputs, projection, then)
