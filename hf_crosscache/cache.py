"""The drop-in cache: it knows its length at once and translates a layer when the target's attention first asks for it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from . import first_layers, first_tokens
from .alignment import TokenAlignment
from .compat import states_of
from .context import Context
from .contexts import context_of
from .errors import HandOffError
from .export import dynamic_cache, static_cache
from .fallback import read_instead
from .first_layers import FirstLayers
from .geometry import CacheGeometry
from .guard import guard
from .hand_off_report import HandOffReport
from .identity import ModelIdentity
from .layers import TranslatedLayer, TranslatedSlidingLayer, check_even
from .native_states import NativeStates
from .placement import device_of, layer_devices
from .prompt import Prompt
from .source import SourceStates
from .translation import PendingTranslation
from .translator import CacheTranslator

if TYPE_CHECKING:
    from typing_extensions import Self

OnError = Literal["raise", "prefill"]


class TranslatedCache(Cache):
    """A target model's cache of a context that only the source model has read.

    Use it wherever transformers takes a cache:
        source(**context, past_key_values=source_cache)
        cache = TranslatedCache(source_cache, translator, target_model=target, input_ids=prompt.input_ids)
        target.generate(**prompt, past_key_values=cache)        # `cache=cache` from transformers 5.24 on

    The first `sink_tokens` tokens of each row are the target's own, from a prefill of those few (exact, since attention is causal); the
    last `recompute_last` positions are left out, so that the target reads those tokens itself. What lies between is translated on first
    use, layer by layer, or on CUDA some layers at a time; `translate()` does all at once. Layers of sliding-window attention get the
    window alone. After that the cache behaves as a `DynamicCache` that holds the same tensors; before it, every operation gives what it
    would give then. The target model is guarded from then on (`hf_crosscache.guard`).

    Args:
        source_cache: the source model's cache of the context: a `Cache` that has kept every position, a `generate` output that holds one,
            or (keys, values) pairs.
        translator: fitted for this pair of models, on any device: its maps are packed once for each device that they work on.
        target_model: computes the first positions. Without it they come from the opening that the translator carries, where the
            context begins with it.
        input_ids: `[B, >= T]` token ids of the whole prompt, or of the context at least.
        attention_mask: `[B, L]` of that prompt, as `generate` is given it; needed for padded batches alone, which are padded on the left.
        source_attention_mask: `[B, T]` as the source read the context, where its padding is not that of the prompt (on the right, say).
        alignment: of the prompt's tokens with the source's, where the two models have different tokenizers (`Retokenizer`).
        sink_tokens: leading tokens of each row that are the target's own; None for the translator's.
        recompute_last: trailing context positions that are left to the target. At least 1 where the prompt ends with the context,
            since `generate` needs a token to read.
        on_error: "raise" where translated states are not finite or wildly large, or "prefill": the target then reads the context itself,
            with a warning that names the layer. That needs target_model and input_ids, and looks at all layers before the first is used.
        min_context_recovered: warn where the translator is known to keep less than this share of a context.
        keep_window: False keeps all positions of sliding layers, so that the cache can itself be handed on.

    Raises:
        GeometryError: the source cache or the target model is not the translator's.
        IdentityError: the target model has other weights.
        HandOffError: positions are missing, or the first tokens cannot be had; it says how to mend that.
    """

    def __init__(
        self,
        source_cache: Cache | Iterable[Any],
        translator: CacheTranslator,
        *,
        target_model: PreTrainedModel | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        source_attention_mask: torch.Tensor | None = None,
        alignment: TokenAlignment | None = None,
        sink_tokens: int | None = None,
        recompute_last: int = 1,
        on_error: OnError = "raise",
        min_context_recovered: float = 0.5,
        keep_window: bool = True,
    ) -> None:
        if target_model is not None:
            translator.check(target_model=target_model)
        if on_error not in ("raise", "prefill"):
            raise HandOffError(f'on_error="{on_error}": "raise" or "prefill" expected.')
        if on_error == "prefill" and (target_model is None or input_ids is None):
            raise HandOffError('on_error="prefill" needs target_model= and input_ids=, so that the target can read the context itself.')
        translator.warn_if_below(min_context_recovered)
        source = SourceStates(source_cache, translator.source.geometry, translator.readers)
        context = context_of(translator, source, recompute_last, attention_mask, source_attention_mask, alignment, sink_tokens)
        self._prompt = Prompt.of(input_ids, attention_mask, source, context, target_model)
        self._target_model, self._on_error, self._hand_off = target_model, on_error, None
        self._report = HandOffReport(left_to_target=(alignment or source).length - context.length)
        with self._report.native_work.on(source.device if target_model is None else device_of(target_model)):
            sinks = first_tokens.of(translator, target_model, self._prompt, sink_tokens, context)
            first = first_layers.of(translator, target_model, self._prompt, context)
        self._dtype = source.dtype if target_model is None else target_model.dtype
        self._fill(translator.target.geometry, target_model, keep_window)
        self._report.native_tokens = 0 if sinks is None else sinks.length
        self._wait_for(source, translator, context, sinks, first)

    def _fill(self, geometry: CacheGeometry, target_model: PreTrainedModel | None, keep_window: bool) -> None:
        """Make the layers, empty."""
        windows = tuple(layer.sliding_window if keep_window else None for layer in geometry.layers)
        layers: list[Any] = []
        for layer_idx, window in enumerate(windows):
            layers.append(TranslatedLayer(layer_idx) if window is None else TranslatedSlidingLayer(layer_idx, window))
        super().__init__(layers=layers)
        self._windows = None if all(window is None for window in windows) else windows
        self._devices = None if target_model is None else layer_devices(target_model, len(layers))
        if target_model is not None:
            guard(target_model)

    def _wait_for(
        self,
        source: SourceStates,
        translator: CacheTranslator,
        context: Context,
        sinks: NativeStates | None = None,
        first: FirstLayers | None = None,
        start: int = 0,
    ) -> None:
        """Let all layers wait for a hand-off of the slots from `start` on."""
        kept = None if self._windows is None else tuple(None if window is None else window - 1 for window in self._windows)
        placed = {"windows": kept, "devices": self._devices, "first": first, "whole": self._on_error == "prefill"}
        self._hand_off = PendingTranslation(source, translator, context, sinks, self._dtype, start=start, **placed)
        self._report.native_layers = translator.native_layers
        self._report.follow(self._hand_off)
        for layer in self._translated:
            layer.wait_for(self._hand_off)

    @classmethod
    def empty(cls, target_model: PreTrainedModel, *, on_error: OnError = "raise", keep_window: bool = True) -> Self:
        """Return a cache of a target that holds nothing yet: the target fills it as it reads, and `extend` hands over to it."""
        cache = object.__new__(cls)
        cache._prompt, cache._report = Prompt(), HandOffReport()
        cache._target_model, cache._on_error, cache._hand_off = target_model, on_error, None
        cache._dtype = target_model.dtype
        cache._fill(ModelIdentity.from_model(target_model).geometry, target_model, keep_window)
        return cache

    @property
    def is_initialized(self) -> bool:
        """True from the start, although the layers are translated later; False once reset."""
        return all(layer.is_initialized or layer.is_pending for layer in self._translated)

    @property
    def is_pending(self) -> bool:
        """True until every layer is translated."""
        return self._hand_off is not None and not self._hand_off.complete

    def translate(self) -> Self:
        """Translate all pending layers now, in one launch where they have one shape, instead of a few at a time; return the cache."""
        self._translate_or_prefill()
        check_even(self._translated)
        return self

    def extend(
        self,
        source_cache: Cache | Iterable[Any],
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        source_attention_mask: torch.Tensor | None = None,
        translator: CacheTranslator | None = None,
        recompute_last: int = 1,
    ) -> Self:
        """Hand over what the source has read since: only the positions behind those that the cache holds are translated.

        Args:
            source_cache: of the source, holding every position from 0, of the whole conversation so far.
            input_ids: `[B, >= T]` of the whole prompt, for the checks that the constructor makes with it.
            attention_mask, source_attention_mask: as for the constructor; the rows begin in the slots that they begin in already.
            translator: of another source model, where it is one; None for that of the cache.
            recompute_last: trailing positions of the source cache that are left to the target.

        Raises:
            HandOffError: the source cache ends before the translated one does, or a padded batch comes without its mask or with another.
        """
        before = self._hand_off
        if translator is None:
            if before is None:
                raise HandOffError("Nothing was handed over yet: pass translator=.")
            translator = before.translator
        if self._target_model is not None:
            translator.check(target_model=self._target_model)
        if self._on_error == "prefill" and input_ids is None:
            raise HandOffError('on_error="prefill" needs input_ids=, so that the target can read what is handed over itself.')
        start = self.get_seq_length()
        source = SourceStates(source_cache, translator.source.geometry, translator.readers)
        context = context_of(translator, source, recompute_last, attention_mask, source_attention_mask)
        self._prompt.check_growth(start, context, source, None if before is None else before.context)
        prompt = Prompt.of(input_ids, attention_mask, source, context, self._target_model)
        with self._report.native_work.on(source.device if self._target_model is None else device_of(self._target_model)):
            sinks = first_tokens.behind(translator, self._target_model, prompt, context, start)
            self.translate()
            first = first_layers.of(translator, self._target_model, prompt, context, start, self._translated)
        self._prompt = prompt
        self._report.left_to_target = source.length - context.length
        self._report.native_tokens += 0 if sinks is None else sinks.length - min(start, sinks.length)
        self._wait_for(source, translator, context, sinks, first, start)
        return self

    def fork(self) -> Self:
        """Return a cache that goes on from here by itself: it shares every tensor, and leaves this one as it was."""
        twin = self._twin()
        twin._hand_off = None if self._hand_off is None else self._hand_off.fork()
        twin._report = self._report.fork(self._hand_off, twin._hand_off)
        twin.layers = [layer.fork(twin._hand_off) for layer in self._translated]
        return twin

    def to_dynamic_cache(self) -> DynamicCache:
        """Return a plain `DynamicCache` that holds the same tensors, translating what is pending."""
        return dynamic_cache([layer.plain() for layer in self.translate()._translated])

    def to_static_cache(self, max_cache_len: int) -> StaticCache:
        """Return a `StaticCache` of the target with room for so many tokens, filled with the translated context; see `static_cache`."""
        return static_cache(states_of(self.translate()), self.get_seq_length(), self._target_model, max_cache_len)

    def report(self) -> HandOffReport:
        """Tell what was native, translated, left to the target or fallen back, and how long each took."""
        return self._report

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Append new states to a layer, translating its context first where need be; see `Cache.update`."""
        if layer_idx == 0:
            if self._waiting is not None:
                given = kwargs.get("kwargs") or kwargs
                position_ids = given.get("position_ids") if isinstance(given, dict) else None
                if self._target_model is None or position_ids is not None:  # a guarded model has asked already
                    self._prompt.check_positions(self._waiting.context, key_states.shape[-2], None, position_ids)
            elif self._hand_off is not None:
                self._hand_off.check_states()  # of a pass that ended before its last layer
            if not torch.compiler.is_compiling():  # where the guard has looked already
                check_even(self._translated)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` positions, see `Cache.crop`; a pending cache never translates them."""
        waiting = self._waiting
        if tokens_to_remove < 0 and waiting is not None and waiting.untouched and -tokens_to_remove <= waiting.length - waiting.start:
            waiting.shorten(-tokens_to_remove)
            for layer in self._translated:
                layer.follow(waiting)
        else:
            self.translate()
            super().crop(tokens_to_remove)
        self._prompt = self._prompt.within(self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.translate()
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._prompt = Prompt()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.translate()
        super().batch_repeat_interleave(repeats)
        self._prompt = Prompt()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.translate()
        super().batch_select_indices(indices)
        self._prompt = Prompt()

    def reset(self) -> None:
        super().reset()
        self._prompt = Prompt()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        for layer in self.translate()._translated:
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self._twin()
        memo[id(self)] = twin
        twin._hand_off = copy.deepcopy(self._hand_off, memo)
        twin._report = self._report.fork(self._hand_off, twin._hand_off)
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain `DynamicCache` of the translated states: models, maps and sources stay behind."""
        return dynamic_cache, (self.to_dynamic_cache().layers,)

    def unread(self, input_ids: torch.Tensor, new_tokens: int | None, attention_mask: torch.Tensor | None) -> int | None:
        """How many of the last tokens of a prompt the target has to read; see `hf_crosscache.guard`."""
        check_even(self._translated)
        return self._prompt.unread(self.get_seq_length(), input_ids, new_tokens, attention_mask)

    def check_step(
        self,
        new_tokens: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        use_cache: bool | None,
    ) -> None:
        """Refuse a forward pass that would read the cache wrongly; see `hf_crosscache.guard`."""
        check_even(self._translated)
        waiting = self._waiting
        context = None if waiting is None else waiting.context
        self._prompt.check_step(self.get_seq_length(), context, new_tokens, input_ids, attention_mask, position_ids, use_cache)
        if waiting is not None and self._on_error == "prefill":
            self._translate_or_prefill()
        if self._waiting is None:
            self._widen(next((given.shape[0] for given in (input_ids, attention_mask, position_ids) if given is not None), 1))

    def _widen(self, rows: int) -> None:
        """Follow `generate` to several sequences a row, as pending layers do."""
        keys = self._translated[0].keys
        if keys is not None and keys.numel() and rows > keys.shape[0] and rows % keys.shape[0] == 0:
            super().batch_repeat_interleave(rows // keys.shape[0])

    def _twin(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    @property
    def _translated(self) -> list[Any]:
        return self.layers

    @property
    def _waiting(self) -> PendingTranslation | None:
        """The hand-off that the first layer waits for: nothing was read behind it yet."""
        return self._hand_off if self._translated[0].is_pending else None

    def _translate_or_prefill(self) -> None:
        if self._hand_off is None:
            return
        try:
            self._hand_off.translate_all()
        except HandOffError as error:
            if self._on_error == "raise" or self._hand_off.failure is None:
                raise
            read_instead(self, self._target_model, self._prompt, self._hand_off, self._report, str(error))
