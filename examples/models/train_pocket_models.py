"""Train the pocket models: four small language models with their tokenizers, on one GPU, all at the same time.

    python examples/models/collect_text.py --out text.jsonl.xz
    python examples/models/train_pocket_models.py --text text.jsonl.xz --out examples/models --minutes 7

Hidden matrices are trained with Muon, the rest with AdamW, in bfloat16 autocast over float32 weights, on windows of 1,024 tokens, with a
trapezoid schedule over the given wall-clock time. Held-out works (see collect_text.py) are never trained on; the loss over them is written
to held_out_loss.json. A tokenizer that is already there is kept.
"""

import argparse
import json
import lzma
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from collect_text import is_held_out
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END, BOS, WINDOW = "<|endoftext|>", "<bos>", 1024
SHARED = {"tie_word_embeddings": True, "max_position_embeddings": 4096}
TOKENIZER = {"qwen3-small": "a", "qwen3-large": "a", "llama": "a", "gemma3": "b"}


def build(name: str, ids: dict[str, int]):
    """Make a model with fresh weights; ids are the vocabulary size and the special tokens of its tokenizer."""
    if name == "gemma3":
        sliding = ["sliding_attention", "sliding_attention", "full_attention"]
        return Gemma3ForCausalLM(Gemma3TextConfig(
            hidden_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=1, head_dim=64, intermediate_size=400,
            query_pre_attn_scalar=64, sliding_window=128, layer_types=2 * sliding, **SHARED, **ids))  # fmt: skip
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(
            hidden_size=160, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=1, head_dim=64, intermediate_size=320,
            **SHARED, **ids))  # fmt: skip
    wide = name == "qwen3-large"
    return Qwen3ForCausalLM(Qwen3Config(
        hidden_size=192 if wide else 128, num_hidden_layers=8 if wide else 6, num_attention_heads=6 if wide else 4,
        num_key_value_heads=2, head_dim=32, intermediate_size=256 if wide else 352, **SHARED, **ids))  # fmt: skip


def train_tokenizer(kind: str, texts: list[str], folder: Path) -> None:
    """Train a byte-level BPE: "a" plain, 4,096 tokens; "b" single digits, whole lines of blanks, a BOS before any text, 3,072 tokens."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "a")
    special = [END] if kind == "a" else [END, BOS]
    if kind == "a":
        tokenizer.pre_tokenizer = byte_level
    else:
        words = pre_tokenizers.Split(Regex(r"\n+|\d| ?[^\s\d\W]+| ?[^\s\w]+|\s+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096 if kind == "a" else 3072, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    extra = {}
    if kind == "b":
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))])
        extra = {"bos_token": BOS}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, model_max_length=4096, **extra)
    fast.save_pretrained(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), ensure_ascii=False, separators=(",", ":")))


def encode(tokenizer, texts: list[str]) -> torch.Tensor:
    """Windows `[n, 1024]` of the texts laid end to end: an end token closes each text, the BOS, if any, opens each window."""
    opening = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    stream: list[int] = []
    for start in range(0, len(texts), 512):
        for ids in tokenizer(texts[start : start + 512], add_special_tokens=False, verbose=False)["input_ids"]:
            stream += [*ids, tokenizer.eos_token_id]
    body = WINDOW - len(opening)
    windows = torch.tensor(stream[: len(stream) // body * body], dtype=torch.int32).view(-1, body)
    return torch.cat([torch.tensor([opening], dtype=torch.int32).expand(len(windows), -1), windows], dim=1)


def train(name: str, folder: Path, train_ids: torch.Tensor, held_out: torch.Tensor, held_out_bytes: int, minutes: float) -> dict:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
           "bos_token_id": tokenizer.bos_token_id}  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(name, ids).to(device)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    train_ids, batch = train_ids.to(device), 48 if device == "cuda" else 2
    generator = torch.Generator().manual_seed(0)
    order, seen, step, started, share = torch.empty(0, dtype=torch.long), 0, 0, time.time(), 0.0
    while share < 1:
        if len(order) < batch:
            order = torch.cat([order, torch.randperm(len(train_ids), generator=generator)])
        windows, order = train_ids[order[:batch].to(device)].long(), order[batch:]
        scale = min(1.0, (step + 1) / 100, max(0.02, (1 - share) / 0.35))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * scale
        with torch.autocast(device, torch.bfloat16):
            logits = model(windows).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen, step, share = seen + windows.numel(), step + 1, (time.time() - started) / (60 * minutes)
        if step % 200 == 0:
            print(f"{name}: {100 * share:.0f} %, {seen / 1e6:.0f} million tokens, loss {loss.item():.3f}", flush=True)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(folder / name)
    by_position = loss_by_position(model, held_out.to(device))
    parameters = sum(p.numel() for p in model.parameters())
    result = {
        "model": name, "parameters": parameters, "tokens": seen, "minutes": minutes, "held_out_windows": len(held_out),
        "loss": by_position.mean().item(), "loss_first_128": by_position[:127].mean().item(),
        "loss_last_512": by_position[-512:].mean().item(),
        "bits_per_byte": by_position.mean().item() * held_out.numel() / held_out_bytes / math.log(2),
        "megabytes": sum(f.stat().st_size for f in (folder / name).iterdir()) / 1e6,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    (folder / name / "result.json").write_text(json.dumps(result))
    return result


@torch.no_grad()
def loss_by_position(model, windows: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(WINDOW - 1, device=windows.device)
    for batch in windows.long().split(16):
        logits = model(batch).logits[:, :-1].float()
        total += F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").sum(0)
    return total / len(windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7)
    parser.add_argument("--models", nargs="+", choices=list(TOKENIZER), default=list(TOKENIZER))
    args = parser.parse_args()
    with lzma.open(args.text, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    texts = [row["text"] for row in rows if not is_held_out(row["work"])]
    unseen = [row["text"] for row in rows if is_held_out(row["work"])]
    print(f"{len(texts)} texts to train on, {len(unseen)} held out", flush=True)
    data = {}
    for name in args.models:
        kind, folder = TOKENIZER[name], args.out / name
        if not (folder / "tokenizer.json").exists():
            train_tokenizer(kind, texts, folder)
        if kind not in data:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            held_out = encode(tokenizer, unseen)[:512]
            data[kind] = encode(tokenizer, texts), held_out, sum(len(t.encode()) for t in tokenizer.batch_decode(held_out))
    start = torch.multiprocessing.get_context("spawn").Process
    processes = [start(target=train, args=(name, args.out, *data[TOKENIZER[name]], args.minutes)) for name in args.models]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    results = [json.loads((args.out / name / "result.json").read_text()) for name in args.models]
    for name in args.models:
        (args.out / name / "result.json").unlink()
    (args.out / "held_out_loss.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
