"""The source's cache, read once and checked: pre-RoPE keys and values of its layers, let go when no longer needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import Cache

from .errors import GeometryError, HandOffError
from .geometry import CacheGeometry
from .rope import Rotations, strip_rope


class SourceStates:
    """The layers of a source cache for one hand-off.

    Keys are stripped of RoPE when a layer is first read, and kept in float32 until the last target layer that reads it is done; then
    keys and values are let go. The source cache itself is never written to. Layers of a model that is spread over several devices are
    brought to that of the first one.

    Args:
        cache: a transformers `Cache` that holds every position from 0, or an iterable of (keys, values) pairs.
        geometry: of the source model.
        readers: source layer -> target layers that read it.
    """

    def __init__(
        self,
        cache: Cache | Iterable[Any],
        geometry: CacheGeometry,
        readers: dict[int, set[int]],
    ) -> None:
        layers = _layers_of(cache)
        if len(layers) != len(geometry):
            raise GeometryError(f"The source cache has {len(layers)} layers; the translator's source has {len(geometry)}.")
        self.batch_size, self.length = layers[0][0].shape[0], layers[0][0].shape[2]
        for layer_idx, (pair, layer) in enumerate(zip(layers, geometry.layers, strict=True)):
            shape = (self.batch_size, layer.num_key_value_heads, self.length, layer.head_dim)
            for role, states in zip(("keys", "values"), pair, strict=True):
                if tuple(states.shape) != shape:
                    raise GeometryError(
                        f"Source cache, layer {layer_idx}: {role} of shape {shape} expected, {tuple(states.shape)} found. "
                        "Pass the cache that the translator's source model made."
                    )
        self.device, self.dtype = layers[0][0].device, layers[0][0].dtype
        self._geometry = geometry
        self._readers = {layer: set(targets) for layer, targets in readers.items()}
        self._states = {layer: layers[layer] for layer in readers}
        self._stripped: dict[int, torch.Tensor] = {}
        self._rotations = Rotations(torch.arange(self.length)[None])

    def __deepcopy__(self, memo: dict[int, Any]) -> SourceStates:
        """Share the tensors, which are never written to; count the readers anew."""
        twin = object.__new__(SourceStates)
        twin.__dict__ = {**self.__dict__}
        twin._readers = {layer: set(targets) for layer, targets in self._readers.items()}
        twin._states, twin._stripped = dict(self._states), dict(self._stripped)
        memo[id(self)] = twin
        return twin

    @property
    def held_layers(self) -> tuple[int, ...]:
        """The source layers whose tensors are still held."""
        return tuple(sorted(self._states))

    def keys(self, layer_idx: int) -> torch.Tensor:
        """Pre-RoPE keys of a source layer, `[B, H, T, D]` float32."""
        if layer_idx not in self._stripped:
            key_states = self._states[layer_idx][0].to(self.device)
            cos, sin = self._rotations(self._geometry.rotary[layer_idx], key_states.dtype, key_states.device)
            self._stripped[layer_idx] = strip_rope(key_states, cos, sin)
        return self._stripped[layer_idx]

    def values(self, layer_idx: int) -> torch.Tensor:
        """Values of a source layer, `[B, H, T, D]` as cached."""
        return self._states[layer_idx][1].to(self.device)

    def done(self, target_layer: int) -> None:
        """Note that a target layer is translated; let go of the source layers that no other one reads."""
        for layer_idx, targets in list(self._readers.items()):
            targets.discard(target_layer)
            if not targets:
                del self._readers[layer_idx]
                self._states.pop(layer_idx, None)
                self._stripped.pop(layer_idx, None)


def _layers_of(cache: Cache | Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if not isinstance(cache, Cache):
        pairs = [(pair[0], pair[1]) for pair in cache]
        if not pairs:
            raise HandOffError("The source cache is empty: run the source model over the context first.")
        return pairs
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer_idx, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        length = int(cache.get_seq_length(layer_idx))
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or length == 0:
            raise HandOffError(
                f"Source cache, layer {layer_idx}: no keys and values. Run the source model over the context with this cache first."
            )
        if keys.shape[-2] < length:
            raise HandOffError(
                f"Source cache, layer {layer_idx}: a sliding window has kept the last {keys.shape[-2]} of {length} positions. "
                "Prefill the source with a plain DynamicCache(), which keeps them all."
            )
        layers.append((keys[:, :, :length], values[:, :, :length]))
    if not layers:
        raise HandOffError("The source cache is empty: run the source model over the context first.")
    return layers
