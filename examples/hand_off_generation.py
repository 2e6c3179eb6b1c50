"""Hand a generation over half way: a small model writes the first half, a large one goes on from the small one's cache.

    python examples/hand_off_generation.py [TRANSLATOR]

TRANSLATOR is a folder that `hf-crosscache fit` or examples/fit_translator.py wrote; without it one is fitted on the spot.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_crosscache import CacheTranslator, Calibration, TranslatedCache, fit_translator
from hf_crosscache.compat import cache_argument

HERE = Path(__file__).parent
small = AutoModelForCausalLM.from_pretrained(HERE / "models/qwen3-small").float().eval()
large = AutoModelForCausalLM.from_pretrained(HERE / "models/qwen3-large").float().eval()
tokenizer = AutoTokenizer.from_pretrained(HERE / "models/qwen3-large")
if len(sys.argv) > 1:
    translator = CacheTranslator.from_pretrained(sys.argv[1], source_model=small, target_model=large, tokenizer=tokenizer)
else:
    texts = HERE / "text/documents.jsonl.xz"
    translator = fit_translator(Calibration(small, large, tokenizer, texts, tokens=40_000, window=256), k=4)

prompt = "To create a table in PostgreSQL, use the CREATE TABLE command. For example, the statement below creates"
inputs = tokenizer(prompt, return_tensors="pt")

# The small model writes with an ordinary cache of its own.
small_cache = DynamicCache()
settings = {"do_sample": True, "top_k": 20, "pad_token_id": tokenizer.pad_token_id, "max_new_tokens": 24}
torch.manual_seed(0)
draft = small.generate(**inputs, **settings, **cache_argument(small_cache))
print("small:", tokenizer.decode(draft[0, inputs.input_ids.shape[1] :]))

# The large one goes on. The small cache holds every token but the last, which the large model reads itself.
cache = TranslatedCache(small_cache, translator, target_model=large, input_ids=draft)
print(f"handed over: {cache.get_seq_length()} of {draft.shape[1]} tokens")
whole = large.generate(draft, attention_mask=torch.ones_like(draft), **settings, **cache_argument(cache))
print("large:", tokenizer.decode(whole[0, draft.shape[1] :]))
