"""The words of the `hf-crosscache` command: what each of its commands takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from .demo import EXAMPLES
from .survey import CONTEXT_TOKENS
from .tasks import TASKS

Command = Callable[[argparse.Namespace], None]


def parser_of(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Build the parser; each command of it runs the function of its name."""
    parser = argparse.ArgumentParser(prog="hf-crosscache", description="Carry a KV cache from one language model to another.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, about: str) -> argparse.ArgumentParser:
        added = subparsers.add_parser(name, help=about, description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        added.set_defaults(run=commands[name])
        return added

    fit = command("fit", "Fit a translator between two models that share a tokenizer.")
    fit.add_argument("source", help="model that reads the context: a Hub name or a folder")
    fit.add_argument("target", help="model that goes on from it: a Hub name or a folder")
    _add_texts(fit)
    fit.add_argument("--out", type=Path, required=True, help="folder for the translator")
    fit.add_argument("--support", choices=["head", "full"], default="head")
    fit.add_argument("--k", type=int, help="source heads a target head reads, or layers; default 8 heads, or all layers")
    fit.add_argument("--candidates", type=int, help="blocks kept for forward selection; default 1.5 k")
    fit.add_argument("--attention-weights", action="store_true", help="let tokens count by the attention they receive from later ones")
    fit.add_argument("--tokens", type=int, default=760_000, help="calibration tokens")
    fit.add_argument("--window", type=int, default=512, help="tokens of one window")
    fit.add_argument("--batch-size", type=int, default=8, help="windows read at once")
    fit.add_argument("--sink-tokens", type=int, default=4, help="first positions that stay native")
    _add_native(fit)
    fit.add_argument("--experts", type=int, default=1, help="sets of maps, up to 4; a router chooses one of them for each token")
    _add_panels(fit)
    fit.add_argument("--match-variance", action="store_true", help="let mapped values vary as the target's own do; without refining")
    fit.add_argument("--save-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    _add_placement(fit)

    refine = command("refine", "Distil the target's predictions into a translator's maps; better, and as fast to serve.")
    _add_translator(refine)
    _add_texts(refine)
    refine.add_argument("--out", type=Path, help="folder for the refined translator; default the same")
    _add_refinement(refine)

    tune = command("tune", "Fit translators along the frontier of quality and cost, and keep the best within a budget.")
    tune.add_argument("source", help="model that reads the context: a Hub name or a folder")
    tune.add_argument("target", help="model that goes on from it: a Hub name or a folder")
    _add_texts(tune)
    tune.add_argument("--out", type=Path, required=True, help="folder for the translator, and for the others it was chosen from")
    tune.add_argument("--budget", type=float, default=0.1, help="share of the arithmetic of the target's prefill that a switch may cost")
    tune.add_argument("--context-tokens", type=int, default=384, help="of the contexts that the budget and the figures are for")
    tune.add_argument("--windows", type=int, default=64, help="held-out windows that choose")
    tune.add_argument("--k", type=int, default=8, help="source heads a target head reads")
    tune.add_argument("--native-layers", type=int, nargs="+", help="to try; default those that fit the budget, up to half of the layers")
    tune.add_argument("--recompute-last", type=int, nargs="+", default=[0, 4, 16, 64], help="last tokens left to the target, to try")
    tune.add_argument("--native-features", type=int, help="directions of the hidden state that maps read; default all")
    tune.add_argument("--source-features", type=int, help="directions of all source states together that maps read; default none")
    tune.add_argument("--fit-tokens", type=int, default=300_000, help="calibration tokens of each fit")
    tune.add_argument("--refine", action="store_true", help="refine the one that is kept")
    _add_refinement(tune)
    _add_placement(tune)

    evaluate = command("eval", "Measure a translator on documents that its fit has not seen.")
    _add_translator(evaluate)
    _add_texts(evaluate)
    evaluate.add_argument("--windows", type=int, default=256)
    evaluate.add_argument("--context-tokens", type=int, default=384)
    evaluate.add_argument("--continuation-tokens", type=int, default=128)
    evaluate.add_argument("--batch-size", type=int, default=8)
    _add_results(evaluate)
    evaluate.add_argument("--record", action="store_true", help="also record the result in the translator's summary")

    tasks = command("tasks", "Measure what a target can do with a translated context, on tasks made of held-out texts.")
    _add_translator(tasks)
    _add_texts(tasks)
    tasks.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    tasks.add_argument("--items", type=int, default=500, help="contexts of each task")
    tasks.add_argument("--context-tokens", type=int, default=384)
    tasks.add_argument("--batch-size", type=int, default=16, help="contexts at once")
    _add_results(tasks)

    told = command("report", "Measure a translator from all sides and write one self-contained HTML page on it.")
    _add_translator(told)
    _add_texts(told)
    told.add_argument("--windows", type=int, default=128, help="windows of held-out documents, for each figure")
    told.add_argument("--context-tokens", type=int, default=384, help="of the main figures")
    told.add_argument("--lengths", type=int, nargs="+", default=CONTEXT_TOKENS, help="context lengths, as far as the documents reach")
    told.add_argument("--continuation-tokens", type=int, default=128)
    told.add_argument("--recompute-last", type=int, default=0, help="context tokens left to the target; others are measured too")
    told.add_argument("--batch-size", type=int, default=8)
    told.add_argument("--out", type=Path, help="the page; default report.html in the translator's folder")

    generate = command("generate", "Let the source read a prompt and the target answer it.")
    _add_translator(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the prompt itself")
    prompt.add_argument("--prompt-file", type=Path, help="a text file that holds it")
    generate.add_argument("--max-new-tokens", type=int, default=64)
    generate.add_argument("--sample", action="store_true", help="sample instead of greedy decoding")
    generate.add_argument("--recompute-last", type=int, default=16, help="prompt tokens left to the target")

    info = command("info", "Say what a translator is: models, support, size, held-out figures.")
    info.add_argument("translator", type=Path, help="folder of the translator")

    bench = command("bench", "Time the translation between two models against the target's own prefill.")
    bench.add_argument("source", help="model that reads: a Hub name or a folder")
    bench.add_argument("target", help="model that goes on: a Hub name or a folder")
    bench.add_argument("--support", choices=["head", "full"], default="head")
    bench.add_argument("--k", type=int, default=4, help="source heads a target head reads, or layers")
    bench.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="lengths of the context")
    bench.add_argument("--batch-size", type=int, default=1)
    bench.add_argument("--csv", type=Path, help="also append a row a timing here")
    bench.add_argument("--commit", default="", help="what the rows say of the code that ran")
    _add_placement(bench)

    shown = command("demo", "Hand a context over between two small trained models, offline.")
    shown.add_argument("--examples", type=Path, default=EXAMPLES, help="folder with models/ and text/ of the repository")
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


def _add_native(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--native-layers", type=int, default=0, help="first layers that the target runs itself, read by all other maps")
    parser.add_argument("--native-features", type=int, help="directions of their hidden state that maps read; default all")


def _add_panels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source-features", type=int, help="directions of all source states together that maps read; default none")
    parser.add_argument("--nonlinear-features", type=int, help="hidden units over native and source features that maps read; default none")
    parser.add_argument("--other-role", action="store_true", help="let keys be mapped from source values too, and values from keys")


def _add_refinement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=6_000_000, help="tokens to refine on")
    parser.add_argument("--window", type=int, default=512, help="tokens of one window; for contexts of thousands of tokens, 2048 say")
    parser.add_argument("--attention-error", type=float, default=0.0, help="how much the error of attention outputs counts beside the KL")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32, help="windows a step")
    parser.add_argument("--minutes", type=float, help="end after so long")
    parser.add_argument("--learning-rate", type=float, nargs="+", help="to try for some steps each; default 3e-4, 1e-3 and 3e-3")
