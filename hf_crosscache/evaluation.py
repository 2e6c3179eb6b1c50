"""How much of a context survives translation: arms, metrics and their intervals, on documents that no fit has seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .alignment import TokenAlignment
from .cache import TranslatedCache
from .compat import cache_argument, prefill, states_of
from .intervals import mean, resamples, share_recovered
from .placement import device_of
from .retokenizing import Retokenizer
from .texts import opening_ids, read_documents, token_windows
from .translator import CacheTranslator


@dataclass(frozen=True)
class Arm:
    """One way to give the target its context, measured on the continuation.

    n: windows. nll: nats a token. kl: KL(native || arm) in nats a token. top1: share of positions where the arm's argmax is native's.
    context_recovered: (none - arm) / (none - native).
    gap_recovered: (source - arm) / (source - native), None where the source does better than the target.
    *_low, *_high: ends of a 95 % bootstrap interval over windows.
    """

    arm: str
    n: int
    nll: float
    nll_low: float
    nll_high: float
    kl: float
    kl_low: float
    kl_high: float
    top1: float
    top1_low: float
    top1_high: float
    context_recovered: float | None
    context_recovered_low: float | None
    context_recovered_high: float | None
    gap_recovered: float | None
    gap_recovered_low: float | None
    gap_recovered_high: float | None


@dataclass(frozen=True)
class Evaluation:
    """The arms of one evaluation, and the setting they were measured in."""

    arms: tuple[Arm, ...]
    context_tokens: int
    continuation_tokens: int
    sink_tokens: int
    recompute_last: int

    def __getitem__(self, arm: str) -> Arm:
        return next(found for found in self.arms if found.arm == arm)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        return asdict(self)


def evaluate_translator(
    translator: CacheTranslator,
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: str | Path | Iterable[Any],
    *,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
    windows: int = 256,
    context_tokens: int = 384,
    continuation_tokens: int = 128,
    recompute_last: int = 0,
    batch_size: int = 8,
    split: str = "test",
    seed: int = 1,
) -> Evaluation:
    """Measure what the target predicts of a continuation, given its context in different ways.

    Arms: `native` (the target reads the context), `none` (it sees the continuation alone, behind its BOS where it has one), `source` (the
    source model answers itself), `translated`, `wrong_document` (translated from another document, the control), and `raw_copy` (the
    source's cache as it is, layers matched by relative depth) where the shapes allow it. All arms are scored on the same tokens: the
    continuation but for its first.
    Documents of the "test" split are used, which no fit and no selection sees; "validation" is for choices between translators.

    Where the source has another tokenizer (`source_tokenizer`), it reads the same text, windows that one of the two does not give back are
    left out, and there is neither an arm `source` nor a gap: losses a token do not compare.

    Raises:
        GeometryError, IdentityError: a model or the tokenizer is not the translator's.
        CalibrationError: no test document is long enough.
    """
    translator.check(source_model=source_model, target_model=target_model, tokenizer=tokenizer, source_tokenizer=source_tokenizer)
    ids = token_windows(
        read_documents(texts),
        tokenizer,
        split=split,
        length=context_tokens + continuation_tokens,
        count=windows,
        seed=seed,
    )
    retokenizer = None
    if translator.two_tokenizers and source_tokenizer is not None:
        retokenizer = Retokenizer(tokenizer, source_tokenizer)
        ids = retokenizer.readable(ids)
    translator = translator.to(device_of(source_model))
    opening = torch.tensor(opening_ids(tokenizer), dtype=torch.long)
    scores: dict[str, list[torch.Tensor]] = {}
    with tqdm(total=ids.numel(), desc="evaluate", unit="tok", unit_scale=True) as progress:
        # Pieces of nearly one size: the wrong document of a window is its neighbour's, so no window may be alone.
        for batch in ids.tensor_split(max(1, min(-(-len(ids) // batch_size), len(ids) // 2))):
            reference = None
            for arm, logits in _arms(translator, source_model, target_model, batch, context_tokens, opening, recompute_last, retokenizer):
                reference = logits if reference is None else reference
                scores.setdefault(arm, []).append(_score(logits, reference, batch[:, context_tokens + 1 :]))
            progress.update(batch.numel())
    by_arm = {arm: torch.cat(parts) for arm, parts in scores.items()}
    return Evaluation(
        arms=_summarize(by_arm),
        context_tokens=context_tokens,
        continuation_tokens=continuation_tokens,
        sink_tokens=translator.sink_tokens,
        recompute_last=recompute_last,
    )


def _arms(
    translator: CacheTranslator,
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    ids: torch.Tensor,
    context: int,
    opening: torch.Tensor,
    recompute_last: int,
    retokenizer: Retokenizer | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (arm, logits) with logits `[B, continuation - 1, vocab]` that predict all of the continuation but its first token."""
    on_target, on_source = ids.to(device_of(target_model)), ids.to(device_of(source_model))
    read: dict[str, Any] = {"input_ids": on_source[:, :context]}
    alignments: tuple[TokenAlignment | None, TokenAlignment | None] = (None, None)
    if retokenizer is not None:
        tokens = retokenizer(ids[:, :context])
        read = {"input_ids": tokens.ids.to(on_source.device), "attention_mask": tokens.attention_mask.to(on_source.device)}
        alignments = tokens.alignment, tokens.alignment.rolled()
    native_cache, _ = prefill(target_model, on_target[:, :context])
    yield "native", _continue(target_model, native_cache, on_target)
    alone = torch.cat([opening.to(on_target.device).expand(len(ids), -1), on_target[:, context:]], dim=1)
    yield "none", _continue(target_model, DynamicCache(), alone)
    source_cache, _ = prefill(source_model, **read)
    layers = states_of(source_cache)

    def translated(pairs: list, prompt: torch.Tensor, alignment: TokenAlignment | None) -> TranslatedCache:
        given = {"target_model": target_model, "input_ids": prompt, "alignment": alignment, "recompute_last": recompute_last}
        return TranslatedCache(pairs, translator, **given)

    yield "translated", _continue(target_model, translated(layers, on_target, alignments[0]), on_target)
    if len(ids) > 1:
        wrong = [(keys.roll(1, 0), values.roll(1, 0)) for keys, values in layers]
        prompt = torch.cat([on_target[:, :context].roll(1, 0), on_target[:, context:]], dim=1)
        yield "wrong_document", _continue(target_model, translated(wrong, prompt, alignments[1]), prompt)
    if retokenizer is not None:
        return
    copy = _raw_copy(translator, layers, target_model)
    if copy is not None:
        yield "raw_copy", _continue(target_model, copy, on_target)
    yield "source", _continue(source_model, source_cache, on_source).to(device_of(target_model))


def _raw_copy(translator: CacheTranslator, layers: list, target_model: PreTrainedModel) -> DynamicCache | None:
    source, target = translator.source.geometry, translator.target.geometry
    if (source.layers[0].num_key_value_heads, source.layers[0].head_dim) != (
        target.layers[0].num_key_value_heads,
        target.layers[0].head_dim,
    ):
        return None
    copy = DynamicCache()
    for layer_idx in range(len(target)):
        keys, values = layers[round(layer_idx * (len(source) - 1) / max(1, len(target) - 1))]
        device, dtype = device_of(target_model), target_model.dtype
        copy.update(keys.to(device, dtype).clone(), values.to(device, dtype).clone(), layer_idx)
    return copy


@torch.no_grad()
def _continue(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    """Feed what the cache does not hold; return the logits of the last `continuation` positions but the very last."""
    held = cache.get_seq_length()
    outputs = model(ids[:, held:], use_cache=True, **cache_argument(cache))
    return outputs.logits[:, :-1].float()


def _score(logits: torch.Tensor, native: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean NLL, KL(native || arm) and argmax agreement of each window, `[B, 3]` on the CPU; KL and agreement NaN for another vocabulary."""
    labels = labels.to(logits.device)
    logits, native = logits[:, -labels.shape[1] :], native[:, -labels.shape[1] :]
    log_p = F.log_softmax(logits, dim=-1)
    nll = -log_p.gather(-1, labels[..., None])[..., 0].mean(1)
    vocabulary = min(logits.shape[-1], native.shape[-1])  # padded embedding rows differ between sizes of one family
    reference = F.log_softmax(native[..., :vocabulary], dim=-1)
    arm = F.log_softmax(logits[..., :vocabulary], dim=-1)
    kl = (reference.exp() * (reference - arm)).sum(-1).mean(1)
    top1 = (reference.argmax(-1) == arm.argmax(-1)).float().mean(1)
    return torch.stack([nll, kl, top1], dim=1).cpu()


def _summarize(by_arm: dict[str, torch.Tensor]) -> tuple[Arm, ...]:
    n = len(by_arm["native"])
    draws = resamples(n)
    losses = {arm: scores[:, 0].double() for arm, scores in by_arm.items()}
    native, none, source = losses["native"], losses["none"], losses.get("source")
    arms = []
    for name, scores in by_arm.items():
        nll = scores[:, 0].double()
        _, kl, top1 = scores.double().unbind(1)
        context = share_recovered(none, nll, native, draws)
        gap = share_recovered(source, nll, native, draws) if source is not None and source.mean() > native.mean() else (None, None, None)
        arms.append(Arm(name, n, *mean(nll, draws), *mean(kl, draws), *mean(top1, draws), *context, *gap))
    return tuple(arms)
