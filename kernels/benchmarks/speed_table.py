"""Print the speed tables of the README from the committed results.

python kernels/benchmarks/speed_table.py
"""

from __future__ import annotations

import csv
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
TERAFLOPS = 2 * 8192**3 / 1e9  # of the product in the ceiling's row, over milliseconds


def main() -> None:
    print(pairs_table(), cache_table(), sep="\n\n")


def pairs_table(path: Path = RESULTS / "translate.csv") -> str:
    """Every pair at batch 1 and k = 4: prefill, translation, how many times faster, share of the copy bandwidth."""
    rows = [row for row in csv.DictReader(path.open()) if row["provider"] == "triton" and row["support"] == "head"]
    lines = [
        "| source -> target | context | prefill of the target | translation | times faster | of the copy bandwidth |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: int(r["tokens"])):
        if (row["k"], row["batch"]) == ("4", "1") and row["tokens"] in ("1024", "4096", "16384"):
            milliseconds = f"{float(row['ms_p50']):.2f} ms"
            lines.append(
                f"| {row['source']} -> {row['target']} | {int(row['tokens']):,} | {float(row['prefill_ms']):,.0f} ms | {milliseconds} | "
                f"{float(row['times_faster_than_prefill']):.0f}x | {float(row['percent_of_copy']):.0f} % |"
            )
    order = list(dict.fromkeys((row["source"], row["target"]) for row in rows))
    body = sorted(lines[2:], key=lambda line: [f"{a} -> {b}" for a, b in order].index(line.split("|")[1].strip()))
    return "\n".join(lines[:2] + body)


def cache_table(path: Path = RESULTS / "translate.csv") -> str:
    """A switch through `TranslatedCache`, all Python included."""
    rows = [row for row in csv.DictReader(path.open()) if row["case"] == "TranslatedCache"]
    lines = ["| through `TranslatedCache`, 1,024 tokens | 20th percentile | median | 80th |", "|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row['provider']} | " + " | ".join(f"{float(row[f'ms_{p}']):.2f} ms" for p in ("p20", "p50", "p80")) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
