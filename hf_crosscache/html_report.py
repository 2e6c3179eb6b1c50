"""The report on a translator: one HTML page that needs nothing but itself. Pure functions of a survey; no model is run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from . import charts
from .charts import Curve, Figure, Wire
from .evaluation import Arm, Evaluation
from .maps import LayerMap
from .survey import Survey
from .translator import CacheTranslator

_ABOUT_ARMS = {
    "native": "the target reads the context itself: the best there is",
    "none": "the target sees the continuation alone",
    "source": "the source answers itself, over its own cache",
    "translated": "the target goes on from the translated cache",
    "wrong_document": "control: translated from another document",
    "raw_copy": "the source's cache as it is, layers matched by relative depth",
}
_LABELS = {
    "k": "source heads or layers a target reads (k)",
    "alpha": "ridge alpha, keys and values",
    "candidates": "candidates of the forward selection",
    "tokens": "calibration tokens",
    "window": "calibration window",
    "windows": "calibration windows",
    "r2": "held-out R2, mean",
    "fit_seconds": "time of the fit, both models reading",
    "device": "fitted on",
    "native_layers": "target layers run natively",
}
_UNITS = {"fit_seconds": " s", "window": " tokens"}
_SHOWN_ELSEWHERE = ("evaluation", "frontier")


def html_report(survey: Survey) -> str:
    """Render a survey as a self-contained HTML page: no script, no network, light and dark."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": _percent, "number": _number}
    environment.globals["cell"] = _cell
    translator, evaluation = survey.translator, survey.evaluation
    return environment.get_template("report_page.html").render(
        title=f"{translator.source.name} → {translator.target.name}",
        verdict=verdict(survey),
        facts=_facts(survey),
        evaluation=evaluation,
        about=_ABOUT_ARMS,
        series=_series(survey),
        frontier=_frontier(translator.summary.get("frontier") or []),
        not_measured=survey.not_measured,
        r2=_heat_maps({f"R2 of {role}": r2.tolist() for role, r2 in translator.r2.items()}, "KV head"),
        attention=_attention(survey),
        wirings=[(role, *_wiring(translator, getattr(translator, role))) for role in ("keys", "values")],
        marker=lambda style: charts.marker(style, 10, 7),
    )


def verdict(survey: Survey) -> list[str]:
    """Say plainly what the translator is worth: the first sentence is the verdict, others follow where there is more to say."""
    evaluation, source, target = survey.evaluation, survey.translator.source.name, survey.translator.target.name
    native, none, translated = (evaluation[name] for name in ("native", "none", "translated"))
    if none.nll <= native.nll:
        return [
            f"Nothing can be said: on these documents the context is worth nothing to {target} "
            f"({native.nll:.3f} nats a token with it, {none.nll:.3f} without)."
        ]
    kept = f"{_percent(translated.context_recovered)} (95 % interval {_range(translated, 'context_recovered')})"
    text = f"{target} keeps {kept} of what the context is worth to it"
    if translated.gap_recovered is not None and translated.gap_recovered > 0:
        text += f", and {_percent(translated.gap_recovered)} ({_range(translated, 'gap_recovered')}) of its advantage over {source}"
    wrong = _arm(evaluation, "wrong_document")
    if wrong is not None:
        text += f"; translated from a wrong document it keeps {_percent(wrong.context_recovered)}"
    said = [text + "."]
    if evaluation.recompute_last:
        said.append(f"The last {evaluation.recompute_last} tokens of the context are left to the target.")
    if translated.gap_recovered is None:
        said.append(f"On these documents {source} alone does better than {target} does natively, so there is no advantage to keep.")
    elif translated.gap_recovered <= 0:
        said.append(
            f"None of its advantage over {source} survives: {source} alone predicts the continuation better "
            f"({evaluation['source'].nll:.3f} against {translated.nll:.3f} nats a token)."
        )
    best = max(survey.by_recompute_last, key=lambda found: found["translated"].context_recovered or 0, default=evaluation)
    kept_at_best = best["translated"].context_recovered or 0
    if kept_at_best > (translated.context_recovered or 0) + 0.005:
        said.append(f"Leaving the last {best.recompute_last} tokens of the context to it lifts that to {_percent(kept_at_best)}.")
    return said


def _facts(survey: Survey) -> list[tuple[str, list[tuple[str, str]]]]:
    """What was fitted on what, and where it was measured: (heading, rows of label and value)."""
    translator, evaluation = survey.translator, survey.evaluation
    models = []
    for side in ("source", "target"):
        identity = getattr(translator, side)
        geometry = identity.geometry
        shapes = sorted({(layer.num_key_value_heads, layer.head_dim) for layer in geometry.layers})
        heads = " and ".join(f"{count} KV head{'s' * (count > 1)} of {dim}" for count, dim in shapes)
        sliding = sum(layer.sliding_window is not None for layer in geometry.layers)
        windows = f", {sliding} of sliding-window attention" if sliding else ""
        models.append((side, f"{identity.name}: {geometry.model_type}, {len(geometry)} layers{windows}, {heads}"))
    models.append(("never translated", f"the first {translator.sink_tokens} tokens, which are the target's own"))
    if survey.size_mb is not None:
        models.append(("size", f"{survey.size_mb:.1f} MB"))
    fit = [
        (_LABELS.get(name, name.replace("_", " ")), _told(value) + _UNITS.get(name, ""))
        for name, value in translator.summary.items()
        if name not in _SHOWN_ELSEWHERE
    ]
    n = evaluation["native"].n
    handed = f"{n} of held-out documents: {evaluation.context_tokens} tokens of context, {evaluation.continuation_tokens} of continuation"
    left = str(evaluation.recompute_last or "none")
    return [
        ("Models", models),
        ("Fit", fit),
        ("Measured", [("windows", handed), ("last tokens left to the target", left), *survey.setting.items()]),
    ]


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_told(entry)}" for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(_told(entry) for entry in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _series(survey: Survey) -> list[dict[str, Any]]:
    """The two curves: against the last tokens left to the target, and against the length of the context."""
    lasts, lengths = survey.by_recompute_last, survey.by_context_tokens
    evenly = [at / max(1, len(lasts) - 1) for at in range(len(lasts))]
    octaves = [math.log2(found.context_tokens / lengths[0].context_tokens) for found in lengths]
    by_length = [octave / (octaves[-1] or 1) for octave in octaves]
    return [
        _curves("Last tokens left to the target", "last context tokens that the target reads itself", lasts, evenly, "recompute_last"),
        _curves("Length of the context", "context tokens (logarithmic)", lengths, by_length, "context_tokens"),
    ]


def _curves(title: str, x_title: str, found: Sequence[Evaluation], places: list[float], of: str) -> dict[str, Any]:
    arms = [(evaluation["translated"], _arm(evaluation, "wrong_document")) for evaluation in found]
    lines = [
        Curve("context recovered", 0, [_figure(translated, "context_recovered") for translated, _ in arms]),
        Curve("gap recovered", 1, [_figure(translated, "gap_recovered") for translated, _ in arms]),
        Curve("wrong document, context recovered", 2, [None if arm is None else _figure(arm, "context_recovered") for _, arm in arms]),
    ]
    labels = [f"{getattr(evaluation, of):,}" for evaluation in found]
    rows = [(label, translated.n, translated, wrong) for label, (translated, wrong) in zip(labels, arms, strict=True)]
    chart = charts.curves(places, list(zip(places, labels, strict=True)), x_title, lines)
    return {
        "title": title,
        "chart": chart,
        "lines": _shown(lines),
        "below": _below(lines),
        "rows": rows,
        "by_length": of == "context_tokens",
    }


def _frontier(points: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The points of cost and quality that the translator's summary holds, or None where it holds none."""
    if not points:
        return None
    points = sorted(points, key=lambda point: point["cost"])
    most = max(point["cost"] for point in points) or 1.0
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, math.inf) if most / step <= 6)
    ticks = [(at * step / most, f"{100 * at * step:.0f} %") for at in range(math.floor(most / step + 1e-9) + 1)]
    lines = [
        Curve(name.replace("_", " "), style, [None if (v := point.get(name)) is None else (v, v, v) for point in points])
        for style, name in enumerate(("context_recovered", "gap_recovered"))
    ]
    chart = charts.curves([point["cost"] / most for point in points], ticks, "cost, share of the target's prefill", lines)
    return {"chart": chart, "lines": _shown(lines), "below": _below(lines), "points": points}


def _shown(lines: Sequence[Curve]) -> list[Curve]:
    return [line for line in lines if any(point is not None for point in line.points)]


def _below(lines: Sequence[Curve]) -> list[str]:
    """Names of lines that have points below the axis."""
    return [line.name for line in lines if any(point is not None and point[0] < -1 for point in line.points)]


def _heat_maps(cells: dict[str, list[list[float]]], heads: str) -> dict[str, Any] | None:
    """Heat maps that share one scale, from a tenth below their least value (0 at least) to 1."""
    if not cells:
        return None
    least = min(value for layers in cells.values() for row in layers for value in row)
    low = min(0.9, max(0.0, math.floor(10 * least) / 10))
    maps = [
        {"title": name, "chart": charts.heat_map(layers, low, 1.0, heads), "cells": layers, "mean": torch.tensor(layers).mean().item()}
        for name, layers in cells.items()
    ]
    return {"low": low, "clipped": least < 0, "maps": maps}


def _attention(survey: Survey) -> dict[str, Any]:
    found = survey.attention
    if isinstance(found, str):
        return {"missing": found}
    cells = {
        "With the target's own queries": found.same_queries.tolist(),
        "As served": found.as_served.tolist(),
        "Control: from a wrong document, with the target's own queries": found.wrong_document.tolist(),
    }
    return {"missing": "", "n": found.n, "control": found.wrong_document.mean().item(), **(_heat_maps(cells, "query head") or {})}


def _wiring(translator: CacheTranslator, maps: Sequence[LayerMap | None]) -> tuple[Any, list[tuple[str, str]]]:
    """The chart of one role, and its rows in words."""
    wires: list[Wire] = []
    source_shape = [layer.num_key_value_heads for layer in translator.source.geometry.layers]
    groups = [1 if layer_map is None else len(layer_map.blocks) for layer_map in maps]
    for layer, layer_map in enumerate(maps):
        for head, blocks in enumerate(() if layer_map is None else layer_map.blocks):
            of_source = [(block.layer, block.head) for block in blocks if block.layer < len(source_shape)]  # native features lie behind
            wires.append(((layer, head), of_source))
    rows = [
        (f"layer {layer}" + (f", head {head}" if groups[layer] > 1 else ""), ", ".join(f"{s}.{h}" for s, h in read))
        for (layer, head), read in wires
    ]
    return charts.wiring(wires, source_shape, groups), rows


def _arm(evaluation: Evaluation, name: str) -> Arm | None:
    return next((arm for arm in evaluation.arms if arm.arm == name), None)


def _figure(arm: Arm, metric: str) -> Figure | None:
    value, low, high = (getattr(arm, metric + end) for end in ("", "_low", "_high"))
    return None if value is None else (value, low, high)


def _range(arm: Arm, metric: str) -> str:
    return f"{_signed(100 * getattr(arm, metric + '_low'), 0)} to {_signed(100 * getattr(arm, metric + '_high'), 0)} %"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{_signed(100 * value, 0)} %"


def _number(value: float | None) -> str:
    return "–" if value is None else _signed(value, 3)


def _cell(arm: Arm | None, metric: str, as_percent: bool = False) -> tuple[str, str]:
    """A figure and its interval as a table shows them; no interval where it has no width."""
    figure = None if arm is None else _figure(arm, metric)
    if figure is None:
        return "–", ""
    value, low, high = (_signed(100 * v, 1) if as_percent else _signed(v, 3) for v in figure)
    return f"{value} %" if as_percent else value, "" if low == high else f"{low} to {high}"


def _signed(value: float, digits: int) -> str:
    """A rounded number with a true minus sign, and none before a zero."""
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")
