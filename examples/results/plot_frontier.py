"""Draw frontier.csv and supports.csv: what a hand-off keeps of the context against what it costs.

pip install matplotlib
python examples/results/plot_frontier.py --out examples/results/frontier.svg
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent
OTHER = ("nonlinear_features", "other_role", "match_variance", "attention_weights", "experts")
SERIES = (  # label, colour, marker, which rows
    ("closed form", "#5b6770", "o", lambda row: row["refined"] == "0" and row["source_features"] == "0"),
    ("closed form, source features", "#1b7f79", "s", lambda row: row["refined"] == "0" and row["source_features"] != "0"),
    ("refined", "#c2410c", "D", lambda row: row["refined"] == "1"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, nargs="+", default=[RESULTS / "frontier.csv", RESULTS / "supports.csv"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    draw(read(args.csv)).savefig(args.out, metadata={"Date": None})


def read(paths: Iterable[Path]) -> list[dict[str, str]]:
    """All rows that plain affine maps of one set serve: no hidden units, no scaled or weighted fit."""
    rows = []
    for path in paths:
        with path.open(encoding="utf-8") as file:
            rows += [row for row in csv.DictReader(file) if not any(int(row[name] or 0) for name in OTHER)]
    return rows


def draw(rows: list[dict[str, str]]) -> plt.Figure:
    """One panel a direction; filled marks: nothing left to the target at the end, hollow ones: the last 16 tokens."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "frontier", "font.size": 10, "font.family": "sans-serif"})
    pairs = sorted({(row["source"], row["target"]) for row in rows})
    figure, panels = plt.subplots(1, len(pairs), figsize=(5.2 * len(pairs), 3.9), sharey=True, squeeze=False, layout="constrained")
    for panel, pair in zip(panels[0], pairs, strict=True):
        of_pair = [row for row in rows if (row["source"], row["target"]) == pair]
        for label, colour, marker, belongs in SERIES:
            chosen = sorted((row for row in of_pair if belongs(row)), key=lambda row: float(row["cost"]))
            for tail in sorted({row["recompute_last"] for row in chosen}, key=int):
                points = [row for row in chosen if row["recompute_last"] == tail]
                cost, kept, low, high = (
                    [float(row[f"context_recovered{end}"]) if end != "cost" else 100 * float(row["cost"]) for row in points]
                    for end in ("cost", "", "_low", "_high")
                )
                errors = [[k - b for k, b in zip(kept, low, strict=True)], [a - k for k, a in zip(kept, high, strict=True)]]
                name = label if tail == "0" else f"{label}, last {tail} tokens recomputed"
                fill = colour if tail == "0" else "white"
                line = "-" if len(points) > 1 and tail == "0" else "none"
                style = {"color": colour, "marker": marker, "markerfacecolor": fill, "linestyle": line, "linewidth": 1, "capsize": 2}
                panel.errorbar(cost, kept, errors, label=name, **style)
        panel.axhline(1, color="#9aa5ad", linewidth=0.8, zorder=0)
        panel.set_title(" to ".join(name.split("-")[-2].upper() for name in pair))
        panel.set_xlabel("cost, % of the target's prefill (arithmetic)")
        panel.set_xlim(0, 52)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("context recovered")
    panels[0][0].legend(frameon=False, fontsize=8.5, loc="lower right")
    return figure


if __name__ == "__main__":
    main()
