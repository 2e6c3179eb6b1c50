"""The `hf-crosscache` command: arguments in, library calls, results out."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import artefact, benchmark, demo, ops, report, task_report
from .cache import TranslatedCache
from .calibration import Calibration
from .cli_arguments import parser_of
from .compat import cache_argument, prefill
from .errors import CrossCacheError
from .evaluation import evaluate_translator
from .fitting import fit_translator
from .geometry import CacheGeometry
from .html_report import html_report, verdict
from .refinement import Refinement, refine_translator
from .retokenizing import Retokenizer
from .survey import survey_translator
from .task_evaluation import evaluate_tasks
from .translator import CacheTranslator
from .tuning import tune_translator


def main(argv: list[str] | None = None) -> int:
    """Run one command; errors of the library, and missing models, end it with their message and status 2."""
    args = parser_of(COMMANDS).parse_args(argv)
    try:
        args.run(args)
    except (CrossCacheError, OSError) as error:
        print(f"hf-crosscache: {error}", file=sys.stderr)
        return 2
    return 0


def _fit(args: argparse.Namespace) -> None:
    source, target = _model(args.source, args), _model(args.target, args)
    calibration = Calibration(
        source,
        target,
        _tokenizer(args.target),
        args.texts,
        source_tokenizer=_tokenizer(args.source),
        tokens=args.tokens,
        window=args.window,
        batch_size=args.batch_size,
        sink_tokens=args.sink_tokens,
        native_layers=args.native_layers,
    )
    k = {"head": 8, "full": len(calibration.source.geometry)}[args.support] if args.k is None else args.k
    translator = fit_translator(
        calibration,
        support=args.support,
        k=k,
        candidates=args.candidates,
        native_features=args.native_features,
        source_features=args.source_features,
        nonlinear_features=args.nonlinear_features,
        other_role=args.other_role,
        match_variance=args.match_variance,
        attention_weights=args.attention_weights,
        experts=args.experts,
    )
    translator.save_pretrained(args.out, dtype=getattr(torch, args.save_dtype))
    _print_info(args.out)


def _refine(args: argparse.Namespace) -> None:
    translator, source, target, tokenizer = _load(args)
    calibration = Calibration(
        source,
        target,
        tokenizer,
        args.texts,
        source_tokenizer=_source_tokenizer(args, translator),
        tokens=args.tokens,
        window=args.window,
        sink_tokens=translator.sink_tokens,
        native_layers=translator.native_layers,
    )
    out = args.out or args.translator
    refined = refine_translator(translator, calibration, _refinement(args), folder=out)
    refined.save_pretrained(out)
    _print_info(out)


def _tune(args: argparse.Namespace) -> None:
    source, target, tokenizer = _model(args.source, args), _model(args.target, args), _tokenizer(args.target)
    chosen = tune_translator(
        source,
        target,
        tokenizer,
        args.texts,
        budget=args.budget,
        context_tokens=args.context_tokens,
        windows=args.windows,
        k=args.k,
        native_layers=args.native_layers,
        native_features=args.native_features,
        source_features=args.source_features,
        recompute_last=args.recompute_last,
        fit_tokens=args.fit_tokens,
        folder=args.out,
    )
    if args.refine:
        sizes = {"tokens": args.tokens, "window": args.window, "native_layers": chosen.native_layers, "sink_tokens": chosen.sink_tokens}
        calibration = Calibration(source, target, tokenizer, args.texts, **sizes)
        chosen = refine_translator(chosen, calibration, _refinement(args), folder=args.out)
    chosen.save_pretrained(args.out)
    for point in chosen.summary["frontier"]:
        print(f"{point['label']:<32} cost {point['cost']:.3f}  context recovered {point['context_recovered']:.3f}")
    print(f"kept: {chosen.summary['tuned']['label']}, recompute_last={chosen.summary['tuned']['recompute_last']}")
    _print_info(args.out)


def _refinement(args: argparse.Namespace) -> Refinement:
    settings = Refinement(
        steps=args.steps, batch_size=args.batch_size, minutes=args.minutes, attention_error=args.attention_error
    )  # fmt: skip
    return settings if args.learning_rate is None else replace(settings, learning_rates=tuple(args.learning_rate))


def _eval(args: argparse.Namespace) -> None:
    translator, source, target, tokenizer = _load(args)
    evaluation = evaluate_translator(
        translator,
        source,
        target,
        tokenizer,
        args.texts,
        source_tokenizer=_source_tokenizer(args, translator),
        windows=args.windows,
        context_tokens=args.context_tokens,
        continuation_tokens=args.continuation_tokens,
        recompute_last=args.recompute_last,
        batch_size=args.batch_size,
    )
    print(report.results_table(evaluation))
    _write_json(args.json, evaluation.to_dict())
    if args.csv:
        report.append_csv(args.csv, evaluation, translator, args.translator, target.device, args.commit)
    if args.record:
        artefact.record(args.translator, {"evaluation": evaluation.to_dict()})


def _tasks(args: argparse.Namespace) -> None:
    translator, source, target, tokenizer = _load(args)
    evaluation = evaluate_tasks(
        translator,
        source,
        target,
        tokenizer,
        args.texts,
        tasks=args.tasks,
        items=args.items,
        context_tokens=args.context_tokens,
        recompute_last=args.recompute_last,
        batch_size=args.batch_size,
    )
    print(task_report.tasks_table(evaluation))
    _write_json(args.json, evaluation.to_dict())
    if args.csv:
        task_report.append_csv(args.csv, evaluation, translator, target.device, args.commit)


def _report(args: argparse.Namespace) -> None:
    translator, source, target, tokenizer = _load(args)
    survey = survey_translator(
        translator,
        source,
        target,
        tokenizer,
        args.texts,
        windows=args.windows,
        context_tokens=args.context_tokens,
        continuation_tokens=args.continuation_tokens,
        recompute_last=args.recompute_last,
        lengths=args.lengths,
        batch_size=args.batch_size,
        size_mb=artefact.size_mb(args.translator),
    )
    page = args.translator / "report.html" if args.out is None else args.out
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(html_report(survey), encoding="utf-8")
    print(f"{' '.join(verdict(survey))}\n{page}")


def _generate(args: argparse.Namespace) -> None:
    translator, source, target, tokenizer = _load(args)
    prompt = args.prompt if args.prompt_file is None else args.prompt_file.read_text(encoding="utf-8")
    inputs = tokenizer(prompt, return_tensors="pt").to(target.device)
    own, source_ids, alignment = _source_tokenizer(args, translator), inputs.input_ids, None
    if own is not None:
        tokens = Retokenizer(tokenizer, own)(inputs.input_ids)
        source_ids, alignment = tokens.ids, tokens.alignment
    source_cache, _ = prefill(source, source_ids.to(source.device))
    given = {"target_model": target, "input_ids": inputs.input_ids, "alignment": alignment}
    cache = TranslatedCache(source_cache, translator, **given, recompute_last=min(args.recompute_last, inputs.input_ids.shape[1] - 1))
    output = target.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=args.sample, **cache_argument(cache))
    print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))


def _info(args: argparse.Namespace) -> None:
    _print_info(args.translator)


def _bench(args: argparse.Namespace) -> None:
    source, target = _model(args.source, args), _model(args.target, args)
    device, dtype = target.device, target.dtype

    def prefill_ms(batch: int, tokens: int) -> float:
        ids = torch.randint(2, target.config.get_text_config(decoder=True).vocab_size, (batch, tokens), device=device)
        return benchmark.percentiles(lambda: prefill(target, ids), device)[1]

    reads = benchmark.Side(args.source, CacheGeometry.from_model(source))
    goes_on = benchmark.Side(args.target, CacheGeometry.from_model(target), prefill_ms)
    copy = benchmark.copy_bandwidth(device)
    print(f"{args.source} -> {args.target}, {args.support} support, random maps, {dtype}; a large copy moves {copy:.0f} GB/s")
    rows, head = [], True
    for tokens in args.tokens:
        for row in benchmark.measure(
            reads, goes_on, k=args.k, batch=args.batch_size, tokens=tokens, device=device, copy_gb_per_s=copy, support=args.support,
            dtype=dtype, providers=dict.fromkeys((ops.backend_for(device), "reference")), commit=args.commit,
        ):  # fmt: skip
            print("\n".join(benchmark.table([row]).splitlines()[0 if head else 1 :]), flush=True)
            rows.append(row)
            head = False
    if args.csv:
        benchmark.append(args.csv, rows)


def _demo(args: argparse.Namespace) -> None:
    demo.run(args.examples)


def _write_json(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _print_info(folder: Path) -> None:
    translator = CacheTranslator.from_pretrained(folder)
    summary = translator.summary
    for side in (translator.source, translator.target):
        layer = side.geometry.layers[0]
        role = "source" if side is translator.source else "target"
        print(
            f"{role}: {side.name} ({side.geometry.model_type}, {len(side.geometry)} layers, "
            f"{layer.num_key_value_heads} heads of {layer.head_dim})"
        )
    native = f", first {translator.native_layers} layers" if translator.native_layers else ""
    experts = "" if translator.mixture is None else f", {translator.mixture.router.experts} experts"
    print(f"support {summary['support']}, k = {summary['k']}{experts}; first {translator.sink_tokens} tokens{native} native")
    print(f"fitted on {summary['tokens']:,} tokens of {summary['documents']} documents in {summary['fit_seconds']} s")
    print("held-out R2: " + ", ".join(f"{role} {r2.mean():.3f}" for role, r2 in translator.r2.items()))
    if "refined" in summary:
        refined, held_out = summary["refined"], summary["refined"]["held_out"]
        kept = " -> ".join(f"{held_out[when]['context_recovered']:.3f}" for when in ("before", "after"))
        print(f"refined in {refined['steps']} steps, {refined['seconds']} s: context recovered on validation windows {kept}")
    print(f"size: {artefact.size_mb(folder):.1f} MB")
    if translator.context_recovered is not None:
        print(f"context recovered on held-out documents: {translator.context_recovered:.3f}")


def _load(
    args: argparse.Namespace,
) -> tuple[CacheTranslator, PreTrainedModel, Any, PreTrainedTokenizerBase]:
    translator = CacheTranslator.from_pretrained(args.translator)
    target_name = args.target or translator.target.name
    source, target = _model(args.source or translator.source.name, args), _model(target_name, args)
    tokenizer = _tokenizer(target_name)
    own = _source_tokenizer(args, translator)
    translator.check(source_model=source, target_model=target, tokenizer=tokenizer, source_tokenizer=own)
    return translator.to(source.device), source, target, tokenizer


def _source_tokenizer(args: argparse.Namespace, translator: CacheTranslator) -> PreTrainedTokenizerBase | None:
    """The source's own tokenizer, where it has one."""
    return _tokenizer(args.source or translator.source.name) if translator.two_tokenizers else None


def _model(name: str, args: argparse.Namespace) -> PreTrainedModel:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = args.dtype or ("bfloat16" if device != "cpu" else "float32")
    return AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), device_map=device).eval()


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(name)


COMMANDS = {
    "fit": _fit,
    "refine": _refine,
    "tune": _tune,
    "eval": _eval,
    "tasks": _tasks,
    "report": _report,
    "generate": _generate,
    "info": _info,
    "bench": _bench,
    "demo": _demo,
}


if __name__ == "__main__":
    sys.exit(main())
