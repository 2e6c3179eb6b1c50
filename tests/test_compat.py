"""The argument is named as the installed transformers names it, and a prefill keeps every position."""

import inspect

import torch
from builders import random_ids, tiny_model
from transformers import DynamicCache

from hf_crosscache.compat import CACHE_ARGUMENT, cache_argument, decoder_of, prefill


def test_the_argument_is_one_that_forward_takes():
    cache = DynamicCache()
    ((name, value),) = cache_argument(cache).items()
    assert name == CACHE_ARGUMENT and value is cache
    assert name in inspect.signature(tiny_model("qwen2").model.forward).parameters


def test_prefill_keeps_what_leaves_a_sliding_window():
    model, ids = tiny_model("mistral_sliding"), random_ids(1, 30)
    cache, logits = prefill(model, ids)
    assert logits is None and cache.layers[0].keys.shape[2] == 30
    _, logits = prefill(model, ids, logits=True)
    torch.testing.assert_close(logits, model(ids).logits)


def test_the_decoder_is_the_module_that_owns_the_rotary_embedding():
    model = tiny_model("llama")
    assert decoder_of(model) is model.model
