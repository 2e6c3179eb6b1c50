"""The drop-in cache: it knows its length at once and translates a layer when the target's attention first asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .compat import prefill, states_of
from .errors import HandOffError
from .source import SourceStates
from .translation import PendingTranslation
from .translator import CacheTranslator, NativeStates


class TranslatedCache(Cache):
    """A target model's cache of a context that only the source model has read.

    Use it wherever transformers takes a cache:

        source(**context, past_key_values=source_cache)
        cache = TranslatedCache(source_cache, translator, target_model=target, input_ids=prompt.input_ids)
        target.generate(**prompt, past_key_values=cache)        # `cache=cache` from transformers 5.24 on

    The first `sink_tokens` positions are the target's own, from a prefill of those few tokens (exact, since attention is causal); the
    last `recompute_last` positions are left out, so that the target reads those tokens itself. What lies between is translated on first
    use, layer by layer, or on CUDA some layers at a time; `translate()` does all at once. After that the cache behaves as a
    `DynamicCache` that holds the same tensors.

    Args:
        source_cache: the source model's cache of the context: a `Cache` that has kept every position, or (keys, values) pairs.
        translator: fitted for this pair of models, on any device: its maps are packed once for the device of the source cache.
        target_model: computes the first positions. Without it they come from the opening that the translator carries, where the
            context begins with it.
        input_ids: `[B, >= T]` token ids of the whole prompt, or of the context at least.
        sink_tokens: leading positions that are the target's own; None for the translator's.
        recompute_last: trailing context positions that are left to the target. At least 1 where the prompt ends with the context,
            since `generate` needs a token to read.

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
        sink_tokens: int | None = None,
        recompute_last: int = 1,
    ) -> None:
        if target_model is not None:
            translator.check(target_model=target_model)
        source = SourceStates(source_cache, translator.source.geometry, translator.readers)
        if not 0 <= recompute_last < source.length:
            raise HandOffError(
                f"recompute_last = {recompute_last} of a context of {source.length} tokens: 0 to {source.length - 1} expected."
            )
        length = source.length - recompute_last
        _check_ids(input_ids, source, target_model)
        sinks = _sinks(translator, source, target_model, input_ids, sink_tokens, length)
        self._hand_off = PendingTranslation(source, translator, sinks, length, source.dtype if target_model is None else target_model.dtype)
        self._prompt_length = None if input_ids is None else input_ids.shape[1]
        super().__init__(layers=[TranslatedLayer(self._hand_off, layer_idx) for layer_idx in range(len(translator.target.geometry))])

    @property
    def is_initialized(self) -> bool:
        """True from the start, although the layers are translated later; False once reset."""
        return all(getattr(layer, "is_initialized", False) or getattr(layer, "is_pending", False) for layer in self.layers)

    def translate(self) -> TranslatedCache:
        """Translate all pending layers now, in one launch where they have one shape, instead of a few at a time; return the cache."""
        self._hand_off.translate_all()
        return self

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Append new states to a layer, translating its context first where that has not happened; see `Cache.update`."""
        layer = self.layers[layer_idx]
        if layer_idx == 0:
            if isinstance(layer, TranslatedLayer) and layer.is_pending:
                self._check_first_step(key_states.shape[-2], kwargs)
            else:
                self._hand_off.check_finite()  # of a pass that ended before its last layer
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, None]]:
        for keys, values in states_of(self.translate()):
            yield keys, values, None

    def _check_first_step(self, new_tokens: int, kwargs: dict[str, Any]) -> None:
        """Refuse a first step that does not continue where the cache ends, which transformers runs without a word."""
        length = self._hand_off.length
        given = kwargs.get("kwargs") or kwargs
        position_ids = given.get("position_ids") if isinstance(given, dict) else None
        if isinstance(position_ids, torch.Tensor) and position_ids.ndim == 2:
            misplaced = bool((position_ids[:, 0] != length).any())
        else:
            misplaced = new_tokens == self._prompt_length
        if misplaced:
            raise HandOffError(
                f"The target was given {new_tokens} tokens that do not start at position {length}, where the translated context "
                "ends, so their positions would be wrong. Pass generate the whole prompt (context included) with its attention mask, "
                "longer than the translated context: recompute_last=1 at least where the prompt ends with the context. All prompts of a "
                "batch must have one length: padded ones are not supported."
            )


class TranslatedLayer(DynamicLayer):
    """One layer of a `TranslatedCache`: pending until first used, a `DynamicLayer` from then on."""

    is_initialized = False
    _keys: torch.Tensor | None = None
    _values: torch.Tensor | None = None

    def __init__(self, hand_off: PendingTranslation, layer_idx: int) -> None:
        self._pending: PendingTranslation | None = hand_off
        self._layer_idx = layer_idx

    @property
    def is_pending(self) -> bool:
        """True until the layer is translated."""
        return self._pending is not None

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """`[B, H, T, D]` rotated keys; reading them translates a pending layer."""
        self._translate()
        return self._keys

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._keys = states

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """`[B, H, T, D]` values; reading them translates a pending layer."""
        self._translate()
        return self._values

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._values = states

    def lazy_initialization(self, key_states: torch.Tensor, *args: Any) -> None:
        """Translate on the first update, to the device, dtype and batch that the layer of the model works in."""
        if self._pending is None:
            super().lazy_initialization(key_states, *args)
        else:
            self._translate(key_states)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        """Append new states. The first ones are written behind the translated context, which was built with room for them."""
        if self._pending is None:
            return super().update(key_states, value_states, *args, **kwargs)
        start, new = self._pending.length, key_states.shape[2]
        keys, values = self._pending.take(self._layer_idx, key_states)
        if keys.shape[2] != start + new or torch.is_grad_enabled():
            self._settle(keys[:, :, :start], values[:, :, :start])
            return super().update(key_states, value_states, *args, **kwargs)
        try:
            keys.narrow(2, start, new).copy_(key_states)
            values.narrow(2, start, new).copy_(value_states)
        except RuntimeError:
            self._settle(keys[:, :, :start], values[:, :, :start])
            raise
        self._settle(keys, values)
        return keys, values

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self._pending is None else self._pending.length

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self._translate()
        super().crop(*args, **kwargs)

    def reset(self) -> None:
        """Empty the layer; a pending translation is dropped."""
        if self._pending is not None:
            self._pending.drop(self._layer_idx)
        self._pending = self._keys = self._values = None
        self.is_initialized = False

    def _translate(self, like: torch.Tensor | None = None) -> None:
        if self._pending is not None:
            length = self._pending.length
            keys, values = self._pending.take(self._layer_idx, like)
            self._settle(keys[:, :, :length], values[:, :, :length])

    def _settle(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys, self._values, self._pending = keys, values, None
        self.device, self.is_initialized = keys.device, True


def _check_ids(input_ids: torch.Tensor | None, source: SourceStates, target_model: PreTrainedModel | None) -> None:
    if input_ids is None:
        return
    if input_ids.ndim != 2 or input_ids.shape[0] != source.batch_size or input_ids.shape[1] < source.length:
        raise HandOffError(
            f"input_ids of shape [{source.batch_size}, at least {source.length}] expected, since the source cache holds that context; "
            f"{list(input_ids.shape)} found. Pass the ids of the whole prompt."
        )
    if target_model is None:
        return
    pad = target_model.config.get_text_config(decoder=True).pad_token_id
    starts_with_padding = (input_ids[:, 0] == pad) if pad is not None else torch.tensor([False])
    if starts_with_padding.any() and not starts_with_padding.all():
        raise HandOffError(
            f"Some prompts of the batch begin with the padding token {pad}: padded batches are not supported, since each row would need "
            "positions of its own. Hand over prompts of one length together, or one by one."
        )


def _sinks(
    translator: CacheTranslator,
    source: SourceStates,
    target_model: PreTrainedModel | None,
    input_ids: torch.Tensor | None,
    sink_tokens: int | None,
    length: int,
) -> NativeStates | None:
    """The target's own states of the first positions, or None where there are none."""
    wanted = min(translator.sink_tokens if sink_tokens is None else sink_tokens, length)
    if wanted <= 0:
        return None
    if target_model is not None and input_ids is not None:
        cache, _ = prefill(target_model, input_ids[:, :wanted].to(target_model.device))
        return NativeStates(*map(tuple, zip(*states_of(cache), strict=True)))
    opening = translator.opening
    mend = "Pass target_model= and input_ids=, so that the target reads them itself."
    if opening is None:
        raise HandOffError(f"The first {wanted} positions are never translated, and the translator carries no states for them. {mend}")
    if wanted > len(opening.token_ids):
        raise HandOffError(
            f"The first {wanted} positions are never translated; the translator carries states for {len(opening.token_ids)}. {mend}"
        )
    if input_ids is not None and any(tuple(row) != opening.token_ids[:wanted] for row in input_ids[:, :wanted].tolist()):
        raise HandOffError(
            f"The context does not begin with the tokens {list(opening.token_ids[:wanted])} that the translator has states for. {mend}"
        )
    if input_ids is None:
        raise HandOffError(f"Whether the context begins as the translator's calibration did cannot be seen without input_ids. {mend}")
    return opening.states(wanted)
