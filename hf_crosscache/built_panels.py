"""The panels of one hand-off: built from its source states when first read, in the slots of the target's cache, and kept."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable

import torch

from .context import Context
from .errors import HandOffError
from .features import as_layers
from .panels import Panels
from .rope import to_half_split
from .source import SourceStates
from .states import LayerStates

Pair = tuple[torch.Tensor, torch.Tensor]


class BuiltPanels:
    """Builds the panels of a hand-off, each once.

    Their rows are those of the source's cache, or the slots of the context where those are others. Of rows before `start` they say
    nothing.

    Args:
        panels: which there are.
        start: slots that the target's layers hold already.
        hidden: `[B, T, F]` the target's hidden states from `start` on, where native features are among them.
    """

    def __init__(self, panels: Panels, start: int, hidden: torch.Tensor | None) -> None:
        self.panels, self.start, self.hidden = panels, start, hidden
        self._features: dict[torch.device, tuple[torch.Tensor, ...]] = {}  # as layers of the source, `[B, H, T, D]`
        self._stripped: dict[tuple[int, torch.device], torch.Tensor] = {}  # keys of a source layer without RoPE, `[B, H, T, D]`

    def fork(self) -> BuiltPanels:
        """Return panels that share what is built."""
        twin = copy.copy(self)
        twin._features, twin._stripped = dict(self._features), dict(self._stripped)
        return twin

    def keep(self, layers: Collection[int]) -> None:
        """Let go of what is built of all source layers but these; features stay."""
        self._stripped = {at: states for at, states in self._stripped.items() if at[0] in layers}

    @property
    def features_built(self) -> bool:
        """True once the features no longer need the source."""
        return bool(self._features)

    def of(
        self,
        read: Iterable[int],
        by_values: Collection[int],
        source: SourceStates,
        context: Context,
        position_ids: torch.Tensor,
        device: torch.device,
        begin: int,
    ) -> dict[int, Pair]:
        """Return those panels, of some layers that are read, that lie behind the source's own: as keys and values `[B, H, rows, D]`.

        Args:
            by_values: the layers that maps of values read.
            position_ids: int32 `[B or 1, T]` of all slots of the context.
            begin: the slot of the first row, where rows are slots; the source's rows come whole.
        """
        features = self.panels.feature_layers
        rows = slice(None) if context.source_rows is None else slice(begin, context.length)
        found: dict[int, Pair] = {}
        for layer in read:
            if layer in features:
                states = self._features_on(source, context, position_ids, device)[layer - features.start][:, :, rows]
                found[layer] = states, states
            elif layer in self.panels.other_layers:
                of = layer - self.panels.other_layers.start
                values = gathered(source.on(of, device)[1], context, rows)
                found[layer] = values, values
                if layer in by_values:
                    found[layer] = values, self._stripped_on(of, source, context, position_ids, device)[:, :, rows]
        return found

    def _features_on(
        self, source: SourceStates, context: Context, position_ids: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        if device in self._features:
            return self._features[device]
        if self._features:
            self._features[device] = tuple(states.to(device) for states in next(iter(self._features.values())))
            return self._features[device]
        panels, hidden, end = self.panels, self.hidden, context.length
        if panels.native is not None and hidden is None:
            raise HandOffError("The translator reads the target's first layers: pass target_model= and input_ids=.")
        layers = range(len(panels.geometry)) if panels.source is not None else ()
        states = self._slots(source, context, layers, position_ids, device, self.start)
        hidden = None if hidden is None else hidden[:, : end - self.start].to(device)
        shape = panels.geometry.layers[0]
        size = (len(panels.feature_layers), source.batch_size, shape.num_key_value_heads, _rows(source, context), shape.head_dim)
        built = torch.empty(size, dtype=source.dtype, device=device)
        as_layers(panels.features(states, hidden), shape, built[:, :, :, self.start : end])
        self._features[device] = built.unbind()
        return self._features[device]

    def _stripped_on(
        self, layer: int, source: SourceStates, context: Context, position_ids: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        if (layer, device) not in self._stripped:
            states = self._slots(source, context, [layer], position_ids, device, self.start)
            like = states.values[0]
            built = like.new_empty((*like.shape[:2], _rows(source, context), like.shape[3]))
            built[:, :, self.start : context.length] = states.of_role("keys").stripped(0)
            self._stripped[layer, device] = built
        return self._stripped[layer, device]

    def _slots(
        self, source: SourceStates, context: Context, layers: Iterable[int], position_ids: torch.Tensor, device: torch.device, start: int
    ) -> LayerStates:
        """The source's states of some layers in the slots from `start` on, keys in half-split order."""
        rows = slice(start, context.length)
        tables = tuple(self.panels.geometry.rotary[layer] for layer in layers)
        pairs = []
        for layer, table in zip(layers, tables, strict=True):
            keys, values = (gathered(states, context, rows) for states in source.on(layer, device))
            pairs.append((to_half_split(keys, table.rotary_dim) if table.interleaved else keys, values))
        return LayerStates([pair[0] for pair in pairs], [pair[1] for pair in pairs], tables, position_ids[:, rows])


def gathered(states: torch.Tensor, context: Context, rows: slice) -> torch.Tensor:
    """What a source's states `[B, H, T, D]` hold of the tokens in some slots of the context."""
    if context.source_rows is None:
        return states[:, :, rows]
    batch, heads, _, head_dim = states.shape
    return states.gather(2, context.source_rows[:, None, rows, None].expand(batch, heads, -1, head_dim))


def _rows(source: SourceStates, context: Context) -> int:
    return source.length if context.source_rows is None else context.length
