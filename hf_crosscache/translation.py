"""One hand-off: the source states, the translator and the target's own first positions that a cache's pending layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from . import ops
from .errors import GeometryError, HandOffError
from .source import SourceStates
from .translator import CacheTranslator, NativeStates

_Function = TypeVar("_Function", bound=Callable[..., Any])
_GROUP_BYTES = 1 << 30  # of states that one launch builds ahead of their use, where launches are what a layer costs


def _uncompiled(function: _Function) -> _Function:
    """What a compiled model calls as it is: a hand-off happens once, and what it holds changes as it goes."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


class PendingTranslation:
    """Translates the layers of one context, in groups, and keeps each until its layer takes it.

    Args:
        source: the source's states of the context.
        translator: fitted for the two models.
        sinks: the target's own states of the first positions, None where there are none.
        length: positions to hand over.
        dtype: of the states to build, where a layer does not say.
    """

    def __init__(
        self, source: SourceStates, translator: CacheTranslator, sinks: NativeStates | None, length: int, dtype: torch.dtype
    ) -> None:
        self.source, self.translator, self.sinks, self.length, self.dtype = source, translator, sinks, length, dtype
        self.first = 0 if sinks is None else sinks.length
        self._pending = set(range(len(translator.target.geometry)))
        self._ready: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keys and values `[B, H, length or more, D]`
        self._unchecked: list[tuple[range, torch.Tensor]] = []  # groups whose flags the device may not have written yet
        self._failure: HandOffError | None = None  # once found, said of every layer that is still to be taken

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingTranslation:
        """Share what is only read; translated layers that wait for their taker are copied, since a taker may write behind them."""
        twin = object.__new__(PendingTranslation)
        twin.__dict__ = {**self.__dict__, "_pending": set(self._pending)}
        twin._unchecked = list(self._unchecked)
        twin._ready = {layer: (keys.clone(), values.clone()) for layer, (keys, values) in self._ready.items()}
        memo[id(self)] = twin
        return twin

    def drop(self, layer_idx: int) -> None:
        """Forget a layer that is not wanted any more."""
        self._ready.pop(layer_idx, None)
        if layer_idx in self._pending:
            self._pending.discard(layer_idx)
            self.source = self.source.without((layer_idx,))

    @_uncompiled
    def translate_all(self) -> None:
        """Translate every pending layer, in as few launches as there are shapes of layers."""
        for run in self.translator.runs:
            while left := self._pending.intersection(run):
                self._translate(self._group(min(left), len(run)), self.dtype, 0)
        self.check_finite()

    @_uncompiled
    def take(self, layer_idx: int, like: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand out keys and values `[B, H, length or more, D]` of a target layer, translating it, and its neighbours, if need be.

        Args:
            like: `[B', H, q, D]` states that the layer is about to append: says the device, dtype and batch to build for, B' a
                multiple of B, and leaves room for q positions.
        """
        if self._failure is not None:
            raise self._failure
        if like is not None:
            self._check(layer_idx, like)
        if layer_idx not in self._ready:
            dtype, room = (self.dtype, 0) if like is None else (like.dtype, like.shape[2])
            self._translate(self._group(layer_idx, self._at_once(layer_idx, dtype)), dtype, room)
        if self._unchecked and (like is None or layer_idx == self._unchecked[-1][0][-1]):
            self.check_finite()
        keys, values = self._ready.pop(layer_idx)
        if like is not None and (keys.dtype != like.dtype or keys.device != like.device):
            keys, values = keys.to(like), values.to(like)
            for role, states in enumerate((keys, values)):
                if not states[:, :, : self.length].isfinite().all():
                    raise self._not_finite(layer_idx, role)
        if like is not None and like.shape[0] != self.source.batch_size:
            repeats = like.shape[0] // self.source.batch_size
            keys, values = keys.repeat_interleave(repeats, dim=0), values.repeat_interleave(repeats, dim=0)
        return keys, values

    def _at_once(self, layer_idx: int, dtype: torch.dtype) -> int:
        if ops.backend_for(self.source.device) != "triton":
            return 1
        shape = self.translator.target.geometry.layers[layer_idx]
        layer_bytes = 2 * self.source.batch_size * shape.num_key_value_heads * self.length * shape.head_dim * dtype.itemsize
        return max(1, _GROUP_BYTES // layer_bytes)

    def _group(self, first: int, at_once: int) -> range:
        """The pending layers of one shape from `first` on, at most so many."""
        run = next(run for run in self.translator.runs if first in run)
        last = min(run.stop, first + at_once)
        taken = set(range(first + 1, last)).difference(self._pending)
        return range(first, min(taken, default=last))

    @torch.no_grad()
    def _translate(self, layers: range, dtype: torch.dtype, room: int) -> None:
        self.check_finite()
        shape = self.translator.target.geometry.layers[layers.start]
        batch, device = self.source.batch_size, self.source.device
        size = (2, len(layers), batch, shape.num_key_value_heads, self.length + room, shape.head_dim)
        states, flags = torch.empty(size, dtype=dtype, device=device), None
        if self.sinks is not None:
            states[:, :, :, :, : self.first] = self.sinks.stacked(layers, dtype, device)
        if self.first < self.length:
            position_ids = self.translator.position_ids(self.length, device)[:, self.first :]
            keys, values = states[:, :, :, :, self.first : self.length]
            flags = self.translator.translate(layers, self.source, position_ids, position_ids, self.length, keys, values, self.first)
        rest, built = self.source.without(layers), zip(states[0].unbind(), states[1].unbind(), strict=True)  # while the device works
        if flags is not None:
            self._unchecked.append((layers, flags))
            if _reads_flags_at_once(device):
                self.check_finite()
        self.source = rest
        self._pending.difference_update(layers)
        self._ready.update(zip(layers, built, strict=True))

    def _check(self, layer_idx: int, like: torch.Tensor) -> None:
        shape = self.translator.target.geometry.layers[layer_idx]
        if like.shape[1] != shape.num_key_value_heads or like.shape[3] != shape.head_dim:
            raise GeometryError(
                f"Target layer {layer_idx}: {shape.num_key_value_heads} heads of {shape.head_dim} expected, the model has "
                f"{like.shape[1]} of {like.shape[3]}. Pass the target model that the translator was fitted on."
            )
        if like.shape[0] % self.source.batch_size:
            raise HandOffError(
                f"The source cache holds {self.source.batch_size} sequences, the target reads {like.shape[0]}: "
                "the same number, or a multiple of it, expected."
            )

    def check_finite(self) -> None:
        """Look at the flags of the groups translated so far, which waits for the device.

        Called at the latest when a group's last layer is taken, or when the first layer is asked to go on.
        """
        groups, self._unchecked = self._unchecked, []
        for layers, flags in groups:
            found = flags.cpu()
            if found.any():
                layer_idx, role = found.nonzero()[0].tolist()
                raise self._not_finite(layers[layer_idx], role)

    def _not_finite(self, layer_idx: int, role: int) -> HandOffError:
        self._failure = HandOffError(
            f"Target layer {layer_idx}: translated {('keys', 'values')[role]} are not finite. The source cache holds NaN or infinite "
            "states, or a model overflows in its dtype; prefill the target natively."
        )
        return self._failure


def _reads_flags_at_once(device: torch.device) -> bool:
    """Where nothing has to be waited for."""
    return device.type == "cpu"
