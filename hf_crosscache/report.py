"""Results for people and for the record: a plain-text table, and rows of a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
import transformers

from .artefact import size_mb
from .evaluation import Evaluation
from .translator import CacheTranslator


def results_table(evaluation: Evaluation) -> str:
    """Format the arms of an evaluation as a plain-text table."""
    lines = [f"{'arm':<16}{'n':>5}{'NLL':>9}{'KL':>8}{'top-1':>8}   context recovered       gap recovered"]
    for arm in evaluation.arms:
        context = _interval(arm.context_recovered, arm.context_recovered_low, arm.context_recovered_high)
        gap = _interval(arm.gap_recovered, arm.gap_recovered_low, arm.gap_recovered_high)
        lines.append(f"{arm.arm:<16}{arm.n:>5}{arm.nll:>9.4f}{_number(arm.kl):>8}{_number(arm.top1):>8}   {context:<24}{gap}")
    return "\n".join(lines)


def append_csv(
    path: Path, evaluation: Evaluation, translator: CacheTranslator, folder: Path, device: torch.device, commit: str = ""
) -> None:
    """Append one row an arm to a CSV file, with its heading where the file is new.

    Args:
        folder: of the translator's artefact, for its size.
        device: that the models ran on.
        commit: of the code that ran, for the record.
    """
    summary = translator.summary
    rows = []
    for arm in evaluation.arms:
        values = {
            "source": Path(translator.source.name).name,
            "target": Path(translator.target.name).name,
            "support": summary["support"],
            "k": summary["k"],
            "lexical": int(translator.native_layers == 1),
            "refined": int("refined" in summary),
            "sink_tokens": evaluation.sink_tokens,
            "recompute_last": evaluation.recompute_last,
            "native_layers": translator.native_layers,
            "context_tokens": evaluation.context_tokens,
            "arm": arm.arm,
            "n": arm.n,
            "nll": arm.nll,
            "kl": arm.kl,
            "top1": arm.top1,
            "context_recovered": arm.context_recovered,
            "context_recovered_low": arm.context_recovered_low,
            "context_recovered_high": arm.context_recovered_high,
            "gap_recovered": arm.gap_recovered,
            "artefact_mb": round(size_mb(folder), 1),
            "fit_seconds": summary["fit_seconds"],
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "commit": commit,
        }
        rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    return "-" if value is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"
