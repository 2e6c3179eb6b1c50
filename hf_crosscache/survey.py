"""Everything that a report on a translator tells, measured with the models on held-out documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .attention_cosine import AttentionCosine, attention_cosine
from .errors import CalibrationError, UnsupportedModelError
from .evaluation import Evaluation, evaluate_translator
from .placement import device_of
from .texts import Document, enough, read_documents, token_windows
from .translator import CacheTranslator

RECOMPUTE_LAST = (0, 4, 16, 64)
CONTEXT_TOKENS = (128, 256, 384, 1024, 2048, 4096)
_LEAST_WINDOWS = 8  # of a context length, below which an interval over windows says nothing
_ATTENTION_WINDOWS = 32


@dataclass(frozen=True, eq=False)
class Survey:
    """A translator and what was measured of it.

    evaluation: the arms, at the context length and recompute_last asked for.
    by_recompute_last, by_context_tokens: the same with one of the two varied, in rising order.
    not_measured: context length -> why no figure is given for it.
    attention: cosines of the target's attention outputs, or why they could not be had.
    setting: what it was measured with, label -> value.
    size_mb: of the saved translator, in megabytes (10^6 bytes); None where it is not saved.
    """

    translator: CacheTranslator
    evaluation: Evaluation
    by_recompute_last: tuple[Evaluation, ...]
    by_context_tokens: tuple[Evaluation, ...]
    not_measured: dict[int, str]
    attention: AttentionCosine | str
    setting: dict[str, str]
    size_mb: float | None = None


def survey_translator(
    translator: CacheTranslator,
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: str | Path | Iterable[Any],
    *,
    windows: int = 128,
    context_tokens: int = 384,
    continuation_tokens: int = 128,
    recompute_last: int = 0,
    recompute_lasts: Sequence[int] = RECOMPUTE_LAST,
    lengths: Sequence[int] = CONTEXT_TOKENS,
    batch_size: int = 8,
    size_mb: float | None = None,
    seed: int = 1,
) -> Survey:
    """Measure a translator for a report: arms, the two series, and attention outputs.

    Args:
        recompute_lasts: numbers of last context tokens left to the target; those that leave no context to hand over are left out.
        lengths: context lengths in tokens; those that too few documents, or the models' positions, reach are left out, and told of.
        batch_size: windows at once at `context_tokens`; longer contexts take fewer.
        Others as in `evaluate_translator`.

    Raises:
        GeometryError, IdentityError: a model or the tokenizer is not the translator's.
        CalibrationError: fewer than two windows of test documents of `context_tokens + continuation_tokens`.
    """
    lengths = sorted({*lengths, context_tokens})
    recompute_lasts = sorted({recompute_last, *(n for n in recompute_lasts if n < context_tokens)})
    documents = _held_out(texts, windows * (lengths[-1] + continuation_tokens))
    window_tokens = context_tokens + continuation_tokens
    ids = token_windows(documents, tokenizer, split="test", length=window_tokens, count=min(windows, _ATTENTION_WINDOWS), seed=seed)
    if len(ids) < 2:
        raise CalibrationError(
            f"Two windows of {window_tokens} tokens needed, since the control hands each the context of another; {len(ids)} found. "
            "Ask for more windows, or give more or longer texts."
        )

    def evaluated(length: int, left: int) -> Evaluation:
        at_once = max(2, batch_size * window_tokens // (length + continuation_tokens)) if length > context_tokens else batch_size
        return evaluate_translator(
            translator, source_model, target_model, tokenizer, documents, windows=windows, context_tokens=length,
            continuation_tokens=continuation_tokens, recompute_last=left, batch_size=at_once, seed=seed,
        )  # fmt: skip

    def unfit(length: int) -> str | None:
        if length + continuation_tokens > most:
            return f"with the continuation it goes beyond the {most:,} positions that the models are made for"
        if recompute_last >= length:
            return f"the last {recompute_last} tokens are left to the target, so that nothing would be handed over"
        try:
            n = len(token_windows(documents, tokenizer, split="test", length=length + continuation_tokens, count=windows, seed=seed))
        except CalibrationError as error:
            return str(error)
        return None if n >= min(windows, _LEAST_WINDOWS) else f"the test documents hold only {n} windows so long"

    most = _most_positions(source_model, target_model)
    with tqdm(total=len(recompute_lasts) + len(lengths) + 1, desc="survey", unit="part") as progress:
        by_recompute_last = []
        for left in recompute_lasts:
            by_recompute_last.append(evaluated(context_tokens, left))
            progress.update()
        evaluation = next(found for found in by_recompute_last if found.recompute_last == recompute_last)
        by_context_tokens, not_measured = [], {}
        for length in lengths:
            why = None if length == context_tokens else unfit(length)
            if why is not None:
                not_measured[length] = why
            else:
                by_context_tokens.append(evaluation if length == context_tokens else evaluated(length, recompute_last))
            progress.update()
        try:
            attention = attention_cosine(translator, source_model, target_model, ids, context_tokens, batch_size=batch_size)
        except UnsupportedModelError as error:
            attention = str(error)
        progress.update()
    return Survey(
        translator=translator,
        evaluation=evaluation,
        by_recompute_last=tuple(by_recompute_last),
        by_context_tokens=tuple(by_context_tokens),
        not_measured=not_measured,
        attention=attention,
        setting=_setting(texts, target_model),
        size_mb=size_mb,
    )


def _most_positions(*models: PreTrainedModel) -> float:
    """Positions that all of some models are made for; infinite where none of them says."""
    made_for = [getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) for model in models]
    return min([positions for positions in made_for if positions is not None], default=math.inf)


def _held_out(texts: str | Path | Iterable[Any], tokens: int) -> list[Document]:
    """The test documents, read once for all measurements."""
    return list(enough(tokens, (document for document in read_documents(texts) if document.split == "test")))


def _setting(texts: Any, model: PreTrainedModel) -> dict[str, str]:
    device = device_of(model)
    setting = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper(),
        "dtype of the models": str(model.dtype).removeprefix("torch."),
        "software": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    given = [Path(texts)] if isinstance(texts, (str, Path)) else texts if isinstance(texts, (list, tuple)) else []
    files = [text.name for text in given if isinstance(text, Path)]
    return {**({"texts": ", ".join(files)} if files else {}), **setting}
