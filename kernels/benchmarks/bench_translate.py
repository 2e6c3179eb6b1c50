"""Time `translate_kv` on the shapes of published pairs, as rows of `results/translate.csv`.

    python kernels/benchmarks/bench_translate.py [--quick] [--commit COMMIT]

Every row follows its own correctness check against a float64 oracle. `prefill_ms` is one decoder layer of the target with random weights,
times its layers. Source heads are drawn at random from all layers: the worst case for the L2 cache. The rows of case "ceiling" are the copy
that `percent_of_copy` compares with, and a bfloat16 product of two 8,192 x 8,192 matrices.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_cache import cache_rows
from harness import PAIRS, RESULTS, side

from hf_crosscache.benchmark import Row, append, copy_bandwidth, measure, percentiles, table, versions

LARGEST_BYTES = 60e9  # of one problem's source and target caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=RESULTS / "translate.csv")
    parser.add_argument("--quick", action="store_true", help="the first pair at three lengths only")
    parser.add_argument("--seconds", type=float, default=400, help="start no further problem after so long")
    parser.add_argument("--commit", default="", help="what the rows say of the code that ran")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    append(args.csv, shown(rows(device, args.quick, time.monotonic() + args.seconds, args.commit)))


def rows(device: torch.device, quick: bool, deadline: float, commit: str) -> Iterator[Row]:
    copy = copy_bandwidth(device)
    yield from ceilings(device, copy, commit)
    pause = 0.5 if device.type == "cuda" else 0.0
    yield from cache_rows(device, commit)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for number, (source_name, target_name) in enumerate(PAIRS[:1] if quick else PAIRS):
        source, target = side(source_name, device, timed=False), side(target_name, device, timed=True)
        for support, k, batch, tokens, providers in problems(first=number == 0, quick=quick):
            cache_bytes = sum(4 * batch * tokens * one.geometry.num_heads * one.geometry.layers[0].head_dim for one in (source, target))
            if cache_bytes > LARGEST_BYTES or time.monotonic() > deadline:
                print(f"left out: {source_name} -> {target_name}, {support}, k = {k}, batch {batch}, {tokens} tokens")
                continue
            time.sleep(pause)  # a switch comes out of the blue: the card has cooled since the last one
            yield from measure(
                source, target, support=support, k=k, batch=batch, tokens=tokens, device=device, copy_gb_per_s=copy,
                providers=providers, milliseconds=40, commit=commit,
            )  # fmt: skip
            torch.cuda.empty_cache()


def problems(*, first: bool, quick: bool) -> Iterator[tuple[str, int, int, int, tuple[str, ...]]]:
    """Yield (support, k, batch, tokens, providers); what stands beside the kernel is timed on the first pair."""
    for tokens in (1024, 4096, 16384):
        yield "head", 4, 1, tokens, ("triton", "reference") if first else ("triton",)
    if first:
        yield "full", 4, 1, 4096, ("triton", "reference")
    if quick:
        return
    for k in (1, 4, 8):
        for batch, lengths in ((1, (128, 1024, 4096, 16384, 65536)), (8, (128, 1024, 4096))):
            for tokens in lengths if first else lengths[::2]:
                if (k, batch) != (4, 1) or tokens in (128, 65536):
                    yield "head", k, batch, tokens, ("triton",)
    if first:
        yield "head", 4, 1, 4096, ("torch.compile",)


def ceilings(device: torch.device, copy: float, commit: str) -> Iterator[Row]:
    """Yield what the card itself can do."""
    a, b = (torch.randn(8192, 8192, device=device).to(torch.bfloat16) for _ in range(2))
    p20, p50, p80 = percentiles(lambda: a @ b, device)
    blank = ("", "", "", 0, 1)
    yield Row("ceiling", *blank, 8192, "bfloat16", "matmul", p20, p50, p80, None, None, None, None, None, *versions(device), commit)
    copied = 2 * (1 << 31) / copy / 1e6
    yield Row(
        "ceiling", *blank, 1 << 30, "bfloat16", "copy", copied, copied, copied, copy, 100, None, None, None, *versions(device), commit
    )


def shown(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        print(f"{row.case:<14}{row.source:>14} -> {row.target:<13}{row.support:<5}" + table([row]).splitlines()[1], flush=True)
        yield row


if __name__ == "__main__":
    main()
