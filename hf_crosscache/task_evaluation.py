"""What a target can still do with a context that it has not read itself: its accuracy on tasks, arm by arm, with paired tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .cache import TranslatedCache
from .continuations import read, score
from .intervals import mean, paired_p_value, resamples, share_recovered
from .placement import device_of
from .tasks import TASKS, Item, build_items
from .texts import enough, opening_ids, read_documents
from .translator import CacheTranslator


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task, for one way to give the context.

    task, metric: see `hf_crosscache.tasks.TASKS`. items: contexts. questions: asked over all of them.
    accuracy: share of questions that are answered right; for "tokens", share of tokens.
    retention: arm / native. floor_normalised_retention: (arm - none) / (native - none). gap_recovered: (arm - source) / (native - source).
        Each is None where its denominator is not clear of zero: where it is not positive in every resample of the bootstrap.
    *_low, *_high: ends of a 95 % bootstrap interval over items.
    p_value: of a two-sided paired test over items against the translated arm; None for that arm.
    """

    task: str
    metric: str
    arm: str
    items: int
    questions: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    retention: float | None
    retention_low: float | None
    retention_high: float | None
    floor_normalised_retention: float | None
    floor_normalised_retention_low: float | None
    floor_normalised_retention_high: float | None
    gap_recovered: float | None
    gap_recovered_low: float | None
    gap_recovered_high: float | None
    p_value: float | None


@dataclass(frozen=True)
class TaskEvaluation:
    """The scores of some tasks, and the setting they were measured in."""

    scores: tuple[TaskScore, ...]
    context_tokens: int
    sink_tokens: int
    recompute_last: int

    def __getitem__(self, key: tuple[str, str, str]) -> TaskScore:
        """The score of a task, metric and arm."""
        return next(score for score in self.scores if (score.task, score.metric, score.arm) == key)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        return asdict(self)


def evaluate_tasks(
    translator: CacheTranslator,
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: str | Path | Iterable[Any],
    *,
    tasks: Sequence[str] = tuple(TASKS),
    items: int = 500,
    context_tokens: int = 384,
    recompute_last: int = 0,
    batch_size: int = 16,
    seed: int = 1,
) -> TaskEvaluation:
    """Measure what the target can do, given its contexts in different ways.

    Arms: `native` (the target reads the context), `none` (it sees the question alone), `source` (the source model answers itself),
    `translated`, and `wrong_document` (translated from the context of another work, the control). Each context is read or translated
    once, and all its questions and options go on from forks of that cache.

    Args:
        texts: as `read_documents` takes them; documents of the "test" split are used, which no fit and no selection sees.
        items: contexts of each task; fewer where the texts do not carry more.
        recompute_last: context tokens that are left to the target.
        batch_size: contexts at once.

    Raises:
        GeometryError, IdentityError: a model or the tokenizer is not the translator's.
        CalibrationError: the test documents do not carry the tasks.
    """
    translator.check(source_model=source_model, target_model=target_model, tokenizer=tokenizer)
    translator = translator.to(device_of(source_model))
    held_out = (document for document in read_documents(texts) if document.split == "test")
    documents = list(enough(items * context_tokens, held_out))
    opening = opening_ids(tokenizer)
    scores: list[TaskScore] = []
    for task in tasks:
        found = build_items(task, documents, tokenizer, count=items, context_tokens=context_tokens, seed=seed)
        by_arm: dict[str, list[torch.Tensor]] = {}
        with tqdm(total=len(found), desc=task, unit="item") as progress:
            for start in range(0, len(found), batch_size):
                batch = found[start : start + batch_size]
                wrong = [_of_another_work(found, start + i) for i in range(len(batch))]
                for arm, model, cache, contexts in _arms(translator, source_model, target_model, batch, wrong, opening, recompute_last):
                    by_arm.setdefault(arm, []).append(_answers(model, cache, contexts, batch))
                progress.update(len(batch))
        scores += _summarize(task, found, {arm: torch.cat(parts) for arm, parts in by_arm.items()})
    return TaskEvaluation(tuple(scores), context_tokens, translator.sink_tokens, recompute_last)


def _of_another_work(items: Sequence[Item], index: int) -> Item:
    later = (items[(index + step) % len(items)] for step in range(1, len(items)))
    return next(item for item in later if item.work != items[index].work)


def _arms(
    translator: CacheTranslator,
    source_model: PreTrainedModel,
    target_model: PreTrainedModel,
    batch: Sequence[Item],
    wrong: Sequence[Item],
    opening: list[int],
    recompute_last: int,
) -> Iterator[tuple[str, PreTrainedModel, TranslatedCache, torch.Tensor]]:
    """Yield (arm, who answers, the cache to go on from, contexts `[B, C]` of which that cache holds the first tokens)."""
    contexts = torch.tensor([item.context for item in batch])
    yield "native", target_model, read(target_model, contexts), contexts
    nothing = torch.tensor(opening, dtype=torch.long).expand(len(batch), -1)
    yield "none", target_model, TranslatedCache.empty(target_model), nothing
    source_cache = read(source_model, contexts)
    yield "source", source_model, source_cache, contexts
    settings = {"target_model": target_model, "recompute_last": recompute_last}
    translated = TranslatedCache(source_cache, translator, input_ids=contexts, **settings)
    yield "translated", target_model, translated.translate(), contexts
    others = torch.tensor([item.context for item in wrong])
    control = TranslatedCache(read(source_model, others), translator, input_ids=others, **settings)
    yield "wrong_document", target_model, control.translate(), others


def _answers(model: PreTrainedModel, cache: TranslatedCache, contexts: torch.Tensor, batch: Sequence[Item]) -> torch.Tensor:
    """Answer the questions of some items: float64 `[B, 3]`, their means of "choice", "exact" and "tokens"."""
    unread = contexts[:, cache.get_seq_length() :].tolist()
    answers = []
    for questions in zip(*(item.questions for item in batch), strict=True):
        tails = [(*rest, *question.prompt) for rest, question in zip(unread, questions, strict=True)]
        of_options = zip(*(question.options for question in questions), strict=True)
        (true, likeliest), *others = [score(model, cache.fork(), tails, options) for options in of_options]
        tokens = torch.stack([found.double().mean() for found in likeliest])
        wins = [true > other for other, _ in others]
        choice = torch.stack(wins).all(0).double() if wins else torch.full_like(true, torch.nan)
        answers.append(torch.stack([choice, torch.eq(tokens, 1).double(), tokens], dim=1))
    return torch.stack(answers).mean(0)


def _summarize(task: str, items: Sequence[Item], by_arm: dict[str, torch.Tensor]) -> list[TaskScore]:
    questions, draws = sum(len(item.questions) for item in items), resamples(len(items))
    scores = []
    for metric in TASKS[task].metrics:
        of = {arm: answers[:, ("choice", "exact", "tokens").index(metric)] for arm, answers in by_arm.items()}
        for arm, accuracy in of.items():
            retention, floor_normalised, gap = (
                _share(floor, accuracy, of["native"], draws) for floor in (torch.zeros_like(accuracy), of["none"], of["source"])
            )
            p_value = None if arm == "translated" else paired_p_value(accuracy, of["translated"])
            scores.append(
                TaskScore(
                    task, metric, arm, len(items), questions, *mean(accuracy, draws), *retention, *floor_normalised, *gap, p_value=p_value
                )
            )  # fmt: skip
    return scores


def _share(
    worst: torch.Tensor, arm: torch.Tensor, best: torch.Tensor, draws: torch.Tensor
) -> tuple[float, float, float] | tuple[None, None, None]:
    clear = bool(((best - worst)[draws].mean(1) > 0).all())
    return share_recovered(worst, arm, best, draws) if clear else (None, None, None)
