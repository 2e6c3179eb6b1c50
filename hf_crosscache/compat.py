"""The one place that knows how transformers spells things from release to release."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel

# `past_key_values` became `cache` in transformers 5.24; the models of one release agree, so one of them is asked.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def cache_argument(cache: Cache) -> dict[str, Any]:
    """Name a cache the way `generate` and `forward` of the installed transformers expect it.

    Use as `model.generate(**inputs, **cache_argument(cache))` in code that has to run on several releases.
    """
    return {CACHE_ARGUMENT: cache}


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    logits: bool = False,
) -> tuple[DynamicCache, torch.Tensor | None]:
    """Run a model over token ids into a fresh cache that keeps every position of every layer.

    A plain `DynamicCache()` is used, because one built from the config drops what leaves a sliding window.

    Args:
        model: any decoder-only causal language model.
        input_ids: `[B, T]` token ids.
        position_ids: `[B, T]`, or None for 0 .. T-1 (of each row's tokens where there is a mask).
        attention_mask: `[B, T]`, 0 for padding; None where there is none.
        logits: also return the logits `[B, T, vocab]`; without them the language-model head does not run.
    """
    cache = DynamicCache()
    forward = model if logits else decoder_of(model)
    if position_ids is None and attention_mask is not None:
        position_ids = (attention_mask.long().cumsum(1) - 1).clamp_min(0)
    given = {"position_ids": position_ids, "attention_mask": attention_mask}
    given = {name: tensor.to(input_ids.device) for name, tensor in given.items() if tensor is not None}
    outputs = forward(input_ids=input_ids, use_cache=True, **given, **cache_argument(cache))
    return cache, outputs.logits if logits else None


def states_of(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the keys and values of every layer of a filled cache, as cached: `[B, H, T, D]` each."""
    return [(layer.keys, layer.values) for layer in own_layers(cache)]


def own_layers(cache: Cache) -> list[Any]:
    """Return the layers of a cache that keep states of their own.

    From transformers 5.24 on, a cache made from a config has an empty layer for each layer of the model that reads the states of an
    earlier one; before, and in a plain `DynamicCache()`, it has none.
    """
    return [layer for layer in cache.layers if type(layer).__name__ != "DummyLayer"]


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the decoder stack below the language-model head: the module that owns the rotary embedding."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    return model.base_model if decoder is None else decoder


def uncompiled(function: _Function) -> _Function:
    """What a compiled model calls as it is: a hand-off happens once, and what it holds changes as it goes."""
    return torch.compiler.disable(function)  # type: ignore[return-value]
