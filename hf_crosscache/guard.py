"""Checks on the target model, for what transformers does wrongly, or without a word, with a cache that is filled before the first step.

`generate` is right with a filled cache in most of its modes. In the others it feeds tokens again that the cache holds already (assisted
decoding and prompt lookup, given the whole prompt), puts new ones at wrong positions (a mask that does not cover the cache, chunked
prefill before transformers 5.23), or reads the cache at every step of the whole text (`use_cache=False`). A guarded model slices the
prompt where that mends it, and refuses the rest. It does so for caches of this library only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from .compat import decoder_of, uncompiled
from .errors import HandOffError


@runtime_checkable
class GuardedCache(Protocol):
    """A cache that a guarded model asks before it reads tokens."""

    def unread(self, input_ids: torch.Tensor, new_tokens: int | None, attention_mask: torch.Tensor | None) -> int | None:
        """How many of the last tokens of a prompt the model has to read; None for all that it is given."""
        ...

    def check_step(
        self,
        new_tokens: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        use_cache: bool | None,
    ) -> None:
        """Raise HandOffError for a forward pass that would read the cache wrongly."""
        ...


def guard(model: PreTrainedModel) -> None:
    """Let a model ask the caches of this library before it reads tokens; once done, it stays so, and copies of it are guarded too."""
    decoder = decoder_of(model)
    if _before_forward not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_before_forward, with_kwargs=True)
    prepare = getattr(model, "prepare_inputs_for_generation", None)  # which a model without a head does not have
    if prepare is not None and not isinstance(prepare, _Preparing):
        model.prepare_inputs_for_generation = _Preparing(prepare)  # type: ignore[method-assign]


class _Preparing:
    """Stands before a model's own `prepare_inputs_for_generation`, whose signature it shows; copied and pickled with the model."""

    def __init__(self, prepare: Callable[..., Any]) -> None:
        self.__wrapped__ = prepare

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if isinstance(cache, GuardedCache) and not args and kwargs.get("inputs_embeds") is None:
            kwargs["next_sequence_length"] = cache.unread(input_ids, kwargs.get("next_sequence_length"), kwargs.get("attention_mask"))
        return self.__wrapped__(input_ids, *args, **kwargs)


@uncompiled
def _before_forward(decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = next((given for given in (*kwargs.values(), *args) if isinstance(given, GuardedCache)), None)
    if cache is None:
        return
    if getattr(decoder, "_is_replica", False):
        raise HandOffError(
            "nn.DataParallel gives one translated cache to all its replicas, each of which reads a part of the batch. Make a model and a "
            "cache for each part, or split one model over the devices (device_map=)."
        )
    input_ids, embeds = kwargs.get("input_ids", args[0] if args else None), kwargs.get("inputs_embeds")
    read = input_ids if input_ids is not None else embeds
    if isinstance(read, torch.Tensor):
        mask, position_ids = kwargs.get("attention_mask"), kwargs.get("position_ids")
        mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
        cache.check_step(read.shape[1], input_ids, mask, position_ids, kwargs.get("use_cache"))
