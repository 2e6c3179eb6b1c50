"""Caches of transformers' own kinds, filled with translated states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from .errors import HandOffError


def dynamic_cache(layers: Sequence[Any]) -> DynamicCache:
    """Return a `DynamicCache` of some layers."""
    plain = DynamicCache()
    plain.layers = list(layers)
    plain.layer_class_to_replicate = None
    return plain


def static_cache(
    states: Sequence[tuple[torch.Tensor, torch.Tensor]], length: int, model: PreTrainedModel | None, max_cache_len: int
) -> StaticCache:
    """Return a `StaticCache` of a model that holds `length` positions.

    Args:
        states: of each layer, keys and values of all positions, or of the last ones where a window slides.

    Raises:
        HandOffError: without a model, or with less room than the positions take.
    """
    if model is None or max_cache_len < length:
        raise HandOffError(f"to_static_cache needs target_model= in the constructor, and max_cache_len of at least {length}.")
    static = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=max_cache_len)
    for layer_idx, (keys, values) in enumerate(states):
        if keys.shape[2] < length:  # what left the window: never attended to, but counted
            gone = keys.new_zeros((*keys.shape[:2], length - keys.shape[2], keys.shape[3]))
            keys, values = torch.cat((gone, keys), dim=2), torch.cat((gone, values), dim=2)
        static.update(keys, values, layer_idx)
    return static
