"""Let two models take turns in one conversation: each is handed what the other has read and written since its last turn.

    python examples/hand_off_session.py [UP DOWN]

UP and DOWN are folders of translators from the small to the large model and back; without them they are fitted on the spot.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_crosscache import CacheTranslator, Calibration, HandoffSession, fit_translator

HERE = Path(__file__).parent
models = {name: AutoModelForCausalLM.from_pretrained(HERE / "models" / f"qwen3-{name}").float().eval() for name in ("small", "large")}
tokenizer = AutoTokenizer.from_pretrained(HERE / "models/qwen3-large")


def translator(source: str, target: str, folder: str | None) -> CacheTranslator:
    if folder is not None:
        return CacheTranslator.from_pretrained(folder, tokenizer=tokenizer)
    calibration = Calibration(models[source], models[target], tokenizer, HERE / "text/documents.jsonl.xz", tokens=40_000, window=256)
    return fit_translator(calibration, k=4)


up, down = sys.argv[1:3] if len(sys.argv) > 2 else (None, None)
session = HandoffSession(
    models,
    {("small", "large"): translator("small", "large", up), ("large", "small"): translator("large", "small", down)},
)
said = [
    "An index speeds up queries on a table. To create an index in PostgreSQL, use",
    " Several columns can be indexed together. The order of the columns",
    " To remove the index again,",
    " The query planner decides whether an index is used. It",
]
torch.manual_seed(0)
for turn, text in enumerate(said):
    name = ("small", "large")[turn % 2]
    session.add(tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids)
    answer = session.generate(name, max_new_tokens=24, do_sample=True, top_k=20, pad_token_id=tokenizer.pad_token_id)
    print(f"{name}:{text} ... {tokenizer.decode(answer[0])}")
    cost = session.turns[-1]
    print(f"  ({cost.held} tokens held, {cost.translated} handed over, {cost.read} read, in {1000 * cost.switch_seconds:.0f} ms)")
