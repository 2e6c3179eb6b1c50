"""The whole idea in one file: fit a translator, let one model read, let another one answer."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_crosscache import Calibration, TranslatedCache, fit_translator
from hf_crosscache.compat import cache_argument, prefill

HERE = Path(__file__).parent
source = AutoModelForCausalLM.from_pretrained(HERE / "models/qwen3-small").float().eval()
target = AutoModelForCausalLM.from_pretrained(HERE / "models/qwen3-large").float().eval()
tokenizer = AutoTokenizer.from_pretrained(HERE / "models/qwen3-large")

# Once a pair: both models read the same texts, and a ridge regression a head maps one cache to the other.
calibration = Calibration(source, target, tokenizer, HERE / "text/documents.jsonl.xz", tokens=40_000, window=256)
translator = fit_translator(calibration, k=4)
print("held-out R2:", {role: round(r2, 3) for role, r2 in translator.summary["r2"].items()})

# At every switch: the source has read the prompt, the target goes on from its cache.
prompt = "The open() function returns a file object. To read a file's contents, call the method read() of the file"
inputs = tokenizer(prompt, return_tensors="pt")
source_cache, _ = prefill(source, inputs.input_ids)
cache = TranslatedCache(source_cache, translator, target_model=target, input_ids=inputs.input_ids, recompute_last=8)
# cache_argument names it as the installed transformers does: past_key_values=cache, or cache=cache from 5.24 on.
output = target.generate(**inputs, **cache_argument(cache), max_new_tokens=24, do_sample=False, pad_token_id=0)
print("native and translated tokens in the prompt:", inputs.input_ids.shape[1] - 8, "cached, 8 left to the target")
print(tokenizer.decode(output[0]))
