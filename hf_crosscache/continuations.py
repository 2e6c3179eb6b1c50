"""Continuations scored behind a cache: how likely each is, and whether greedy decoding would give it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from .cache import TranslatedCache
from .compat import cache_argument, decoder_of
from .placement import device_of


@torch.no_grad()
def read(model: PreTrainedModel, ids: torch.Tensor) -> TranslatedCache:
    """Let a model read `[B, T]` token ids into a cache that keeps every position and can be forked."""
    cache = TranslatedCache.empty(model, keep_window=False)
    decoder_of(model)(input_ids=ids.to(device_of(model)), use_cache=True, **cache_argument(cache))
    return cache


@torch.no_grad()
def score(
    model: PreTrainedModel,
    cache: TranslatedCache,
    tails: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Read a tail and a continuation behind each row of a cache, and score the continuation.

    Greedy decoding gives a continuation exactly where each of its tokens is the likeliest behind those before it, so nothing is generated.

    Args:
        cache: holds `T` positions of `B` rows, or nothing; it is filled further: pass a fork to use it again.
        tails: token ids of each row that come before its continuation, one at least.
        continuations: token ids of each row, one at least.
        attention_mask: `[B, T]` of what the cache holds, 0 for padding, which is on the left; None where there is none.

    Returns:
        Summed log-likelihoods in nats, float64 `[B]`; and for each row, bool `[continuation]`, which of its tokens are the likeliest. On
        the CPU.
    """
    rows = [[*tail, *continuation] for tail, continuation in zip(tails, continuations, strict=True)]
    width, first = max(map(len, rows)), min(map(len, tails)) - 1
    # Rows end in padding of any token, which no earlier token sees.
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device_of(model))
    placed = {}
    if attention_mask is not None:
        mask = torch.cat([attention_mask.to(ids.device), torch.ones_like(ids)], dim=1)
        placed = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1)[:, -width:]}
    logits = model(ids, use_cache=True, logits_to_keep=width - first, **placed, **cache_argument(cache)).logits
    likelihoods, likeliest = [], []
    for row, (tail, continuation) in enumerate(zip(tails, continuations, strict=True)):
        start = len(tail) - 1 - first
        log_p = logits[row, start : start + len(continuation)].float().log_softmax(-1)
        labels = torch.tensor(continuation, device=log_p.device)
        likelihoods.append(log_p.gather(-1, labels[:, None]).sum().double().cpu())
        likeliest.append(torch.eq(log_p.argmax(-1), labels).cpu())
    return torch.stack(likelihoods), likeliest
