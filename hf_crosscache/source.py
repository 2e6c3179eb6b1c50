"""The source's cache, read once and checked: keys and values of its layers, let go when no longer needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from .errors import GeometryError, HandOffError
from .geometry import CacheGeometry


class SourceStates:
    """The layers of a source cache for one hand-off.

    The source cache itself is never written to. A layer is let go when the last target layer that reads it is done. Layers of a model
    that is spread over several devices are brought to that of the first one.

    Args:
        cache: a transformers `Cache` that holds every position from 0, or an iterable of (keys, values) pairs.
        geometry: of the source model.
        readers: source layer -> target layers that read it.
    """

    def __init__(self, cache: Cache | Iterable[Any], geometry: CacheGeometry, readers: Mapping[int, Iterable[int]]) -> None:
        layers = _layers_of(cache)
        if len(layers) != len(geometry):
            raise GeometryError(f"The source cache has {len(layers)} layers; the translator's source has {len(geometry)}.")
        first = layers[0][0]
        self.batch_size, self.length = first.shape[0], first.shape[2]
        for layer_idx, (pair, layer) in enumerate(zip(layers, geometry.layers, strict=True)):
            shape = (self.batch_size, layer.num_key_value_heads, self.length, layer.head_dim)
            if pair[0].shape == shape and pair[1].shape == shape:
                continue
            role, states = ("keys", pair[0]) if pair[0].shape != shape else ("values", pair[1])
            raise GeometryError(
                f"Source cache, layer {layer_idx}: {role} of shape {shape} expected, {tuple(states.shape)} found. "
                "Pass the cache that the translator's source model made."
            )
        self.device, self.dtype = first.device, first.dtype
        self._readers = {layer: set(targets) for layer, targets in readers.items()}
        self._states = {layer: layers[layer] for layer in readers}

    def __deepcopy__(self, memo: dict[int, Any]) -> SourceStates:
        """Share the tensors, which are never written to; count the readers anew."""
        twin = object.__new__(SourceStates)
        twin.__dict__ = {**self.__dict__}
        twin._readers = {layer: set(targets) for layer, targets in self._readers.items()}
        twin._states = dict(self._states)
        memo[id(self)] = twin
        return twin

    @property
    def held_layers(self) -> tuple[int, ...]:
        """The source layers whose tensors are still held."""
        return tuple(sorted(self._states))

    def read_by(self, layers: Iterable[int], rows: slice) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Return what some target layers read: source layer -> keys, and values, `[B, H, rows, D]` as cached, on one device."""
        wanted = set(layers)
        read = [source for source, targets in self._readers.items() if not targets.isdisjoint(wanted)]
        keys, values = ({source: self._states[source][role].to(self.device)[:, :, rows] for source in read} for role in range(2))
        return keys, values

    def done(self, layers: Iterable[int]) -> None:
        """Note that some target layers are translated; let go of the source layers that no other one reads."""
        for source, targets in list(self._readers.items()):
            targets.difference_update(layers)
            if not targets:
                del self._readers[source]
                self._states.pop(source, None)


def _layers_of(cache: Cache | Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(cache, Cache):
        layers = [_states_of_layer(layer, layer_idx) for layer_idx, layer in enumerate(cache.layers)]
    else:
        layers = [(pair[0], pair[1]) for pair in cache]
    if not layers:
        raise HandOffError("The source cache is empty: run the source model over the context first.")
    return layers


def _states_of_layer(layer: Any, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or not keys.numel():
        raise HandOffError(
            f"Source cache, layer {layer_idx}: no keys and values. Run the source model over the context with this cache first."
        )
    if type(layer) is DynamicLayer:
        return keys, values
    length = int(layer.get_seq_length())
    if length == 0:
        raise HandOffError(
            f"Source cache, layer {layer_idx}: no keys and values. Run the source model over the context with this cache first."
        )
    if keys.shape[-2] < length:
        raise HandOffError(
            f"Source cache, layer {layer_idx}: a sliding window has kept the last {keys.shape[-2]} of {length} positions. "
            "Prefill the source with a plain DynamicCache(), which keeps them all."
        )
    return keys[:, :, :length], values[:, :, :length]
