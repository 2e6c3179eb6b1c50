"""What a hand-off costs, as a share of the arithmetic of the prefill that it saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import decoder_of
from .translator import CacheTranslator


@dataclass(frozen=True)
class Cost:
    """Multiplications of a hand-off, each divided by those of the target's prefill of the same context.

    native: first tokens and first layers; maps: all features, routing and the affine maps, of a mixture those of one expert; tail: the last
        tokens, left to the target.
    """

    native: float
    maps: float
    tail: float

    @property
    def total(self) -> float:
        """The whole hand-off; 1 is a prefill."""
        return self.native + self.maps + self.tail


def hand_off_cost(
    translator: CacheTranslator,
    target_model: PreTrainedModel,
    *,
    context_tokens: int,
    recompute_last: int = 0,
    sink_tokens: int | None = None,
) -> Cost:
    """Count a hand-off of a context against the target's prefill of it.

    Counted are the matrix products of decoder layers, two products of attention a pair of positions that see each other, features, routing
    and maps; not embeddings, norms, rotations and the language-model head, of which a prefill needs one position. Of experts the active
    ones count. Layers that the target runs natively need of the last one its keys' and values' projections alone.

    Args:
        context_tokens: T, all of the context; the last recompute_last of them are the target's own.
        sink_tokens: first tokens that are the target's own; None for the translator's.
    """
    layers = _layers(translator, target_model)
    sinks = min(translator.sink_tokens if sink_tokens is None else sink_tokens, context_tokens)
    handed_over = max(0, context_tokens - recompute_last)
    whole = sum(layer.reading(0, context_tokens) for layer in layers)
    native = sum(layer.reading(0, min(sinks, handed_over)) for layer in layers)
    if translator.native_layers:
        last = translator.native_layers - 1
        native += sum(layer.reading(0, handed_over) for layer in layers[:last]) + handed_over * layers[last].projections
    tail = sum(layer.reading(handed_over, context_tokens) for layer in layers)
    router = 0 if translator.mixture is None else translator.mixture.router.weight.numel()
    each = (
        translator.panels.products
        + router
        + sum(layer_map.weight.numel() for side in (translator.keys, translator.values) for layer_map in side if layer_map is not None)
    )
    maps = each * max(0, handed_over - sinks)
    return Cost(native / whole, maps / whole, tail / whole)


@dataclass(frozen=True)
class _Layer:
    """weights: products of one token; projections: those of its keys and values; attended: of one pair of positions; window: or None."""

    weights: float
    projections: float
    attended: float
    window: int | None

    def reading(self, start: int, end: int) -> float:
        """Products of reading the positions from start to end."""
        seen = torch.arange(start + 1, end + 1, dtype=torch.float64)
        if self.window is not None:
            seen = seen.clamp_max(self.window)
        return (end - start) * self.weights + self.attended * seen.sum().item()


def _layers(translator: CacheTranslator, model: PreTrainedModel) -> list[_Layer]:
    config: Any = model.config.get_text_config(decoder=True)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    active = getattr(config, "num_experts_per_tok", 1) / experts if experts else 1.0
    decoder: Any = decoder_of(model)
    counted = []
    for block, shape in zip(decoder.layers, translator.target.geometry.layers, strict=False):
        weights = sum(
            parameter.numel() * (active if ".experts." in f".{name}" else 1.0)
            for name, parameter in block.named_parameters()
            if parameter.ndim > 1
        )
        projections = config.hidden_size * 2 * shape.num_key_value_heads * shape.head_dim
        attended = 2.0 * config.num_attention_heads * shape.head_dim
        counted.append(_Layer(weights, projections, attended, shape.sliding_window))
    return counted
