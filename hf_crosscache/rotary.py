"""How each layer of a model turns its keys: rotary tables, read from the model's own rotary module and functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .compat import decoder_of
from .errors import UnsupportedModelError
from .placement import device_of
from .rope import RotaryTable, apply_rope, to_half_split, to_interleaved

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Families that turn keys in sliding layers only, where the config has a window. A family that is missing here is refused by
# `check_positions`, never translated wrongly.
_ROPE_IN_SLIDING_LAYERS_ONLY = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone4_5", "exaone_moe", "flint", "kolibri1")


def rotary_tables(model: PreTrainedModel, config: PreTrainedConfig, attention: Sequence[str], name: str) -> tuple[RotaryTable, ...]:
    """Read the rotary table of every layer; a layer without RoPE gets one of the same rotary_dim that turns nothing.

    Args:
        config: of the model's decoder.
        attention: of each layer of the cache, "full_attention" or "sliding_attention".
        name: what errors call the model.

    Raises:
        UnsupportedModelError: the model's positions are of a kind that no table describes.
    """
    rotary: Any = getattr(decoder_of(model), "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModelError(f"{name}: no rotary embedding found; learned and ALiBi positions are not supported.")
    per_layer_type = "layer_type" in inspect.signature(rotary.forward).parameters
    layer_types = list(config.layer_types)[: len(attention)] if per_layer_type else [""] * len(attention)
    turning = {layer_type: _rotary_table(model, rotary, layer_type, name) for layer_type in set(layer_types)}
    still = {
        layer_type: replace(table, inv_freq=torch.zeros_like(table.inv_freq), attention_scaling=1.0)
        for layer_type, table in turning.items()
    }
    has_rope = _has_rope(config, attention)
    return tuple((turning if turns else still)[layer_type] for layer_type, turns in zip(layer_types, has_rope, strict=True))


def _has_rope(config: PreTrainedConfig, attention: Sequence[str]) -> list[bool]:
    no_rope_layers = getattr(config, "no_rope_layers", None)
    if no_rope_layers:  # the other way round than its name says: 1 for a layer with RoPE
        return [bool(turns) for turns in no_rope_layers][: len(attention)]
    if config.model_type.removesuffix("_text") in _ROPE_IN_SLIDING_LAYERS_ONLY and getattr(config, "sliding_window", None) is not None:
        return [kind == "sliding_attention" for kind in attention]
    return [True] * len(attention)


def _rotary_table(model: PreTrainedModel, rotary: Any, layer_type: str, name: str) -> RotaryTable:
    prefix = f"{layer_type}_" if layer_type else ""
    rope_type = getattr(rotary, "rope_type", "default")
    if isinstance(rope_type, dict):
        rope_type = rope_type[layer_type]
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModelError(
            f"{name}: rotary embedding of type {rope_type!r} changes its frequencies with the length of the context, "
            "which is not supported."
        )
    inv_freq = getattr(rotary, f"{prefix}inv_freq", None)
    if inv_freq is None:
        raise UnsupportedModelError(f"{name}: its rotary module has no {prefix}inv_freq to read the frequencies from; not supported.")
    inv_freq = inv_freq.detach().float().cpu()
    table = RotaryTable(inv_freq, float(getattr(rotary, f"{prefix}attention_scaling", 1.0)))
    positions = torch.tensor([[0, 1, 2, 17, 1023]], device=device_of(model))
    like = torch.empty(1, dtype=model.dtype, device=device_of(model))
    theirs = rotary(like, positions, layer_type) if layer_type else rotary(like, positions)
    if not isinstance(theirs, tuple) or len(theirs) != 2:
        raise UnsupportedModelError(f"{name}: its rotary module gives something else than cos and sin; not supported.")
    atol = 1e-4 if model.dtype == torch.float32 else 1e-2
    for got, ours in zip(theirs, table.cos_sin(positions, model.dtype), strict=True):
        if not any(torch.allclose(once.float(), ours, atol=atol) for once in _once_a_pair(got, inv_freq.numel())):
            raise UnsupportedModelError(f"{name}: its rotary module does not follow its own frequencies; not supported.")
    cos, sin = (part.detach().float().cpu() for part in theirs)
    interleaved = _is_interleaved(decoder_of(model), table, (cos, sin), positions.cpu(), atol, name)
    return replace(table, interleaved=interleaved)


def _once_a_pair(part: torch.Tensor, pairs: int) -> list[torch.Tensor]:
    """What cos, or sin, may say of each pair: families write it once, twice in a row of halves, or twice side by side."""
    return [part[..., :pairs], part[..., ::2]] if part.shape[-1] == 2 * pairs else [part[..., :pairs]]


def _is_interleaved(
    decoder: torch.nn.Module,
    table: RotaryTable,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    atol: float,
    name: str,
) -> bool:
    """Tell how a model pairs the dimensions it turns, by turning random keys with its own function.

    Where the model's file has no function of the usual form, half-split is assumed, which `check_positions` verifies.
    """
    attention = next((module for module in decoder.modules() if type(module).__name__.endswith("Attention")), decoder)
    turn = getattr(sys.modules.get(type(attention).__module__), "apply_rotary_pos_emb", None)
    if turn is None or list(inspect.signature(turn).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return False
    dim = table.rotary_dim
    shape, generator = (1, 1, positions.shape[1], dim), torch.Generator().manual_seed(0)
    keys = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    got = turn(keys.clone(), keys.clone(), *cos_sin)[1]
    ours = table.cos_sin(positions, torch.float32)
    for interleaved, expected in (
        (False, apply_rope(keys, *ours)),
        (True, to_interleaved(apply_rope(to_half_split(keys, dim), *ours), dim)),
    ):
        if got.shape == expected.shape and torch.allclose(got, expected, rtol=0, atol=8 * atol):
            return interleaved
    raise UnsupportedModelError(
        f"{name}: its rotary embedding pairs dimensions neither as halves (j, j + {dim // 2}) nor as neighbours (2j, 2j + 1), "
        "or turns them the other way, which is not supported."
    )
