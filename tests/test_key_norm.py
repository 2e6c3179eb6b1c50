"""The target's norm of keys is read from its own cache, and mapped keys are brought back to it."""

from dataclasses import replace

import accelerate
import pytest
import torch
from builders import TEXTS, a_model, generate, identity_translator, pocket_model, random_ids, tiny_model

from hf_crosscache import CacheGeometry, CacheTranslator, Calibration, TranslatedCache, evaluate_translator, fit_translator
from hf_crosscache.compat import prefill, states_of
from hf_crosscache.key_norm import inverse_key_norms
from hf_crosscache.rope import strip_rope


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_keys_have_unit_length_under_the_inverse_weights(family):
    model = tiny_model(family)
    for block in model.model.layers:
        torch.nn.init.uniform_(block.self_attn.k_norm.weight, 0.3, 0.9)
    geometry = CacheGeometry.from_model(model)
    inverse = inverse_key_norms(model, geometry)
    cache, _ = prefill(model, random_ids(2, 30, seed=3))
    positions = torch.arange(30)[None]
    for layer_idx, (keys, _) in enumerate(states_of(cache)):
        stripped = strip_rope(keys, *geometry.rotary[layer_idx].cos_sin(positions, keys.dtype))
        rms = (stripped * inverse[layer_idx]).square().mean(-1).sqrt()
        torch.testing.assert_close(rms, torch.ones_like(rms), atol=2e-3, rtol=0)


def test_weights_that_are_offloaded_are_read():
    model, offloaded = (tiny_model("qwen3") for _ in range(2))
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    geometry = CacheGeometry.from_model(model)
    assert torch.equal(inverse_key_norms(offloaded, geometry), inverse_key_norms(model, geometry))


@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2", "phi3", "gemma2", "cohere2"])
def test_models_without_a_norm_of_each_head_have_none(family):
    model = a_model(family)[0]
    assert inverse_key_norms(model, CacheGeometry.from_model(model)) is None


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_keys_that_were_mapped_too_short_are_brought_back(family, tmp_path):
    model = a_model(family)[0]
    exact = identity_translator(model)
    shrunk = tuple(replace(layer_map, weight=0.4 * layer_map.weight) for layer_map in exact.keys)
    translator = replace(exact, keys=shrunk, key_norm=inverse_key_norms(model, exact.target.geometry))
    translator.save_pretrained(tmp_path, dtype=torch.float32)
    ids = random_ids(2, 24)
    source, _ = prefill(model, ids[:, :20])
    cache = TranslatedCache(source, CacheTranslator.from_pretrained(tmp_path), target_model=model, input_ids=ids)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


def test_more_of_the_context_survives():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TEXTS.parent.parent / "models" / "qwen3-large")
    source, target = pocket_model("qwen3-small"), pocket_model("qwen3-large")
    translator = fit_translator(Calibration(source, target, tokenizer, TEXTS, tokens=60_000), k=4)
    with_norm, without = (
        evaluate_translator(t, source, target, tokenizer, TEXTS, windows=24)["translated"]
        for t in (translator, replace(translator, key_norm=None))
    )
    assert with_norm.context_recovered > without.context_recovered + 0.03 and with_norm.kl < without.kl
