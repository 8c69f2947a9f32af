"""What logits say of a text, and how far they are from other logits of the same text.

Array letters: n positions, V vocabulary. Everything is computed in float64 and in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from compute_plane.executor.interface import Float32Array, Int32Array

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The distributions others are held against: ln p [n, V], the loss [n], the likeliest [n]."""

    log_p: Float64Array
    nll: Float64Array
    top: npt.NDArray[np.int64]

    @classmethod
    def of(cls, logits: Float32Array, targets: Int32Array) -> Reference:
        """Take logits [n, V] and the tokens [n] that do follow."""
        log_p = log_softmax(logits)
        return cls(log_p, losses(log_p, targets), log_p.argmax(axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A format at n positions.

    `nll`: -ln q(the token that follows); `reference_nll`: the same of the reference. `kl`: Kullback
    and Leibler's divergence of the format from the reference, Σ p ln(p / q). `top_differs`: whether
    the most likely token is another.
    """

    nll: Float64Array
    reference_nll: Float64Array
    kl: Float64Array
    top_differs: BoolArray

    @classmethod
    def against(cls, reference: Reference, logits: Float32Array, targets: Int32Array) -> Scores:
        """Hold logits [n, V] against the reference of the same positions."""
        log_q = log_softmax(logits)
        difference = reference.log_p - log_q
        kl = np.einsum("nv,nv->n", np.exp(reference.log_p), difference)
        return cls(
            nll=losses(log_q, targets),
            reference_nll=reference.nll,
            # Of equal distributions it is 0, and what rounding leaves of that may be below.
            kl=np.maximum(kl, 0.0),
            top_differs=log_q.argmax(axis=1) != reference.top,
        )

    @classmethod
    def joined(cls, parts: list[Scores]) -> Scores:
        """Return the scores of all positions of several parts."""
        return cls(
            nll=np.concatenate([part.nll for part in parts]),
            reference_nll=np.concatenate([part.reference_nll for part in parts]),
            kl=np.concatenate([part.kl for part in parts]),
            top_differs=np.concatenate([part.top_differs for part in parts]),
        )

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss."""
        return float(np.exp(self.nll.mean()))

    @property
    def ratio(self) -> float:
        """The perplexity divided by the reference's."""
        return float(np.exp((self.nll - self.reference_nll).mean()))

    @property
    def ratio_error(self) -> float:
        """The standard error of the ratio, positions taken as independent; NaN of one position.

        Losses are compared position by position, so that what makes the text hard or easy, which
        varies far more than what a format does to it, drops out.
        """
        difference = self.nll - self.reference_nll
        if len(difference) < 2:
            return float("nan")
        return self.ratio * float(difference.std(ddof=1)) / float(np.sqrt(len(difference)))


def log_softmax(logits: Float32Array) -> Float64Array:
    """Return the logarithms of the probabilities, [n, V]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def losses(log_p: Float64Array, targets: Int32Array) -> Float64Array:
    """Return -ln p of one token of each row, [n]."""
    return np.asarray(-log_p[np.arange(len(targets)), targets])
