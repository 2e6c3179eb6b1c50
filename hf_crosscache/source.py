"""The source's cache, read once and checked: keys and values of its layers, let go when no longer needed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from .compat import own_layers
from .errors import GeometryError, HandOffError
from .geometry import CacheGeometry

if TYPE_CHECKING:
    from typing_extensions import Self


_PLAIN = "Prefill the source with a plain DynamicCache(), which keeps them all"
_KEEPS_ALL = {"TranslatedSlidingLayer": "Make the TranslatedCache with keep_window=False, so that it can be handed on"}


class SourceStates:
    """The layers of a source cache for one hand-off: never changed, but replaced by what is left of it.

    The source cache itself is never written to. A layer is let go when the last target layer that reads it is done. A layer that lies on
    another device than the target layers that read it is brought there once.

    Args:
        cache: a transformers `Cache` that holds every position from 0 (dynamic, static up to its filled length, quantised, offloaded), an
            output of `generate` or of a model that holds one, or an iterable of (keys, values) pairs.
        geometry: of the source model.
        readers: source layer -> the target layers that read it, as bits: bit i is target layer i.
    """

    def __init__(self, cache: Cache | Iterable[Any], geometry: CacheGeometry, readers: Mapping[int, int]) -> None:
        layers = _layers_of(cache)
        if len(layers) != len(geometry):
            raise GeometryError(f"The source cache has {len(layers)} layers; the translator's source has {len(geometry)}.")
        first = layers[0][0]
        self.batch_size, self.length = first.shape[0], first.shape[2]
        self.device, self.dtype = first.device, first.dtype
        shape, of = None, None
        for layer_idx, ((keys, values), layer) in enumerate(zip(layers, geometry.layers, strict=True)):
            if layer is not of:  # layers of one shape mostly are one object
                shape, of = (self.batch_size, layer.num_key_value_heads, self.length, layer.head_dim), layer
            if keys.shape != shape or values.shape != shape:
                role, states = ("keys", keys) if keys.shape != shape else ("values", values)
                raise GeometryError(
                    f"Source cache, layer {layer_idx}: {role} of shape {shape} expected, {tuple(states.shape)} found. "
                    "Pass the cache that the translator's source model made."
                )
            if keys.dtype != self.dtype or values.dtype != self.dtype:
                self.dtype = torch.promote_types(self.dtype, torch.promote_types(keys.dtype, values.dtype))
        self._readers, self._done = readers, 0
        self._states = {layer: layers[layer] for layer in readers}
        self._moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self._tracked = not first.is_inference()  # torch does not count what is written to inference tensors
        self._versions = {layer: layers[layer][0]._version + layers[layer][1]._version for layer in readers} if self._tracked else {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Share the tensors, which are never written to."""
        return copy.copy(self)

    @property
    def held_layers(self) -> tuple[int, ...]:
        """The source layers whose tensors are still held."""
        return tuple(sorted(self._states))

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a source layer, `[B, H, T, D]` as cached, on the device of the first."""
        return self.on(layer_idx, self.device)

    def on(self, layer_idx: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a source layer, `[B, H, T, D]` as cached, on a device."""
        keys, values = pair = self._states[layer_idx]
        if self._tracked and keys._version + values._version != self._versions[layer_idx]:
            raise HandOffError(
                f"Source cache, layer {layer_idx}: it was written to after the translated cache was made of it. "
                "Translate before the source goes on (`cache.translate()`), or hand over a copy."
            )
        if keys.device == values.device == device and keys.dtype == values.dtype == self.dtype:
            return pair
        if (layer_idx, device) not in self._moved:
            keys, values = (states.to(device, self.dtype, non_blocking=True) for states in pair)
            self._moved[layer_idx, device] = keys, values
        return self._moved[layer_idx, device]

    def read_by(self, readers: Mapping[int, int]) -> Self:
        """Return what is left when fewer target layers read some layers, or none."""
        if readers is self._readers:
            return self
        rest = copy.copy(self)
        rest._readers = readers
        rest._states = {layer: pair for layer, pair in self._states.items() if layer in readers}
        return rest.without(())

    def without(self, layers: Iterable[int]) -> Self:
        """Return what is left when some more target layers are translated: only source layers that another one reads."""
        rest = copy.copy(self)
        for layer_idx in layers:
            rest._done |= 1 << layer_idx
        waiting = ~rest._done
        rest._states = {source: pair for source, pair in self._states.items() if self._readers[source] & waiting}
        if self._moved:
            rest._moved = {key: pair for key, pair in self._moved.items() if key[0] in rest._states}
        return rest


def _layers_of(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    layers: list[Any]
    for name in ("cache", "past_key_values"):  # an output of generate or of a model
        if not isinstance(cache, Cache) and isinstance(getattr(cache, name, None), Cache):
            cache = getattr(cache, name)
    if isinstance(cache, Cache):
        layers = own_layers(cache)
        if all([type(layer) is DynamicLayer and layer.is_initialized for layer in layers]):
            layers = [(layer.keys, layer.values) for layer in layers]
        else:
            layers = [_states_of_layer(layer, layer_idx) for layer_idx, layer in enumerate(layers)]
    else:
        layers = _pairs(cache)
    if not layers or layers[0][0].ndim != 4 or not layers[0][0].shape[2]:
        raise HandOffError("The source cache is empty: run the source model over the context first.")
    return layers


def _pairs(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    given: list[Any] = list(cache) if isinstance(cache, Iterable) and not isinstance(cache, (Mapping, str)) else [None]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for pair in given:
        if not isinstance(pair, Sequence) or len(pair) < 2 or not all(isinstance(states, torch.Tensor) for states in pair[:2]):
            raise HandOffError(
                f"The source cache is a {type(cache).__name__} without keys and values: a Cache, an output of generate or of a model that "
                "holds one (use_cache=True), or (keys, values) of each layer expected."
            )
        pairs.append((pair[0], pair[1]))
    return pairs


def _states_of_layer(layer: Any, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = _dequantized(layer) if hasattr(layer, "_dequantize") else (getattr(layer, "keys", None), getattr(layer, "values", None))
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or not keys.numel():
        kind = "" if isinstance(layer, DynamicLayer) else f" (a {type(layer).__name__})"
        raise HandOffError(
            f"Source cache, layer {layer_idx}{kind}: no keys and values. Run the source model over the context with this cache first."
        )
    length = int(layer.get_seq_length())
    if length == 0:
        raise HandOffError(
            f"Source cache, layer {layer_idx}: no keys and values. Run the source model over the context with this cache first."
        )
    if keys.shape[-2] < length:
        raise HandOffError(
            f"Source cache, layer {layer_idx}: a sliding window has kept the last {keys.shape[-2]} of {length} positions. "
            f"{_KEEPS_ALL.get(type(layer).__name__, _PLAIN)}."
        )
    return keys[:, :, :length], values[:, :, :length]


def _dequantized(layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The quantised part of a layer, and behind it what it still holds in full."""
    whole: list[torch.Tensor] = []
    for role in ("keys", "values"):
        quantized, rest = getattr(layer, f"_quantized_{role}", None), getattr(layer, role, None)
        if quantized is None or rest is None:
            return None, None
        states = layer._dequantize(quantized)
        if getattr(layer, "_pending_beam_idx", None) is not None:
            states = states.index_select(0, layer._pending_beam_idx.to(states.device))
        whole.append(torch.cat([states.to(rest), rest], dim=-2) if rest.numel() else states)
    return whole[0], whole[1]
