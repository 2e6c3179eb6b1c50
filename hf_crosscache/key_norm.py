"""Norms of keys: a model that normalises its keys gives every one of them the same length, which a mapped key can be given back."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import decoder_of, prefill, states_of
from .geometry import CacheGeometry
from .placement import device_of, stored_weight
from .rope import strip_rope, to_half_split

_TOKENS = 16
_TOLERANCE = {torch.float32: 1e-3}
_ROUNDED = 2e-2  # for models of fewer bits


@torch.no_grad()
def inverse_key_norms(model: PreTrainedModel, geometry: CacheGeometry) -> torch.Tensor | None:
    """Read the weights of a model's norm of keys, as of Qwen3 and Gemma 3, and invert them.

    Pre-RoPE keys times what is returned have a root mean square of 1 over the head. Whether they do is looked at in the model's own
    cache, since families weigh their norms by w or by 1 + w, and some norm all heads together.

    Returns:
        `[layers, D]` float32 on the CPU, in half-split order; None where a layer's keys are of no such kind.
    """
    blocks: Any = getattr(decoder_of(model), "layers", [])
    norms: list[Any] = [getattr(getattr(block, "self_attn", None), "k_norm", None) for block in blocks]
    weights = [getattr(norm, "weight", None) for norm in norms]
    dims = {layer.head_dim for layer in geometry.layers}
    if len(weights) != len(geometry) or len(dims) > 1 or any(weight is None or weight.numel() not in dims for weight in weights):
        return None
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.linspace(0, vocabulary - 1, _TOKENS, device=device_of(model)).long()[None]
    cached = states_of(prefill(model, ids)[0])
    position_ids = torch.arange(_TOKENS, device=ids.device)[None]
    found = []
    for (keys, _), norm, table in zip(cached, norms, geometry.rotary, strict=True):
        keys = to_half_split(keys, table.rotary_dim) if table.interleaved else keys
        stripped = strip_rope(keys, *table.cos_sin(position_ids.to(keys.device), keys.dtype))
        inverse = _inverse(stripped, stored_weight(norm).float().to(keys.device), table.rotary_dim if table.interleaved else 0)
        if inverse is None:
            return None
        found.append(inverse.cpu())
    return torch.stack(found)


def _inverse(stripped: torch.Tensor, weight: torch.Tensor, interleaved: int) -> torch.Tensor | None:
    """The inverse weights under which some keys have a root mean square of 1, None where neither w nor 1 + w gives it."""
    weight = to_half_split(weight, interleaved) if interleaved else weight
    for factor in (weight, 1 + weight):
        if (factor.abs() < 1e-4).any():
            continue
        rms = (stripped / factor).square().mean(-1).sqrt()
        if (rms - 1).abs().max() < _TOLERANCE.get(stripped.dtype, _ROUNDED):
            return 1 / factor
    return None
