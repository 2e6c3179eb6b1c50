"""Charts as inline SVG: heat maps, which heads read which, and curves with intervals. Pure functions of numbers.

Colours are classes, which the page defines for light and dark; every mark has a `<title>` with its exact value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

Figure = tuple[float, float, float]  # a figure and the ends of its interval
Wire = tuple[tuple[int, int], list[tuple[int, int]]]  # a target head, and the source heads that it reads: (layer, head) each
_MARGIN_LEFT, _MARGIN_BOTTOM = 64, 40
_DARK_FROM = 0.62  # share of the heat colour from which a cell is too dark for the ink of the page
_MOST_PRINTED = 40  # columns up to which the cells have room for their value


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    name: for the legend. style: number of the colour, dash and marker. points: one for each place on the x axis, None where there is none.
    """

    name: str
    style: int
    points: Sequence[Figure | None]


def heat_map(cells: Sequence[Sequence[float]], low: float, high: float, heads: str) -> Markup:
    """Draw values of layers (columns) and heads (rows), and their mean over heads in a row of its own.

    Args:
        cells: `[layers][heads]`.
        low, high: values that get none and all of the colour; what lies beyond gets the same.
        heads: what a row is, "KV head" say.
    """
    layers, rows = len(cells), len(cells[0])
    printed = layers <= _MOST_PRINTED
    width, height = (30, 20) if printed else (15, 14)
    parts: list[Markup] = []

    def cell(layer: int, top: int, value: float, name: str) -> None:
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        x = _MARGIN_LEFT + layer * width
        parts.append(
            Markup('<g><title>{}: {:.3f}</title><rect class="heat" x="{}" y="{}" width="{}" height="{}" fill-opacity="{:.3f}"/>').format(
                name, value, x, top, width - 1, height - 1, share
            )
        )
        if printed:
            ink = "on-dark" if share >= _DARK_FROM else "ink"
            shown = f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.1f}"
            parts.append(_text(x + (width - 1) / 2, top + height / 2 + 4, shown, f"cell {ink}"))
        parts.append(Markup("</g>"))

    for head in range(rows):
        parts.append(_text(_MARGIN_LEFT - 6, head * height + height / 2 + 4, f"head {head}", "end"))
        for layer in range(layers):
            cell(layer, head * height, cells[layer][head], f"layer {layer}, {heads} {head}")
    mean_top = rows * height + 6
    parts.append(_text(_MARGIN_LEFT - 6, mean_top + height / 2 + 4, "mean", "end"))
    for layer in range(layers):
        cell(layer, mean_top, sum(cells[layer]) / rows, f"layer {layer}, mean over heads")
    bottom = mean_top + height
    for layer in range(0, layers, 1 if printed else 4):
        parts.append(_text(_MARGIN_LEFT + layer * width + (width - 1) / 2, bottom + 13, str(layer), "middle"))
    parts.append(_text(_MARGIN_LEFT + layers * width / 2, bottom + 31, "target layer", "middle"))
    return _svg(_MARGIN_LEFT + layers * width + 4, bottom + _MARGIN_BOTTOM, parts)


def wiring(wires: Sequence[Wire], source_shape: Sequence[int], target_shape: Sequence[int]) -> Markup:
    """Draw which source heads (columns) each target head (row) reads, layer by layer; a line marks equal relative depth.

    Args:
        wires: of every target head, or of every target layer where its heads read the same.
        source_shape, target_shape: heads of each layer; of the target 1 where its heads read the same.
    """
    columns, rows = sum(source_shape), sum(target_shape)
    size = min(20.0, max(3.0, 440 / columns))
    source_start, target_start = _starts(source_shape), _starts(target_shape)
    left, top = 46, 4
    right, bottom = left + columns * size, top + rows * size
    parts: list[Markup] = []
    for layer in range(0, len(source_shape), 2):
        x, width = left + source_start[layer] * size, source_shape[layer] * size
        parts.append(Markup('<rect class="band" x="{:.1f}" y="{}" width="{:.1f}" height="{:.1f}"/>').format(x, top, width, bottom - top))
    for layer in range(len(target_shape) + 1):
        y = top + (target_start[layer] if layer < len(target_shape) else rows) * size
        parts.append(Markup('<line class="grid" x1="{}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(left, y, right, y))
    for (layer, head), read in wires:
        name = f"target layer {layer}" + (f", head {head}" if target_shape[layer] > 1 else "")
        heads = ", ".join(f"{source}.{source_head}" for source, source_head in read)
        y = top + (target_start[layer] + head) * size
        path = "".join(
            f"M{left + (source_start[source] + source_head) * size:.1f} {y:.1f}h{size - 0.5:.1f}v{size - 0.5:.1f}h{0.5 - size:.1f}z"
            for source, source_head in read
        )
        parts.append(
            Markup('<path class="mark" d="{}"><title>{} reads source heads {} (layer.head)</title></path>').format(path, name, heads)
        )
    parts.append(Markup('<line class="depth" x1="{}" y1="{}" x2="{:.1f}" y2="{:.1f}"/>').format(left, top, right, bottom))
    for layer in _ticks(source_shape, size, 18):
        parts.append(_text(left + (source_start[layer] + source_shape[layer] / 2) * size, bottom + 14, str(layer), "middle"))
    for layer in _ticks(target_shape, size, 13):
        parts.append(_text(left - 6, top + (target_start[layer] + target_shape[layer] / 2) * size + 4, str(layer), "end"))
    parts.append(_text((left + right) / 2, bottom + 32, "source layer, a column a head", "middle"))
    parts.append(Markup('<text class="middle" transform="translate(11 {:.1f}) rotate(-90)">target layer</text>').format((top + bottom) / 2))
    return _svg(right + 4, bottom + _MARGIN_BOTTOM, parts)


def curves(places: Sequence[float], ticks: Sequence[tuple[float, str]], x_title: str, lines: Sequence[Curve]) -> Markup:
    """Draw recovered shares with their intervals; the axis runs from what is needed, at least 0 and at most -1, to 1.

    Args:
        places: where the points of each line stand, 0 (left) to 1, in rising order.
        ticks: where which label stands, likewise.
    """
    width, height, left, top, bottom = 440, 280, 58, 12, 232
    known = [point for line in lines for point in line.points if point is not None]
    low = max(-1.0, min([0.0, *(math.floor(4 * min(point)) / 4 for point in known)]))
    high = max([1.0, *(math.ceil(4 * point[0]) / 4 for point in known)])
    parts: list[Markup] = []

    def x(place: float) -> float:
        return left + 22 + place * (width - left - 44)

    def y(value: float) -> float:
        return bottom - (min(max(value, low), high) - low) / (high - low) * (bottom - top)

    for step in range(round(4 * low), round(4 * high) + 1):
        value, line = step / 4, "axis" if step in (0, 4) else "grid"
        parts.append(Markup('<line class="{}" x1="{}" y1="{:.1f}" x2="{}" y2="{:.1f}"/>').format(line, left, y(value), width, y(value)))
        parts.append(_text(left - 6, y(value) + 4, f"{100 * value:.0f} %".replace("-", "−"), "end"))
    for place, label in ticks:
        parts.append(_text(x(place), bottom + 17, label, "middle"))
    parts.append(_text((left + width) / 2, bottom + 38, x_title, "middle"))
    for line in lines:
        parts.append(Markup('<g class="series s{}">').format(line.style))
        drawn = [
            (x(place), point) if point is not None and point[0] >= low else None for place, point in zip(places, line.points, strict=True)
        ]
        for before, after in pairwise(drawn):  # nothing is drawn across a point that is not
            if before is not None and after is not None:
                ends = before[0], y(before[1][0]), after[0], y(after[1][0])
                parts.append(Markup('<line class="joint" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(*ends))
        for at, (value, below, above) in filter(None, drawn):
            told = f"{line.name}: {100 * value:.1f} %" + ("" if below == above else f" ({100 * below:.1f} to {100 * above:.1f} %)")
            parts.append(
                Markup('<g><title>{}</title><line class="whisker" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>{}</g>').format(
                    told, at, y(below), at, y(above), marker(line.style, at, y(value))
                )
            )
        parts.append(Markup("</g>"))
    return _svg(width + 4, height, parts)


def marker(style: int, x: float, y: float) -> Markup:
    """Draw the mark of a series: a circle, a square or a diamond, so that colour is not needed to tell them apart."""
    if style == 0:
        return Markup('<circle cx="{:.1f}" cy="{:.1f}" r="4.5"/>').format(x, y)
    if style == 1:
        return Markup('<rect x="{:.1f}" y="{:.1f}" width="8" height="8"/>').format(x - 4, y - 4)
    return Markup('<path d="M{:.1f} {:.1f}l5 5l-5 5l-5-5z"/>').format(x, y - 5)


def _starts(shape: Sequence[int]) -> list[int]:
    return [sum(shape[:layer]) for layer in range(len(shape))]


def _ticks(shape: Sequence[int], size: float, room: float) -> range:
    """The layers that have room for a label."""
    return range(0, len(shape), math.ceil(room / (size * sum(shape) / len(shape))))


def _text(x: float, y: float, text: str, style: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}">{}</text>').format(x, y, style, text)


def _svg(width: float, height: float, parts: Sequence[Markup]) -> Markup:
    frame = Markup('<svg width="{0:.0f}" height="{1:.0f}" viewBox="0 0 {0:.0f} {1:.0f}" role="img">').format(width, height)
    return frame + Markup("").join(parts) + Markup("</svg>")
