"""The `hf-crosscache` command: arguments in, library calls, results out."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import artefact, benchmark, demo, ops, report, task_report
from .cache import TranslatedCache
from .calibration import Calibration
from .compat import cache_argument, prefill
from .errors import CrossCacheError
from .evaluation import evaluate_translator
from .fitting import fit_translator
from .geometry import CacheGeometry
from .html_report import html_report, verdict
from .survey import CONTEXT_TOKENS, survey_translator
from .task_evaluation import evaluate_tasks
from .tasks import TASKS
from .translator import CacheTranslator


def main(argv: list[str] | None = None) -> int:
    """Run one command; errors of the library, and missing models, end it with their message and status 2."""
    args = _parser().parse_args(argv)
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
    )
    k = {"head": 8, "full": len(calibration.source.geometry)}[args.support] if args.k is None else args.k
    translator = fit_translator(calibration, support=args.support, k=k, candidates=args.candidates)
    translator.save_pretrained(args.out, dtype=getattr(torch, args.save_dtype))
    _print_info(args.out)


def _eval(args: argparse.Namespace) -> None:
    translator, source, target, tokenizer = _load(args)
    evaluation = evaluate_translator(
        translator,
        source,
        target,
        tokenizer,
        args.texts,
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
    source_cache, _ = prefill(source, inputs.input_ids.to(source.device))
    left = min(args.recompute_last, inputs.input_ids.shape[1] - 1)
    cache = TranslatedCache(source_cache, translator, target_model=target, input_ids=inputs.input_ids, recompute_last=left)
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
    print(f"support {summary['support']}, k = {summary['k']}; first {translator.sink_tokens} tokens native")
    print(f"fitted on {summary['tokens']:,} tokens of {summary['documents']} documents in {summary['fit_seconds']} s")
    print("held-out R2: " + ", ".join(f"{role} {r2.mean():.3f}" for role, r2 in translator.r2.items()))
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
    translator.check(source_model=source, target_model=target, tokenizer=tokenizer)
    return translator.to(source.device), source, target, tokenizer


def _model(name: str, args: argparse.Namespace) -> PreTrainedModel:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = args.dtype or ("bfloat16" if device != "cpu" else "float32")
    return AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), device_map=device).eval()


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-crosscache", description="Carry a KV cache from one language model to another.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        added.set_defaults(run=run)
        return added

    fit = command("fit", _fit, "Fit a translator between two models that share a tokenizer.")
    fit.add_argument("source", help="model that reads the context: a Hub name or a folder")
    fit.add_argument("target", help="model that goes on from it: a Hub name or a folder")
    _add_texts(fit)
    fit.add_argument("--out", type=Path, required=True, help="folder for the translator")
    fit.add_argument("--support", choices=["head", "full"], default="head")
    fit.add_argument("--k", type=int, help="source heads a target head reads, or layers; default 8 heads, or all layers")
    fit.add_argument("--candidates", type=int, help="blocks kept for forward selection; default 1.5 k")
    fit.add_argument("--tokens", type=int, default=760_000, help="calibration tokens")
    fit.add_argument("--window", type=int, default=512, help="tokens of one window")
    fit.add_argument("--batch-size", type=int, default=8, help="windows read at once")
    fit.add_argument("--sink-tokens", type=int, default=4, help="first positions that stay native")
    fit.add_argument("--save-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    _add_placement(fit)

    evaluate = command("eval", _eval, "Measure a translator on documents that its fit has not seen.")
    _add_translator(evaluate)
    _add_texts(evaluate)
    evaluate.add_argument("--windows", type=int, default=256)
    evaluate.add_argument("--context-tokens", type=int, default=384)
    evaluate.add_argument("--continuation-tokens", type=int, default=128)
    evaluate.add_argument("--batch-size", type=int, default=8)
    _add_results(evaluate)
    evaluate.add_argument("--record", action="store_true", help="also record the result in the translator's summary")

    tasks = command("tasks", _tasks, "Measure what a target can do with a translated context, on tasks made of held-out texts.")
    _add_translator(tasks)
    _add_texts(tasks)
    tasks.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    tasks.add_argument("--items", type=int, default=500, help="contexts of each task")
    tasks.add_argument("--context-tokens", type=int, default=384)
    tasks.add_argument("--batch-size", type=int, default=16, help="contexts at once")
    _add_results(tasks)

    told = command("report", _report, "Measure a translator from all sides and write one self-contained HTML page on it.")
    _add_translator(told)
    _add_texts(told)
    told.add_argument("--windows", type=int, default=128, help="windows of held-out documents, for each figure")
    told.add_argument("--context-tokens", type=int, default=384, help="of the main figures")
    told.add_argument("--lengths", type=int, nargs="+", default=CONTEXT_TOKENS, help="context lengths, as far as the documents reach")
    told.add_argument("--continuation-tokens", type=int, default=128)
    told.add_argument("--recompute-last", type=int, default=0, help="context tokens left to the target; others are measured too")
    told.add_argument("--batch-size", type=int, default=8)
    told.add_argument("--out", type=Path, help="the page; default report.html in the translator's folder")

    generate = command("generate", _generate, "Let the source read a prompt and the target answer it.")
    _add_translator(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the prompt itself")
    prompt.add_argument("--prompt-file", type=Path, help="a text file that holds it")
    generate.add_argument("--max-new-tokens", type=int, default=64)
    generate.add_argument("--sample", action="store_true", help="sample instead of greedy decoding")
    generate.add_argument("--recompute-last", type=int, default=16, help="prompt tokens left to the target")

    info = command("info", _info, "Say what a translator is: models, support, size, held-out figures.")
    info.add_argument("translator", type=Path, help="folder of the translator")

    bench = command("bench", _bench, "Time the translation between two models against the target's own prefill.")
    bench.add_argument("source", help="model that reads: a Hub name or a folder")
    bench.add_argument("target", help="model that goes on: a Hub name or a folder")
    bench.add_argument("--support", choices=["head", "full"], default="head")
    bench.add_argument("--k", type=int, default=4, help="source heads a target head reads, or layers")
    bench.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="lengths of the context")
    bench.add_argument("--batch-size", type=int, default=1)
    bench.add_argument("--csv", type=Path, help="also append a row a timing here")
    bench.add_argument("--commit", default="", help="what the rows say of the code that ran")
    _add_placement(bench)

    shown = command("demo", _demo, "Hand a context over between two small trained models, offline.")
    shown.add_argument("--examples", type=Path, default=demo.EXAMPLES, help="folder with models/ and text/ of the repository")
    return parser


def _add_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help=".txt, or .jsonl with a 'text' field; .gz and .xz too")


def _add_translator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("translator", type=Path, help="folder of the translator")
    parser.add_argument("--source", help="the source model, where it is not where it was at the fit")
    parser.add_argument("--target", help="the target model, likewise")
    _add_placement(parser)


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recompute-last", type=int, default=0, help="context tokens left to the target")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--csv", type=Path, help="also append a row an arm here")
    parser.add_argument("--commit", default="", help="what the rows say of the code that ran")


def _add_placement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cuda, cpu, ...; default cuda where there is one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default bfloat16, float32 on a CPU")


if __name__ == "__main__":
    sys.exit(main())
