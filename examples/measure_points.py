"""Fit translators in several ways and write what each keeps, costs and takes to serve: the rows of results/frontier.csv and supports.csv.

    python examples/measure_points.py SOURCE TARGET --texts texts.jsonl.xz --csv frontier.csv \\
        --point '{}' --point '{"native_layers": 2, "native_features": 512}' --recompute-last 0 16

A point is a JSON object: native_layers and fit_tokens of the calibration and whatever `fit_translator` takes, or "saved": the folder of
a translator to measure as it is. Every row holds the wrong-document control beside the figure, the cost as a share of the arithmetic of
the target's prefill, and the time to translate a context, median of several, the target's first tokens and first layers included.
Documents of the "test" split are measured on, which no fit sees.
"""

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_crosscache import CacheTranslator, Calibration, TranslatedCache, evaluate_translator, fit_translator
from hf_crosscache.arithmetic import hand_off_cost
from hf_crosscache.artefact import size_mb
from hf_crosscache.compat import prefill
from hf_crosscache.texts import read_documents, token_windows

SETTINGS = (
    "support", "k", "native_layers", "native_features", "source_features", "nonlinear_features", "other_role", "experts",
    "match_variance", "attention_weights",
)  # fmt: skip
TIMED = 4096  # tokens of the context whose translation is timed; fewer where no document is that long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--point", type=json.loads, action="append", required=True, help="JSON object, see above")
    parser.add_argument("--recompute-last", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--context-tokens", type=int, default=384)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True, help="folder for the translators that are fitted")
    parser.add_argument("--commit", default="", help="what the rows say of the code that ran")
    args = parser.parse_args()

    place = {"dtype": torch.bfloat16, "device_map": "cuda"} if torch.cuda.is_available() else {"dtype": torch.float32}
    source, target = (AutoModelForCausalLM.from_pretrained(name, **place).eval() for name in (args.source, args.target))
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    documents = list(read_documents(args.texts))
    for number, point in enumerate(args.point):
        translator, folder = translator_of(point, source, target, tokenizer, documents, args.out / f"point-{number}")
        for tail in args.recompute_last:
            row = measure(translator, source, target, tokenizer, documents, args, tail)
            append(args.csv, {**row, "artefact_mb": round(size_mb(folder), 1), **versions(), "commit": args.commit})


def translator_of(point: dict[str, Any], source, target, tokenizer, documents: list, folder: Path) -> tuple[CacheTranslator, Path]:
    """Fit the translator of a point, and take it back as saved; or load it."""
    if "saved" in point:
        folder = Path(point["saved"])
    else:
        settings = dict(point)
        tokens, native = settings.pop("fit_tokens", 300_000), settings.pop("native_layers", 0)
        calibration = Calibration(source, target, tokenizer, documents, tokens=tokens, native_layers=native)
        fit_translator(calibration, **settings).save_pretrained(folder)
    return CacheTranslator.from_pretrained(folder, source_model=source, target_model=target, tokenizer=tokenizer), folder


def measure(translator: CacheTranslator, source, target, tokenizer, documents: list, args: argparse.Namespace, tail: int) -> dict[str, Any]:
    """One row: what a translator keeps with the last tokens left to the target, the control, its cost and its time."""
    evaluation = evaluate_translator(
        translator, source, target, tokenizer, documents,
        windows=args.windows, context_tokens=args.context_tokens, recompute_last=tail, batch_size=args.batch_size,
    )  # fmt: skip
    arm, wrong = evaluation["translated"], evaluation["wrong_document"]
    cost = hand_off_cost(translator, target, context_tokens=args.context_tokens, recompute_last=tail)
    summary = translator.summary
    row = {
        "source": Path(translator.source.name).name,
        "target": Path(translator.target.name).name,
        **{name: summary.get(name, 0) for name in SETTINGS},
        "refined": int("refined" in summary),
        "recompute_last": tail,
        "context_tokens": args.context_tokens,
        "n": arm.n,
        "cost": cost.total,
        "cost_native": cost.native,
        "cost_maps": cost.maps,
        "cost_tail": cost.tail,
        "context_recovered": arm.context_recovered,
        "context_recovered_low": arm.context_recovered_low,
        "context_recovered_high": arm.context_recovered_high,
        "gap_recovered": arm.gap_recovered,
        "kl": arm.kl,
        "top1": arm.top1,
        "wrong_document": wrong.context_recovered,
        "fit_seconds": summary["fit_seconds"],
        **timed(translator, source, target, tokenizer, documents),
    }
    row = {name: int(value) if isinstance(value, bool) else value for name, value in row.items()}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def timed(translator: CacheTranslator, source, target, tokenizer, documents: list, repeats: int = 10) -> dict[str, Any]:
    """Median milliseconds of translating one held-out context, and of the target's prefill of it."""
    length = TIMED
    while not any(len(document.text) > 6 * length and document.split == "test" for document in documents):
        length //= 2
    ids = token_windows(documents, tokenizer, split="test", length=length, count=1).to(target.device)
    pairs, translator = prefill(source, ids.to(source.device))[0], translator.to(source.device)
    runs = {
        "prefill_ms": lambda: prefill(target, ids),
        "translate_ms": lambda: TranslatedCache(pairs, translator, target_model=target, input_ids=ids).translate(),
    }
    return {"timed_tokens": length, **{name: median_ms(run, repeats) for name, run in runs.items()}}


def median_ms(run, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times[2:])[repeats // 2]


def versions() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a CSV file, with its heading where the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
