"""Scores of tasks for people and for the record: a plain-text table, and rows of a CSV file."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from .task_evaluation import TaskEvaluation
from .translator import CacheTranslator


def tasks_table(evaluation: TaskEvaluation) -> str:
    """Format the scores of tasks as a plain-text table; intervals and p-values are in the JSON and CSV files in full."""
    lines = [
        f"{'task':<21}{'metric':<8}{'arm':<16}{'items':>6}   accuracy               retention   floor-normalised         gap recovered"
        f"{'p against translated':>34}"
    ]
    for score in evaluation.scores:
        accuracy = _interval(score.accuracy, score.accuracy_low, score.accuracy_high)
        retention = "-" if score.retention is None else f"{score.retention:.3f}"
        floor = _interval(
            score.floor_normalised_retention, score.floor_normalised_retention_low, score.floor_normalised_retention_high
        )  # fmt: skip
        gap = _interval(score.gap_recovered, score.gap_recovered_low, score.gap_recovered_high)
        p_value = "-" if score.p_value is None else f"{score.p_value:.4f}"
        what = f"{score.task:<21}{score.metric:<8}{score.arm:<16}{score.items:>6}"
        lines.append(f"{what}   {accuracy:<23}{retention:<12}{floor:<25}{gap:<24}{p_value:>10}")
    return "\n".join(lines)


def append_csv(path: Path, evaluation: TaskEvaluation, translator: CacheTranslator, device: torch.device, commit: str = "") -> None:
    """Append one row a score to a CSV file, with its heading where the file is new.

    Args:
        device: that the models ran on.
        commit: of the code that ran, for the record.
    """
    setting = {
        "source": Path(translator.source.name).name,
        "target": Path(translator.target.name).name,
        "support": translator.summary["support"],
        "k": translator.summary["k"],
        "sink_tokens": evaluation.sink_tokens,
        "recompute_last": evaluation.recompute_last,
        "context_tokens": evaluation.context_tokens,
    }
    run = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
    }
    rows = [{**setting, **asdict(score), **run} for score in evaluation.scores]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()} for row in rows)


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    return "-" if value is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"
