"""The demo: two small trained models, one conversation, offline in under two minutes on two cores."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from .cache import TranslatedCache
from .calibration import Calibration
from .compat import cache_argument, prefill
from .errors import CalibrationError
from .evaluation import evaluate_translator
from .fitting import fit_translator
from .report import results_table
from .texts import read_documents, token_windows

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_SOURCE, _TARGET = "qwen3-small", "qwen3-large"
_CONTEXT, _NEW_TOKENS = 384, 48


@dataclass(frozen=True)
class _Continuation:
    name: str
    text: str
    first_token_ms: float


def run(examples: Path = EXAMPLES) -> None:
    """Fit a translator between the pocket models, hand a context over, and print what each way of continuing gives."""
    texts = examples / "text" / "documents.jsonl.xz"
    if not texts.exists():
        raise CalibrationError(f"{texts} does not exist: run the demo in a clone of the repository, or pass --examples.")
    disable_progress_bar()
    source, target = (_load(examples / "models" / name) for name in (_SOURCE, _TARGET))
    tokenizer = AutoTokenizer.from_pretrained(examples / "models" / _TARGET)

    print(f"1. Fit {_SOURCE} -> {_TARGET} on {texts.name}", flush=True)
    calibration = Calibration(source, target, tokenizer, texts, tokens=150_000, window=512)
    translator = fit_translator(calibration, k=8)
    r2 = translator.summary["r2"]
    print(f"   {translator.summary['fit_seconds']} s, held-out R2: keys {r2['keys']:.3f}, values {r2['values']:.3f}\n")

    print("2. Continue a document that the fit has not seen, three ways", flush=True)
    window = token_windows(read_documents(texts), tokenizer, split="test", length=_CONTEXT + _NEW_TOKENS, count=1, seed=7)
    prompt = window[:, :_CONTEXT]
    source_cache, _ = prefill(source, prompt)
    cache = TranslatedCache(source_cache, translator, target_model=target, input_ids=prompt, recompute_last=16)
    ways = [
        _generate("native: the target reads the context", target, tokenizer, prompt),
        _generate("no context: it sees the last 16 tokens", target, tokenizer, prompt[:, -16:]),
        _generate("translated: the source has read it", target, tokenizer, prompt, cache),
    ]
    print(f"   ... {_line(str(tokenizer.decode(prompt[0, -48:])))}\n")
    for way in ways:
        print(f"   [{way.name}; first token after {way.first_token_ms:.0f} ms]\n   {_line(way.text)}\n")

    print("3. The same over held-out documents", flush=True)
    evaluation = evaluate_translator(translator, source, target, tokenizer, texts, windows=48, recompute_last=16, batch_size=8)
    print(results_table(evaluation))
    translated, control = evaluation["translated"], evaluation["wrong_document"]
    print(
        f"\nThe translated context keeps {100 * (translated.context_recovered or 0):.0f} % of what reading the context gives the target; "
        f"another document's context keeps {100 * (control.context_recovered or 0):.0f} %."
    )


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _generate(
    name: str,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: torch.Tensor,
    cache: TranslatedCache | None = None,
) -> _Continuation:
    given = {} if cache is None else cache_argument(cache)
    mask = torch.ones_like(prompt)
    settings = {"attention_mask": mask, "do_sample": False, "pad_token_id": tokenizer.pad_token_id, **given}
    started = time.perf_counter()
    first = model.generate(prompt, max_new_tokens=1, **settings)
    first_token_ms = 1000 * (time.perf_counter() - started)
    settings["attention_mask"] = torch.ones_like(first)
    output = model.generate(first, max_new_tokens=_NEW_TOKENS - 1, **settings)
    return _Continuation(name, str(tokenizer.decode(output[0, prompt.shape[1] :])), first_token_ms)


def _line(text: str) -> str:
    return " ".join(text.split())
