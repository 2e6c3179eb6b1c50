"""Gradients through a mixture: every token through the maps of its expert, and all of them put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .routing import routed
from .states import LayerStates

Translated = dict[int, tuple[torch.Tensor, ...]]  # target layer -> keys and values
Translate = Callable[[LayerStates, torch.Tensor], Translated]


def by_expert(translates: Sequence[Translate], experts: torch.Tensor, source: LayerStates, target_position_ids: torch.Tensor) -> Translated:
    """Translate a batch, each token by its expert; an expert of no tokens is given none, so that its gradients are zero.

    Args:
        translates: of each expert, what makes of source states and positions `[1, n]` the target's states `[1, H, n, D]`.
        experts: int64 `[B, T]`.
        source: `[B, H_src, T, D_src]` of each layer.
        target_position_ids: int `[B or 1, T]`.

    Returns:
        target layer -> keys and values `[B, H, T, D]`.
    """
    tokens, parts = routed(experts, len(translates)), []
    for translate, own in zip(translates, tokens, strict=True):
        keys, values = ([own.of(states) for states in side] for side in (source.keys, source.values))
        positions = None if source.position_ids is None else own.of_ids(source.position_ids)
        parts.append(translate(LayerStates(keys, values, source.rotary, positions), own.of_ids(target_position_ids)))
    back = torch.cat([own.rows * experts.shape[1] + own.tokens for own in tokens]).argsort()

    def joined(layer_idx: int, side: int) -> torch.Tensor:
        states = torch.cat([part[layer_idx][side] for part in parts], dim=2)[0].index_select(1, back)
        return states.unflatten(1, experts.shape).transpose(0, 1)

    return {layer_idx: (joined(layer_idx, 0), joined(layer_idx, 1)) for layer_idx in parts[0]}
