"""What goes through a model's attention: the input of each layer, and the output that it hands to its projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import decoder_of
from .errors import UnsupportedModelError


@dataclass
class Heard:
    """What went through the attention of each layer: its input hidden states, and its output before the output projection."""

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)


@contextmanager
def listening(attentions: Sequence[Any], given: dict[int, torch.Tensor] | None = None) -> Iterator[Heard]:
    """Keep what goes through some attention modules while their model runs.

    Args:
        given: input of each layer, `[B, T, F]`, fed to its attention in the place of its own; None leaves all as it is.
    """
    heard, handles = Heard(), []

    def at_input(layer_idx: int):
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            heard.inputs[layer_idx] = args[0] if args else kwargs["hidden_states"]
            if given is None:
                return None
            return ((given[layer_idx], *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given[layer_idx]})

        return hook

    def at_output(layer_idx: int):
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            heard.outputs[layer_idx] = args[0]

        return hook

    try:
        for layer_idx, attention in enumerate(attentions):
            handles.append(attention.register_forward_pre_hook(at_input(layer_idx), with_kwargs=True))
            handles.append(attention.o_proj.register_forward_pre_hook(at_output(layer_idx)))
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def attentions_of(model: PreTrainedModel) -> list[Any]:
    """Return the attention module of every layer.

    Raises:
        UnsupportedModelError: a layer has no `self_attn.o_proj` to listen at.
    """
    blocks: Any = getattr(decoder_of(model), "layers", None) or []
    attentions = [getattr(block, "self_attn", None) for block in blocks]
    without = next((layer_idx for layer_idx, attention in enumerate(attentions) if not hasattr(attention, "o_proj")), None)
    if not attentions or without is not None:
        raise UnsupportedModelError(
            f"Target, layer {without or 0}: `self_attn.o_proj` expected, where attention outputs can be compared; {type(model).__name__} "
            "has none there."
        )
    return attentions
