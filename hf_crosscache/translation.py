"""One hand-off: the source states, the translator and the target's own first positions that a cache's pending layers share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from . import ops
from .built_panels import BuiltPanels, Pair, gathered
from .compat import uncompiled
from .context import Context
from .errors import GeometryError, HandOffError
from .first_layers import FirstLayers
from .mixture import Mixture
from .native_states import NativeStates
from .routing import Experts, translate_routed
from .source import SourceStates
from .stopwatch import Stopwatch
from .translator import CacheTranslator

_GROUP_BYTES = 1 << 30  # of states that one launch builds ahead of their use, where launches are what a layer costs
_WILD = 100.0  # times the largest root mean square that a dimension of the layer had in the fit
_SAMPLED = 64  # positions at which the size of translated states is looked at


class PendingTranslation:
    """Translates the layers of one context, in groups, and keeps each until its layer takes it.

    Args:
        source: the source's states of the context.
        translator: fitted for the two models.
        context: the slots to fill.
        sinks: the target's own states of each row's first tokens, None where there are none.
        dtype: of the states to build, where a layer does not say.
        start: slots that the target's layers hold already: only those behind are built.
        windows: of each target layer, how many trailing slots it keeps; None for all.
        devices: of each target layer, where it works; None for that of the source, or of the states that the layer is about to append.
        first: the target's own first layers over the slots from `start` on, where the translator leaves any to the target.
        whole: translate all layers before the first is taken, so that none is used where another must not be.
    """

    def __init__(
        self,
        source: SourceStates,
        translator: CacheTranslator,
        context: Context,
        sinks: NativeStates | None,
        dtype: torch.dtype,
        *,
        start: int = 0,
        windows: tuple[int | None, ...] | None = None,
        devices: tuple[torch.device, ...] | None = None,
        first: FirstLayers | None = None,
        whole: bool = False,
    ) -> None:
        self.source, self.translator, self.context, self.sinks, self.dtype = source, translator, context, sinks, dtype
        self.start, self.windows, self.devices, self.first, self.whole = start, windows, devices, first, whole
        also = tuple(zip(windows or (None,) * len(translator.keys), devices or (None,) * len(translator.keys), strict=True))
        self.runs = translator.runs_of(also) if windows or devices else translator.runs
        self.work = Stopwatch()
        self.translated_layers = 0
        self._pending = set(range(len(translator.target.geometry)))
        self._ready: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keys and values `[B, H, kept or more, D]`
        self._panels = BuiltPanels(translator.panels, start, None if first is None else first.hidden)
        self._experts: Experts | None = None  # of a mixture, those of the slots from `start` on
        self._unchecked: list[tuple[range, torch.Tensor]] = []  # groups whose flags the device may not have written yet
        self._failure: HandOffError | None = None  # once found, said of every layer that is still to be taken

    @property
    def length(self) -> int:
        """Slots of the target's cache up to the end of the context."""
        return self.context.length

    @property
    def failure(self) -> HandOffError | None:
        """What is said of states that must not be used, once such were found."""
        return self._failure

    @property
    def complete(self) -> bool:
        """True once no layer is left to translate."""
        return not self._pending

    @property
    def untouched(self) -> bool:
        """True until a layer is translated or dropped."""
        return len(self._pending) == len(self.translator.keys)

    def kept(self, layer_idx: int) -> int:
        """How many trailing slots of the context a layer takes from here."""
        return self.length - self._begin(layer_idx)

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingTranslation:
        """Share what is only read; translated layers that wait for their taker are copied, since a taker may write behind them."""
        twin = self.fork()
        twin._ready = {layer: (keys.clone(), values.clone()) for layer, (keys, values) in twin._ready.items()}
        memo[id(self)] = twin
        return twin

    def fork(self) -> PendingTranslation:
        """Return a hand-off of its own state that shares every tensor; what waits for its taker comes without room behind."""
        twin = object.__new__(PendingTranslation)
        twin.__dict__ = {**self.__dict__, "_pending": set(self._pending), "_unchecked": list(self._unchecked), "work": self.work.fork()}
        twin._ready, twin._panels = {}, self._panels.fork()
        for layer, (keys, values) in self._ready.items():
            kept = self.kept(layer)
            twin._ready[layer] = keys[:, :, :kept], values[:, :, :kept]
        return twin

    def shorten(self, tokens: int) -> None:
        """Hand over so many slots less; only before anything is translated."""
        self.context = self.context.shortened(min(tokens, self.length - self.start))

    def drop(self, layer_idx: int) -> None:
        """Forget a layer that is not wanted any more."""
        self._ready.pop(layer_idx, None)
        if layer_idx in self._pending:
            self._pending.discard(layer_idx)
            self.source = self.source.without((layer_idx,))

    @uncompiled
    def translate_all(self) -> None:
        """Translate every pending layer, in as few launches as there are kinds of layers."""
        for run in self.runs:
            while left := self._pending.intersection(run):
                self._translate(self._group(run, min(left), len(run)), self.dtype, 0, self._device_of(run.start))
        self.check_states()

    @uncompiled
    def take(self, layer_idx: int, like: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand out keys and values `[B, H, kept or more, D]` of a target layer, translating it, and its neighbours, if need be.

        Args:
            like: `[B', H, q, D]` states that the layer is about to append: says the device, dtype and batch to build for, B' a
                multiple of B, and leaves room for q positions.
        """
        if self._failure is not None:
            raise self._failure
        if like is not None:
            self._check(layer_idx, like)
        if self.whole and self._pending:
            self.translate_all()
        if layer_idx not in self._ready:
            dtype, room = (self.dtype, 0) if like is None else (like.dtype, like.shape[2] if self.start == 0 else 0)
            device = self._device_of(layer_idx) if like is None else like.device
            run = self._run_of(layer_idx)
            self._translate(self._group(run, layer_idx, self._at_once(layer_idx, dtype, device)), dtype, room, device)
        if self._unchecked and (like is None or layer_idx == self._unchecked[-1][0][-1]):
            self.check_states()
        keys, values = self._ready.pop(layer_idx)
        if like is not None and (keys.dtype != like.dtype or keys.device != like.device):
            kept = self.kept(layer_idx)
            keys, values = keys.to(like), values.to(like)
            for role, states in enumerate((keys, values)):
                if not states[:, :, :kept].isfinite().all():
                    raise self._wrong(layer_idx, role, 1)
        if like is not None and like.shape[0] != self.source.batch_size:
            repeats = like.shape[0] // self.source.batch_size
            keys, values = keys.repeat_interleave(repeats, dim=0), values.repeat_interleave(repeats, dim=0)
        return keys, values

    def _begin(self, layer_idx: int) -> int:
        """The first slot that a layer takes."""
        window = None if self.windows is None else self.windows[layer_idx]
        return self.start if window is None else max(self.start, self.length - window)

    def _device_of(self, layer_idx: int) -> torch.device:
        return self.source.device if self.devices is None else self.devices[layer_idx]

    def _at_once(self, layer_idx: int, dtype: torch.dtype, device: torch.device) -> int:
        if ops.backend_for(device) != "triton":
            return 1
        shape = self.translator.target.geometry.layers[layer_idx]
        layer_bytes = 2 * self.source.batch_size * shape.num_key_value_heads * self.kept(layer_idx) * shape.head_dim * dtype.itemsize
        return max(1, _GROUP_BYTES // max(layer_bytes, 1))

    def _run_of(self, layer_idx: int) -> range:
        return next(run for run in self.runs if layer_idx in run)

    def _group(self, run: range, first: int, at_once: int) -> range:
        """The pending layers of one run from `first` on, at most so many."""
        last = min(run.stop, first + at_once)
        taken = set(range(first + 1, last)).difference(self._pending)
        return range(first, min(taken, default=last))

    @torch.no_grad()
    def _translate(self, layers: range, dtype: torch.dtype, room: int, device: torch.device) -> None:
        self.check_states()
        with self.work.on(device):
            shape = self.translator.target.geometry.layers[layers.start]
            start, end = self._begin(layers.start), self.length
            size = (2, len(layers), self.source.batch_size, shape.num_key_value_heads, end - start + room, shape.head_dim)
            states, flags = torch.empty(size, dtype=dtype, device=device), None
            context = self.context.on(device)
            native = 0 if self.sinks is None or context.first_slots is not None else min(self.sinks.length, end)
            begin = max(start, native)
            if self.first is not None and layers.start < len(self.first.keys):
                for at, layer_idx in enumerate(layers):
                    for side, own in zip(states, (self.first.keys, self.first.values), strict=True):
                        side[at, :, :, : end - start] = own[layer_idx][:, :, start - self.start : end - self.start]
            elif begin < end:
                flags = self._map(layers, context, begin, states[:, :, :, :, begin - start : end - start], device)
            if self.sinks is not None and layers.start >= self.translator.native_layers:
                _place(self.sinks.stacked(layers, dtype, device), states[:, :, :, :, : end - start], start, context.first_slots)
            rest, built = self.source.without(layers), zip(states[0].unbind(), states[1].unbind(), strict=True)  # while the device works
        if flags is not None:
            self._unchecked.append((layers, flags))
            if _reads_flags_at_once(device):
                self.check_states()
        self.source = rest
        self._panels.keep(rest.held_layers)
        self.translated_layers += 0 if layers.start < self.translator.native_layers else len(layers)
        self._pending.difference_update(layers)
        self._ready.update(zip(layers, built, strict=True))

    def _map(self, layers: range, context: Context, begin: int, out: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Translate the slots from `begin` on into `out` `[2, N, B, H, T, D]`; return the flags of its states, `[N, 2]`."""
        read, by_values = self.translator.read_by(layers)
        mixture = self.translator.mixture
        experts = None if mixture is None else self._routed(mixture)
        source, row = self._read(read, by_values, context, begin, device)
        at, to = (ids[:, begin:] for ids in (self._source_position_ids(context, device), self._position_ids(context, device)))
        positions = self.length if context.source_position_ids is None else max(self.length, self.source.length)
        given = layers, source, at, to, positions, out[0], out[1], row, self._run_of(layers.start)
        if experts is None:
            flags = self.translator.translate(*given)
        else:
            flags = translate_routed(self.translator, experts.tokens(begin, self.length, device), *given)
        return self._flag_wild(layers, out, flags)

    def _read(
        self, layers: Collection[int], by_values: Collection[int], context: Context, begin: int, device: torch.device
    ) -> tuple[dict[int, Pair], int]:
        """Keys and values of some layers of the source and panels, and the row in them of slot `begin`."""
        own = len(self.translator.source.geometry)
        source = {layer: self.source.on(layer, device) for layer in layers if layer < own}
        row = begin
        if context.source_rows is not None:
            slots = slice(begin, self.length)
            source = {i: (gathered(keys, context, slots), gathered(values, context, slots)) for i, (keys, values) in source.items()}
            row = 0
        whole = self._source_position_ids(context, device)
        source |= self._panels.of(layers, by_values, self.source, context, whole, device, begin)
        if self._panels.features_built:
            self.source = self.source.read_by(self.translator.map_readers)
        return source, row

    def _position_ids(self, context: Context, device: torch.device) -> torch.Tensor:
        """Positions of all slots, int32 `[B or 1, length]`."""
        return self.translator.position_ids(self.length, device) if context.position_ids is None else context.position_ids

    def _source_position_ids(self, context: Context, device: torch.device) -> torch.Tensor:
        """Positions that the source has the tokens of all slots at, int32 `[B or 1, length]`."""
        return self._position_ids(context, device) if context.source_position_ids is None else context.source_position_ids

    def _routed(self, mixture: Mixture) -> Experts:
        """Which expert serves each slot from `start` on, found out once."""
        if self._experts is None:
            device = self.source.device
            context = self.context.on(device)
            source, row = self._read(mixture.router.layers, (), context, self.start, device)
            position_ids = self._source_position_ids(context, device)[:, self.start :]
            self._experts = Experts.of(self.translator, mixture, source, position_ids, row, self.start)
        return self._experts

    def _flag_wild(self, layers: range, out: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        """Add 2 to the flags of states that are far beyond what the fit saw of the target's own, at some positions."""
        reach = self.translator.reach
        if len(reach) < 2:
            return flags
        limit = _WILD * torch.stack([reach[role][layers.start : layers.stop] for role in ("keys", "values")])
        sampled = out[:, :, :, :, :: max(1, out.shape[4] // _SAMPLED)]
        beyond = sampled.abs().amax((2, 3, 4, 5)).float() > limit.to(out.device, non_blocking=True)
        return flags + 2 * beyond.T.to(flags.dtype)

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

    def check_states(self) -> None:
        """Look at the flags of the groups translated so far, which waits for the device.

        Called at the latest when a group's last layer is taken, or when the first layer is asked to go on.
        """
        groups, self._unchecked = self._unchecked, []
        for layers, flags in groups:
            found = flags.cpu()
            if found.any():
                layer_idx, role = found.nonzero()[0].tolist()
                raise self._wrong(layers[layer_idx], role, int(found[layer_idx, role]))

    def _wrong(self, layer_idx: int, role: int, flag: int) -> HandOffError:
        which = f"Target layer {layer_idx}: translated {('keys', 'values')[role]} are"
        if flag & 1:
            self._failure = HandOffError(
                f"{which} not finite. The source cache holds NaN or infinite states, or a model overflows in its dtype; prefill the "
                'target natively, as on_error="prefill" does.'
            )
        else:
            self._failure = HandOffError(
                f"{which} more than {_WILD:.0f} times as large as any the translator was fitted to. The source cache is not what its "
                'model makes of a text; prefill the target natively, as on_error="prefill" does.'
            )
        return self._failure


def _place(native: torch.Tensor, states: torch.Tensor, start: int, first_slots: torch.Tensor | None) -> None:
    """Write the target's own states `[2, N, B or 1, H, s, D]` of each row's first tokens over `states`, whose first slot is `start`."""
    end = start + states.shape[4]
    if first_slots is None:
        if start < native.shape[4]:
            last = min(native.shape[4], end)
            states[:, :, :, :, : last - start] = native[:, :, :, :, start:last]
        return
    for token in range(native.shape[4]):
        slots = first_slots + token
        rows = ((slots >= start) & (slots < end)).nonzero()[:, 0]
        own = native.expand(-1, -1, states.shape[2], -1, -1, -1).select(4, token)[:, :, rows]
        states[:, :, rows, :, slots[rows] - start] = own.movedim(2, 0)


def _reads_flags_at_once(device: torch.device) -> bool:
    """Where nothing has to be waited for."""
    return device.type == "cpu"
