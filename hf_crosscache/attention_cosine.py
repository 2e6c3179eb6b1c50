"""How close attention over translated states comes to attention over the target's own: a cosine for each layer and query head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel

from .attention_outputs import Heard, attentions_of, listening
from .cache import TranslatedCache
from .compat import cache_argument, decoder_of, prefill, states_of
from .placement import device_of
from .translator import CacheTranslator


@dataclass(frozen=True, eq=False)
class AttentionCosine:
    """Mean cosines to the target's native attention output, each float32 `[layers, query heads]` on the CPU.

    The output of a head is what it hands to the layer's output projection, at every position of the continuation.

    same_queries: every layer is given its native input, so that its queries and the continuation's own keys and values are native: only
        the keys and values of the context are translated. This tells which heads are translated well.
    as_served: the target goes on from the translated cache as `generate` does, so that what earlier layers get wrong reaches later ones.
    wrong_document: as same_queries, translated from another document: how alike the outputs are whatever the context says.
    n: windows.
    """

    same_queries: torch.Tensor
    as_served: torch.Tensor
    wrong_document: torch.Tensor
    n: int


def attention_cosine(
    translator: CacheTranslator,
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    input_ids: torch.Tensor,
    context_tokens: int,
    *,
    batch_size: int = 8,
) -> AttentionCosine:
    """Compare the target's attention outputs over a translated context with those over its native one.

    Args:
        input_ids: `[n, T]` held-out windows, n at least 2, since the control hands each window the context of its neighbour.
        context_tokens: how many of the T tokens are handed over; the others are read by the target, and measured on.

    Raises:
        UnsupportedModelError: the target's layers have no `self_attn.o_proj` to listen at.
    """
    attentions = attentions_of(target_model)
    heads = target_model.config.get_text_config(decoder=True).num_attention_heads
    translator = translator.to(device_of(source_model))
    sums = {name: torch.zeros(len(attentions), heads, dtype=torch.float64) for name in ("same_queries", "as_served", "wrong_document")}
    with tqdm(total=input_ids.numel(), desc="attention outputs", unit="tok", unit_scale=True, delay=2) as progress:
        for batch in input_ids.tensor_split(max(1, min(-(-len(input_ids) // batch_size), len(input_ids) // 2))):
            source_cache, _ = prefill(source_model, batch[:, :context_tokens].to(device_of(source_model)))
            layers, ids = states_of(source_cache), batch.to(device_of(target_model))
            native_cache, _ = prefill(target_model, ids[:, :context_tokens])
            native = _continue(target_model, attentions, native_cache, ids)
            wrong = [(keys.roll(1, 0), values.roll(1, 0)) for keys, values in layers]
            prompt_of_wrong = torch.cat([ids[:, :context_tokens].roll(1, 0), ids[:, context_tokens:]], dim=1)
            for name, pairs, prompt, given in (
                ("same_queries", layers, ids, native.inputs),
                ("as_served", layers, ids, None),
                ("wrong_document", wrong, prompt_of_wrong, native.inputs),
            ):
                cache = TranslatedCache(
                    pairs, translator, target_model=target_model, input_ids=prompt, recompute_last=0, min_context_recovered=float("-inf")
                )
                translated = _continue(target_model, attentions, cache, prompt, given)
                for layer_idx, outputs in native.outputs.items():
                    sums[name][layer_idx] += _cosines(outputs, translated.outputs[layer_idx], heads)
            progress.update(batch.numel())
    means = {name: (total / len(input_ids)).float() for name, total in sums.items()}
    return AttentionCosine(**means, n=len(input_ids))


@torch.no_grad()
def _continue(
    model: PreTrainedModel, attentions: list[Any], cache: Cache, ids: torch.Tensor, given: dict[int, torch.Tensor] | None = None
) -> Heard:
    """Feed what the cache does not hold; where inputs are given, each layer's attention is fed them in the place of its own."""
    with listening(attentions, given) as heard:
        decoder_of(model)(input_ids=ids[:, cache.get_seq_length() :], use_cache=True, **cache_argument(cache))
    return heard


def _cosines(native: torch.Tensor, translated: torch.Tensor, heads: int) -> torch.Tensor:
    """Mean over positions, summed over windows, of each head's cosine: `[B, T, heads * D]` twice -> `[heads]` float64 on the CPU."""
    native, translated = (outputs.unflatten(-1, (heads, -1)).float() for outputs in (native, translated))
    return F.cosine_similarity(native, translated, dim=-1).mean(1).sum(0).double().cpu()
