"""Measure conversations that two models take turns in, turn by turn, as rows of a CSV file.

    python kernels/benchmarks/bench_handoff.py SOURCE TARGET UP DOWN --texts texts.jsonl.xz

UP is the translator from SOURCE to TARGET, DOWN the one back. Each conversation is a held-out document in pieces: at every turn a piece is
said, and the model whose turn it is answers greedily, SOURCE first. Columns beside those of `hf_crosscache.handoff.Turn` (means over the
conversations; milliseconds are medians):

    kl, top1: of the answer's tokens, against the same model reading the whole conversation itself: KL(native || session) in nats a token,
        and the share of positions with the same most likely token.
    kl_none, kl_wrong_document: the controls, the same KL where the model has read the newest turn alone, and where what was handed over
        before it is another document's conversation.
    most_reads: how often a model has read any one token itself, at most: 1 or the run ends.
    prefill_ms: the model's prefill of the conversation up to the newest turn, which a switch would cost without a hand-off.
"""

import argparse
import csv
import time
from pathlib import Path
from statistics import mean, median

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from hf_crosscache import CacheTranslator, HandoffSession
from hf_crosscache.compat import prefill
from hf_crosscache.texts import read_documents, token_windows

RESULTS = Path(__file__).resolve().parents[2] / "examples" / "results" / "handoff.csv"


class Listening(LogitsProcessor):
    """Keeps the logits of every step, and makes the model say given tokens where there are some."""

    def __init__(self, say: torch.Tensor | None = None) -> None:
        self.say, self.heard = say, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.heard.append(scores[0].float().log_softmax(-1).cpu())
        if self.say is None:
            return scores
        forced = torch.full_like(scores, -float("inf"))
        forced[0, self.say[0, len(self.heard) - 1]] = 0.0
        return forced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "target", "up", "down"):
        parser.add_argument(name)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--said", type=int, default=48, help="tokens said at each turn")
    parser.add_argument("--answered", type=int, default=24, help="tokens answered at each turn")
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--commit", default="", help="what the rows say of the code that ran")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    place = {"dtype": torch.bfloat16, "device_map": "cuda"} if cuda else {"dtype": torch.float32}
    models = {name: AutoModelForCausalLM.from_pretrained(name, **place).eval() for name in (args.source, args.target)}
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    pairs = {(args.source, args.target): args.up, (args.target, args.source): args.down}
    translators = {pair: CacheTranslator.from_pretrained(folder, tokenizer=tokenizer) for pair, folder in pairs.items()}
    documents = token_windows(
        read_documents(args.texts), tokenizer, split="test", length=args.turns * args.said, count=args.conversations + 1, seed=3
    )
    about = {
        "source": Path(args.source).name,
        "target": Path(args.target).name,
        "support": "/".join(f"{translators[pair].summary['support']} k={translators[pair].summary['k']}" for pair in pairs),
        "conversations": len(documents) - 1,
        "turns": args.turns,
    }
    where = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": args.commit,
    }
    conversations = [
        list(converse(models, translators, document, other, args.said, args.answered))
        for document, other in zip(documents, documents.roll(-1, 0)[:-1], strict=False)
    ]
    rows = [{**about, **summary(turn, same), **where} for turn, same in enumerate(zip(*conversations, strict=True))]
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    is_new = not args.csv.exists()
    with args.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def converse(models, translators, document: torch.Tensor, other: torch.Tensor, said: int, answered: int):
    """Yield a measurement a turn of one conversation; another document is told alongside, as the control."""
    session, elsewhere = (HandoffSession(models, translators) for _ in range(2))
    names = list(models)
    for turn in range(len(document) // said):
        name, piece = names[turn % 2], slice(turn * said, (turn + 1) * said)
        model, before = models[name], session.input_ids
        listening = Listening()
        answer = session.add(document[piece]).generate(name, **_settings(listening, answered))
        controls = {}
        if turn:
            wrong = elsewhere.fork().add(document[piece])
            alone = HandoffSession(models, {}).add(document[piece])
            for control, one in (("kl_wrong_document", wrong), ("kl_none", alone)):
                heard = Listening(answer)
                one.generate(name, **_settings(heard, answered))
                controls[control] = heard.heard
        elsewhere.add(other[piece]).generate(name, **_settings(Listening(), answered))
        native = _native(model, session.input_ids, answered)
        started = time.perf_counter()
        if before.shape[1]:
            prefill(model, before.to(model.device))[0].layers[-1].keys.sum().item()  # type: ignore[union-attr]
        prefill_ms = 1000 * (time.perf_counter() - started)
        heard = torch.stack(listening.heard)
        yield {
            **session.turns[-1].to_dict(),
            "kl": _kl(native, heard),
            "top1": (native.argmax(-1) == heard.argmax(-1)).float().mean().item(),
            **{control: _kl(native, torch.stack(logits)) for control, logits in controls.items()},
            "most_reads": _most_reads(session, names),
            "prefill_ms": prefill_ms,
        }


def summary(turn: int, measured: tuple[dict, ...]) -> dict:
    """One row of a turn over all conversations."""

    def figure(name: str, of=mean) -> float | str:
        found = [one[name] for one in measured if name in one]
        return f"{of(found):.4f}" if found else ""

    first = measured[0]
    counts = {name: first[name] for name in ("held", "translated", "prefilled", "read", "generated")}
    if any(one[name] != count for one in measured for name, count in counts.items()):
        raise SystemExit(f"Turn {turn}: conversations of one shape expected.")
    if max(one["most_reads"] for one in measured) > 1:
        raise SystemExit(f"Turn {turn}: a model has read a token twice.")
    milliseconds = {f"{part}_ms": f"{1000 * median(one[f'{part}_seconds'] for one in measured):.2f}" for part in ("switch",)}
    return {
        "turn": turn + 1,
        "model": Path(first["model"]).name,
        "history": sum(counts.values()),
        **counts,
        **milliseconds,
        "prefill_ms": f"{median(one['prefill_ms'] for one in measured):.2f}",
        "kl": figure("kl"),
        "top1": figure("top1"),
        "kl_none": figure("kl_none"),
        "kl_wrong_document": figure("kl_wrong_document"),
        "most_reads": 1,
    }


def _settings(listening: Listening, answered: int) -> dict:
    return {
        "logits_processor": LogitsProcessorList([listening]),
        "max_new_tokens": answered,
        "min_new_tokens": answered,
        "do_sample": False,
        "repetition_penalty": None,
    }


@torch.no_grad()
def _native(model, input_ids: torch.Tensor, answered: int) -> torch.Tensor:
    """Log-probabilities of the last `answered` tokens by the model that reads everything itself, `[answered, vocabulary]`."""
    logits = model(input_ids.to(model.device)).logits[0, -answered - 1 : -1]
    return logits.float().log_softmax(-1).cpu()


def _kl(native: torch.Tensor, heard: torch.Tensor) -> float:
    """Over the tokens that the answer could have, an end of text not being one of them."""
    possible = heard > -float("inf")
    native = native.masked_fill(~possible, -float("inf")).log_softmax(-1)
    return torch.where(possible, native.exp() * (native - heard), 0).sum(-1).mean().item()


def _most_reads(session: HandoffSession, names: list[str]) -> int:
    reads = torch.zeros(len(names), session.input_ids.shape[1], dtype=torch.long)
    for row, name in enumerate(names):
        for start, end in session.native_spans(name):
            reads[row, start:end] += 1
    return int(reads.max())


if __name__ == "__main__":
    main()
