"""Panels: what maps read beside a source's layers, laid out as further layers behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .errors import CalibrationError
from .features import NativeFeatures, as_layers, heads_of, layers_of, rotary_of
from .geometry import CacheGeometry
from .maps import SourceHead
from .nonlinear_features import NonlinearFeatures
from .rope import RotaryTable
from .source_features import SourceFeatures
from .states import LayerStates


@dataclass(frozen=True, eq=False)
class Panels:
    """The layers behind those of a source, in their order.

        source layers | native, source and nonlinear features side by side | the other role of each source layer

    Features are the same for keys and values, and every map reads them. The other role of a layer is its values where keys are mapped,
    and its stripped keys where values are: panels that maps may select. RoPE turns none of them.

    geometry: of the source.
    """

    geometry: CacheGeometry
    native: NativeFeatures | None = None
    source: SourceFeatures | None = None
    nonlinear: NonlinearFeatures | None = None
    other_role: bool = False

    @cached_property
    def width(self) -> int:
        """How many features there are."""
        return sum(kind.width for kind in (self.native, self.source, self.nonlinear) if kind is not None)

    @cached_property
    def feature_layers(self) -> range:
        """The layers that hold features."""
        own = len(self.geometry)
        return range(own, own + layers_of(self.width, self.geometry.layers[0]))

    @cached_property
    def other_layers(self) -> range:
        """The layers that hold the other role of each of the source's layers."""
        first = self.feature_layers.stop
        return range(first, first + len(self.geometry) * self.other_role)

    @cached_property
    def rotary(self) -> tuple[RotaryTable, ...]:
        """The tables of the source's layers and of those behind them."""
        behind = self.other_layers.stop - len(self.geometry)
        return (*self.geometry.rotary, *[rotary_of(self.geometry)] * behind) if behind else self.geometry.rotary

    def read_through(self, layer: int) -> int | None:
        """The source layer that holds a layer, or whose other role it is; None for a layer of features."""
        if layer < len(self.geometry):
            return layer
        return layer - self.other_layers.start if layer in self.other_layers else None

    @property
    def products(self) -> int:
        """Multiplications that the features of one position take."""
        projections = [kind.projection.numel() for kind in (self.native, self.source) if kind is not None]
        return sum(projections) + (0 if self.nonlinear is None else self.nonlinear.weight.numel())

    def features(self, states: LayerStates, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return all features `[B, T, width]` of a source's states `[B, H, T, D]` and the target's hidden ones `[B, T, F]`, in float32.

        Raises:
            CalibrationError: there are native features, but no hidden states.
        """
        kinds = []
        if self.native is not None:
            if hidden is None:
                raise CalibrationError("Native features need the target's hidden states: give Calibration native_layers=.")
            kinds.append(self.native.of(hidden))
        if self.source is not None:
            kinds.append(self.source.of(states))
        if self.nonlinear is not None:
            kinds.append(self.nonlinear.of(torch.cat(kinds, dim=-1)))
        return torch.cat(kinds, dim=-1)

    def behind(self, source: LayerStates, hidden: torch.Tensor | None) -> LayerStates:
        """Return source states `[B, H, T, D]` with the panels behind them; itself where there are none."""
        keys, values = [*source.keys], [*source.values]
        if self.width:
            like, shape = source.values[0], self.geometry.layers[0]
            layers = as_layers(self.features(source, hidden), shape, like.new_empty((len(self.feature_layers), *like.shape)))
            keys, values = [*keys, *layers], [*values, *layers]
        if self.other_role:
            turned = source.of_role("keys")
            stripped = [turned.stripped(i).to(states.dtype) for i, states in enumerate(source.values)]
            keys, values = [*keys, *source.values], [*values, *stripped]
        return replace(source, keys=keys, values=values, rotary=None if source.rotary is None else self.rotary)

    def to(self, device: torch.device | str) -> Panels:
        """Move the features to a device."""
        moved = {name: kind and kind.to(device) for name, kind in vars(self).items() if name in ("native", "source", "nonlinear")}
        return replace(self, **moved)


def blocks_of(
    source: CacheGeometry, support: str, features: int = 0, other_role: bool = False
) -> tuple[list[tuple[SourceHead, ...]], list[tuple[SourceHead, ...]]]:
    """List what a map may read: heads one by one with support "head", all heads of a layer together with "full".

    Args:
        features: how many there are.
        other_role: whether the other role of each layer may be read.

    Returns:
        the blocks to select from, and those of features, which are always read.
    """
    shape, own = source.layers[0], len(source)
    first = own + layers_of(features, shape)
    layers = [*range(own), *range(first, first + own * other_role)]
    heads = range(shape.num_key_value_heads)
    if support == "full":
        selectable, given = ([tuple(SourceHead(i, head) for head in heads) for i in some] for some in (layers, range(own, first)))
        return selectable, given
    given = [divmod(i, len(heads)) for i in range(heads_of(features, shape))]
    return [(SourceHead(i, head),) for i in layers for head in heads], [(SourceHead(own + i, head),) for i, head in given]
