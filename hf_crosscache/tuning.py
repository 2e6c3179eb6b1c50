"""The frontier between translating everything and a full prefill: fit points of it, and keep the best within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .arithmetic import hand_off_cost
from .calibration import Calibration
from .errors import CalibrationError
from .evaluation import evaluate_translator
from .fitting import fit_translator
from .texts import Document, read_documents
from .translator import CacheTranslator


@dataclass(frozen=True)
class Point:
    """One way to hand a context over: how many first layers and last tokens are the target's own, what it costs and what it keeps."""

    native_layers: int
    recompute_last: int
    cost: float
    context_recovered: float
    gap_recovered: float | None

    @property
    def label(self) -> str:
        return f"{self.native_layers} native layers, last {self.recompute_last}"

    def to_dict(self) -> dict[str, Any]:
        """Return the point as `summary["frontier"]` holds it."""
        return {**self.__dict__, "label": self.label}


def tune_translator(
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: str | Path | Iterable[Any],
    *,
    budget: float = 0.1,
    context_tokens: int = 384,
    windows: int = 64,
    k: int = 8,
    native_layers: Sequence[int] | None = None,
    native_features: int | None = None,
    source_features: int | None = None,
    recompute_last: Sequence[int] = (0, 4, 16, 64),
    fit_tokens: int = 300_000,
    folder: str | Path | None = None,
) -> CacheTranslator:
    """Fit translators with different numbers of native layers, measure them with different tails, and keep the best within a budget.

    Documents of the "validation" split measure; `evaluate_translator` leaves those of "test" for the one that is kept. Costs are shares of
    the arithmetic of the target's prefill (`hand_off_cost`) at the given context length.

    Args:
        budget: share of the prefill's arithmetic that a hand-off may cost.
        context_tokens, windows: of the measurement, with 128 tokens behind each context.
        native_layers: numbers to try; None for none, one, and every further one up to the budget, or the nearest eight of them.
        native_features, source_features, k, fit_tokens: as `fit_translator` and `Calibration` take them.
        recompute_last: numbers of last tokens to try.
        folder: where every translator tried is kept, as `native-<layers>`; None keeps the chosen one alone.

    Returns:
        The chosen translator, on the CPU. `summary["frontier"]` holds all points, `summary["tuned"]` the chosen one: serve it with its
        recompute_last.

    Raises:
        CalibrationError: nothing that was tried fits the budget.
    """
    documents = list(read_documents(texts))
    tried = (
        _layers_to_try(target_model.config.get_text_config(decoder=True).num_hidden_layers, budget)
        if native_layers is None
        else sorted(set(native_layers))
    )
    points: list[Point] = []
    translators: dict[int, CacheTranslator] = {}
    for native in tried:
        calibration = Calibration(source_model, target_model, tokenizer, documents, tokens=fit_tokens, native_layers=native)
        of_target = native_features if native else None
        translator = fit_translator(calibration, k=k, native_features=of_target, source_features=source_features)
        translators[native] = translator
        if folder is not None:
            translator.save_pretrained(Path(folder) / f"native-{native}")
        points += measured(
            translator,
            source_model,
            target_model,
            tokenizer,
            documents,
            context_tokens=context_tokens,
            windows=windows,
            tails=recompute_last,
        )
    affordable = [point for point in points if point.cost <= budget]
    if not affordable:
        raise CalibrationError(
            f"Nothing tried costs at most {budget:g} of a prefill of {context_tokens} tokens; the cheapest costs "
            f"{min(point.cost for point in points):.3f}. Raise the budget, or try fewer native_layers or recompute_last."
        )
    best = max(affordable, key=lambda point: point.context_recovered)
    entries = {"frontier": [point.to_dict() for point in sorted(points, key=lambda point: point.cost)], "tuned": best.to_dict()}
    return translators[best.native_layers].with_summary(entries)


def measured(
    translator: CacheTranslator,
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    *,
    context_tokens: int,
    windows: int,
    tails: Sequence[int],
    split: str = "validation",
) -> list[Point]:
    """Measure a translator with different tails: the points of the frontier that it can serve."""
    documents, points = list(documents), []
    for tail in tails:
        evaluation = evaluate_translator(
            translator, source_model, target_model, tokenizer, documents,
            windows=windows, context_tokens=context_tokens, recompute_last=tail, split=split,
        )  # fmt: skip
        arm = evaluation["translated"]
        cost = hand_off_cost(translator, target_model, context_tokens=context_tokens, recompute_last=tail).total
        points.append(Point(translator.native_layers, tail, cost, arm.context_recovered or 0.0, arm.gap_recovered))
    return points


def _layers_to_try(layers: int, budget: float) -> list[int]:
    most = min(layers // 2, max(1, int(budget * layers) + 1))
    everything = list(range(most + 1))
    if len(everything) <= 8:
        return everything
    return sorted({round(i * most / 7) for i in range(8)} | {1})
