"""Fit a translator between two models, evaluate it on documents that the fit has not seen, and save it.

    python examples/fit_translator.py SOURCE TARGET --texts my_texts.jsonl --out my_translator

SOURCE and TARGET are Hub names or folders of two models that share a tokenizer; by default the pocket models beside this file.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_crosscache import CacheTranslator, Calibration, evaluate_translator, fit_translator
from hf_crosscache.report import results_table

HERE = Path(__file__).parent
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="?", default=str(HERE / "models/qwen3-small"))
parser.add_argument("target", nargs="?", default=str(HERE / "models/qwen3-large"))
parser.add_argument("--texts", type=Path, nargs="+", default=[HERE / "text/documents.jsonl.xz"])
parser.add_argument("--out", type=Path, default=Path("translator"))
parser.add_argument("--tokens", type=int, default=100_000)
parser.add_argument("--windows", type=int, default=32, help="held-out windows of the evaluation")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
source, target = (AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device).eval() for name in (args.source, args.target))
tokenizer = AutoTokenizer.from_pretrained(args.target)

calibration = Calibration(source, target, tokenizer, args.texts, tokens=args.tokens, window=256)
translator = fit_translator(calibration, support="head", k=6)
evaluation = evaluate_translator(
    translator, source, target, tokenizer, args.texts, windows=args.windows, context_tokens=192, continuation_tokens=64
)
print(results_table(evaluation))

translator.with_summary({"evaluation": evaluation.to_dict()}).save_pretrained(args.out)
again = CacheTranslator.from_pretrained(args.out, source_model=source, target_model=target, tokenizer=tokenizer)
print(f"saved to {args.out}: {len(again.keys)} layers, context recovered {evaluation['translated'].context_recovered:.2f}")
