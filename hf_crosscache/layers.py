"""The layers of a `TranslatedCache`: pending until first used, layers as transformers knows them from then on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .errors import HandOffError
from .translation import PendingTranslation

if TYPE_CHECKING:
    from typing_extensions import Self


class _PendingStates:
    """What both kinds of layers share: keys and values that may still wait, in whole or behind a base that the layer has already."""

    is_initialized = False
    device: torch.device
    _pending: PendingTranslation | None = None
    _keys: torch.Tensor | None = None  # while pending: what the layer had before, if anything
    _values: torch.Tensor | None = None
    _layer_idx: int

    @property
    def is_pending(self) -> bool:
        """True until the layer is translated."""
        return self._pending is not None

    @property
    def keys(self) -> torch.Tensor | None:
        """`[B, H, T, D]` rotated keys; reading them translates a pending layer."""
        self._translate()
        return self._keys

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._keys = states

    @property
    def values(self) -> torch.Tensor | None:
        """`[B, H, T, D]` values; reading them translates a pending layer."""
        self._translate()
        return self._values

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._values = states

    def wait_for(self, hand_off: PendingTranslation) -> None:
        """Make the layer wait for a hand-off, whose slots follow those that the layer has."""
        self._translate()
        self._pending, self.is_initialized = hand_off, False
        self.follow(hand_off)

    def follow(self, hand_off: PendingTranslation) -> None:
        """Note how long a hand-off is that the layer waits for."""

    def lazy_initialization(self, key_states: torch.Tensor, *args: Any) -> None:
        """Translate on the first update, to the device, dtype and batch that the layer of the model works in."""
        if self._pending is None:
            super().lazy_initialization(key_states, *args)  # type: ignore[misc]
        else:
            self._translate(key_states)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        """Append new states. The first ones are written behind the translated context, which was built with room for them."""
        if self._pending is None:
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        start, new = self._pending.kept(self._layer_idx), key_states.shape[2]
        if self._keys is not None or torch.is_grad_enabled():
            self._translate(key_states)
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        keys, values = self._pending.take(self._layer_idx, key_states)
        if keys.shape[2] != start + new:
            self._settle(keys[:, :, :start], values[:, :, :start])
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        try:
            keys.narrow(2, start, new).copy_(key_states)
            values.narrow(2, start, new).copy_(value_states)
        except RuntimeError:
            self._settle(keys[:, :, :start], values[:, :, :start])
            raise
        self._settle(keys, values)
        return self._appended(new)

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self._pending is None else self._pending.length  # type: ignore[misc]

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self._translate()
        super().crop(*args, **kwargs)  # type: ignore[misc]

    def reset(self) -> None:
        """Empty the layer; a pending translation is dropped."""
        self.abandon()
        self._keys = self._values = None
        self.is_initialized = False

    def abandon(self) -> None:
        """Give a pending translation up: the layer is left with what it had before."""
        if self._pending is not None:
            self._pending.drop(self._layer_idx)
            self._pending, self.is_initialized = None, self._keys is not None

    def fork(self, hand_off: PendingTranslation | None) -> Self:
        """Return a layer of its own that shares the tensors, which no layer writes to; a pending one waits for `hand_off` instead."""
        twin = copy.copy(self)
        if twin._pending is not None:
            twin._pending = hand_off
        return twin

    def plain(self) -> DynamicLayer:
        """Return the layer that transformers would have here, with the same tensors."""
        raise NotImplementedError

    def _translate(self, like: torch.Tensor | None = None) -> None:
        if self._pending is not None:
            kept = self._pending.kept(self._layer_idx)
            keys, values = self._pending.take(self._layer_idx, like)
            self._settle(*self._behind(keys[:, :, :kept], values[:, :, :kept]))

    def _behind(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put what the layer had before in front of new states."""
        joined = []
        for base, states in ((self._keys, keys), (self._values, values)):
            if base is not None and base.numel():
                base = base.to(states)
                if base.shape[0] != states.shape[0]:
                    base = base.repeat_interleave(states.shape[0] // base.shape[0], dim=0)
                states = torch.cat((base, states), dim=2)
            joined.append(states)
        return joined[0], joined[1]

    def _settle(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys, self._values, self._pending = keys, values, None
        self.device, self.is_initialized = keys.device, True

    def _appended(self, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, once `new` positions were written behind the context."""
        raise NotImplementedError


class TranslatedLayer(_PendingStates, DynamicLayer):
    """A layer of full attention, or one that keeps all positions all the same."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self._layer_idx = layer_idx

    def plain(self) -> DynamicLayer:
        layer = DynamicLayer()
        _fill(layer, self)
        return layer

    def _appended(self, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys, self._values  # type: ignore[return-value]


class TranslatedSlidingLayer(_PendingStates, DynamicSlidingWindowLayer):
    """A layer of sliding-window attention: of a context, the window alone is translated."""

    def __init__(self, layer_idx: int, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self._layer_idx = layer_idx

    def follow(self, hand_off: PendingTranslation) -> None:
        self.cumulative_length = hand_off.length

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0

    def abandon(self) -> None:
        if self._pending is not None:
            self.cumulative_length = self._pending.start
        super().abandon()

    def plain(self) -> DynamicLayer:
        layer = DynamicSlidingWindowLayer(sliding_window=self.sliding_window)
        _fill(layer, self)
        layer.cumulative_length, layer.record_past = self.cumulative_length, self.record_past
        return layer

    def _behind(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = self.sliding_window - 1
        if keys.shape[2] >= wanted:
            return keys, values
        keys, values = super()._behind(keys, values)
        return keys[:, :, -wanted:], values[:, :, -wanted:]

    def _settle(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super()._settle(keys, values)
        self._sliding_window_tensor = self._sliding_window_tensor.to(keys.device)

    def _appended(self, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._keys, self._values
        self.cumulative_length += new
        if not self.record_past and keys is not None and values is not None:
            self._keys, self._values = (states[:, :, -self.sliding_window + 1 :] for states in (keys, values))
        return keys, values  # type: ignore[return-value]


def check_even(layers: Sequence[Any]) -> None:
    """Refuse layers that hold different numbers of positions: what was done to them has ended in their midst.

    Raises:
        HandOffError: it names the first layer that differs.
    """
    lengths = [layer.get_seq_length() for layer in layers]
    if lengths.count(lengths[0]) != len(lengths):
        layer_idx = next(i for i, length in enumerate(lengths) if length != lengths[0])
        waiting = layers[layer_idx]._pending
        if waiting is not None and waiting.failure is not None:
            raise waiting.failure
        raise HandOffError(
            f"Target layer {layer_idx} holds {lengths[layer_idx]} positions, layer 0 holds {lengths[0]}: a forward pass, or a crop, ended "
            "in an error before it came to all layers. Make the translated cache again; a fork() of it made before is as it was."
        )


def _fill(layer: Any, translated: Any) -> None:
    keys, values = translated.keys, translated.values
    if keys is not None:
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
