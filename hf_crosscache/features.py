"""Native features: what the maps of a target's later layers read of its first ones, laid out as further layers of the source."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from . import ridge
from .errors import CalibrationError
from .geometry import CacheGeometry, LayerGeometry
from .moments import WeightedMoments
from .rope import RotaryTable


@dataclass(frozen=True, eq=False)
class NativeFeatures:
    """A projection of the hidden state that enters the attention of the last native layer, `(hidden - mean) projection`.

    With one native layer that is a function of the token alone: lexical features.

    native_layers: how many first layers the target runs itself.
    mean: `[F]`, projection: `[F, r]`; float32.
    """

    native_layers: int
    mean: torch.Tensor
    projection: torch.Tensor

    @property
    def width(self) -> int:
        """r, the number of features."""
        return self.projection.shape[1]

    def of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features `[B, T, r]` of hidden states `[B, T, F]`, in float32."""
        centred = hidden.float() - self.mean.to(hidden.device)
        return centred @ self.projection.to(hidden.device)

    def to(self, device: torch.device | str) -> NativeFeatures:
        return replace(self, mean=self.mean.to(device), projection=self.projection.to(device))


def layers_of(width: int, source: LayerGeometry) -> int:
    """How many layers of the source's shape hold some features."""
    return -(-width // (source.num_key_value_heads * source.head_dim))


def heads_of(width: int, source: LayerGeometry) -> int:
    """How many heads of the source's size hold some features."""
    return -(-width // source.head_dim)


def as_layers(features: torch.Tensor, source: LayerGeometry, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Lay features out as layers of a source, head after head; the last is filled up with zeros.

    Args:
        features: `[B, T, r]`.
        out: `[layers_of(r), B, H, T, D]` of the source's shape, written in full.

    Returns:
        The layers of `out`.
    """
    batch, tokens, width = features.shape
    heads, dim = source.num_key_value_heads, source.head_dim
    padded = torch.nn.functional.pad(features, (0, len(out) * heads * dim - width))
    out.copy_(padded.view(batch, tokens, len(out), heads, dim).permute(2, 0, 3, 1, 4))
    return out.unbind()


def rotary_of(source: CacheGeometry) -> RotaryTable:
    """The table of a layer of features, which nothing turns."""
    return RotaryTable(torch.zeros_like(source.rotary[0].inv_freq), 1.0)


def project(
    moments: WeightedMoments, width: int, alpha: float = 1e-5, *, what: str = "native_features", of: str = "the hidden size of the target"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the directions of some inputs that say most of some outputs: reduced-rank regression with outputs of unit variance.

        projection = L^-T U,   L L' = sigma_xx,   U = the leading left singular vectors of L^-1 sigma_xy diag(variance_y)^-1/2

    Features along them are uncorrelated and of unit variance.

    Args:
        moments: of one regression, n inputs and m outputs.
        width: r; at most n.
        alpha: relative ridge, as `ridge.solve` takes it.
        what, of: what the width is of, and the inputs, where it is refused.

    Returns:
        mean `[n]` and projection `[n, r]`, float32.

    Source: reduced-rank regression (Izenman, 1975).
    """
    inputs = moments.sum_x.shape[1]
    if not 1 <= width <= inputs:
        raise CalibrationError(f"{what} = {width}: 1 to {inputs}, {of}, expected.")
    factor = ridge.cholesky(moments, alpha)[0]
    scaled = moments.sigma_xy[0] / moments.variance_y[0].clamp_min(1e-30).sqrt()
    whitened = torch.linalg.solve_triangular(factor, scaled, upper=False)
    vectors = torch.linalg.eigh(whitened @ whitened.T).eigenvectors.flip(1)[:, :width]
    projection = torch.linalg.solve_triangular(factor.T, vectors, upper=True)
    return moments.mean_x[0].float(), projection.float()
