"""The target's own first layers over a context: exact keys and values, and the hidden state that the maps of later layers read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from .compat import cache_argument, decoder_of, uncompiled
from .context import Context
from .errors import HandOffError, UnsupportedModelError
from .placement import device_of
from .prompt import Prompt
from .translator import CacheTranslator


@dataclass(frozen=True, eq=False)
class FirstLayers:
    """What the first m layers of a target cache for some tokens.

    keys, values: per layer `[B, H, T, D]`, exact, since a layer depends on those before it alone.
    hidden: `[B, T, F]` what the attention of the last of them reads: the residual stream, normalised as the layer normalises it.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    hidden: torch.Tensor


def of(
    translator: CacheTranslator,
    target_model: PreTrainedModel | None,
    prompt: Prompt,
    context: Context,
    start: int = 0,
    layers: Sequence[Any] = (),
) -> FirstLayers | None:
    """Let the target run its first layers over a context from slot `start` on, where the translator leaves any to it.

    Args:
        layers: of the cache, which hold the slots before.

    Raises:
        HandOffError: the target, or the ids, are not known.
    """
    if translator.native_layers == 0 or context.length <= start:
        return None
    if target_model is None or prompt.input_ids is None:
        raise HandOffError(
            f"The first {translator.native_layers} layers are the target's own (native_layers of the translator): pass target_model= and "
            "input_ids=, so that it can run them."
        )
    past = [layer.plain() for layer in layers[: translator.native_layers]] if start else None
    return run(target_model, translator.native_layers, prompt.inputs(start, context, device_of(target_model)), past)


@uncompiled
@torch.no_grad()
def run(
    model: PreTrainedModel, native_layers: int, inputs: dict[str, torch.Tensor], past: Sequence[CacheLayerMixin] | None = None
) -> FirstLayers:
    """Run the first layers of a model over some tokens; of the last one, no more than its keys and values need.

    That costs `native_layers - 1` layers of a prefill, and with one layer an embedding, a norm and two projections.

    Args:
        inputs: of the decoder: input_ids `[B, T]`, position_ids, and attention_mask where there is padding.
        past: these layers' own states of the tokens before, as transformers' cache layers; they are left as they are.
    """
    cache = _Stopping(native_layers)
    for layer_idx, layer in enumerate(past or ()):
        cache.layers[layer_idx] = layer
    with attention_input(model, native_layers - 1) as hidden, suppress(_Reached):
        decoder_of(model)(**inputs, use_cache=True, **cache_argument(cache))
    keys, values = zip(*cache.new, strict=True)
    return FirstLayers(keys, values, hidden[0])


@contextmanager
def attention_input(model: PreTrainedModel, layer_idx: int) -> Iterator[list[torch.Tensor]]:
    """Keep what the attention of a layer reads, `[B, T, F]` of each pass, while the model runs.

    Raises:
        UnsupportedModelError: the layer's attention module is not where transformers' decoders have it.
    """
    block: Any = getattr(decoder_of(model), "layers", [None] * (layer_idx + 1))[layer_idx]
    attention = getattr(block, "self_attn", None)
    if attention is None:
        raise UnsupportedModelError(
            f"{type(model).__name__}, layer {layer_idx}: no `self_attn` found in `layers`, so its first layers cannot be run alone. "
            "Fit with native_layers=0."
        )
    kept: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handle = attention.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield kept
    finally:
        handle.remove()


class _Reached(Exception):
    """All that was wanted of a pass has been cached."""


class _Stopping(DynamicCache):
    """A cache that keeps the new states of some first layers apart and ends the pass behind the last of them."""

    def __init__(self, native_layers: int) -> None:
        super().__init__()
        self.new: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._native_layers = native_layers
        self.layers = [self.layer_class_to_replicate() for _ in range(native_layers)]  # type: ignore[misc]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        self.new.append((key_states, value_states))
        if len(self.new) == self._native_layers:
            raise _Reached
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
