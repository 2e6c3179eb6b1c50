"""The target's first layers alone are those of a whole prefill, and a cache that takes them natively is exact."""

import pytest
import torch
from builders import CONFORMING, VOCABULARY, a_model, generate, native_translator, random_ids, tiny_model
from transformers import DynamicCache

from hf_crosscache import TranslatedCache, first_layers
from hf_crosscache.compat import cache_argument, prefill, states_of
from hf_crosscache.errors import HandOffError, UnsupportedModelError


def source_cache(model, ids, **given):
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, use_cache=True, **given, **cache_argument(cache))
    return cache


@pytest.mark.parametrize("family", CONFORMING)
def test_first_layers_are_those_of_a_prefill(family):
    model = a_model(family)[0]
    ids = random_ids(2, 20)
    whole = states_of(prefill(model, ids)[0])
    first = first_layers.run(model, 2, {"input_ids": ids, "position_ids": torch.arange(20)[None].expand(2, -1)})
    assert len(first.keys) == 2 and first.hidden.shape[:2] == ids.shape
    for layer_idx in range(2):
        torch.testing.assert_close(first.keys[layer_idx], whole[layer_idx][0])
        torch.testing.assert_close(first.values[layer_idx], whole[layer_idx][1])


@pytest.mark.parametrize("family", CONFORMING)
@pytest.mark.parametrize("native_layers", [1, 2])
def test_generation_behind_native_layers_is_native(family, native_layers):
    model = a_model(family)[0]
    translator = native_translator(model, native_layers)
    ids = random_ids(2, 24)
    cache = TranslatedCache(source_cache(model, ids[:, :20]), translator, target_model=model, input_ids=ids)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))
    assert cache.report().native_layers == native_layers


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_a_cache_grows_behind_native_layers(family):
    model = a_model(family)[0]
    translator = native_translator(model, 2)
    ids = random_ids(1, 40)
    cache = TranslatedCache(source_cache(model, ids[:, :17]), translator, target_model=model, input_ids=ids)
    cache.extend(source_cache(model, ids[:, :36]), input_ids=ids)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


def test_a_hand_off_behind_what_the_target_has_read_tells_its_native_layers():
    model = a_model("llama")[0]
    ids = random_ids(1, 30)
    cache = TranslatedCache.empty(model)
    with torch.no_grad():
        model(ids[:, :8], use_cache=True, **cache_argument(cache))
    cache.extend(source_cache(model, ids[:, :25]), translator=native_translator(model, 2), input_ids=ids)
    assert cache.report().native_layers == 2
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


def test_padded_rows_have_native_layers_of_their_own():
    model = a_model("qwen2")[0]
    translator = native_translator(model, 2)
    ids, mask = random_ids(2, 24), torch.ones(2, 24, dtype=torch.long)
    ids[0, :7], mask[0, :7] = 0, 0
    with torch.no_grad():
        source, _ = prefill(model, ids[:, :20], attention_mask=mask[:, :20])
    cache = TranslatedCache(source, translator, target_model=model, input_ids=ids, attention_mask=mask)
    assert torch.equal(generate(model, ids, cache, attention_mask=mask), generate(model, ids, attention_mask=mask))


def test_forks_crops_and_reads_with_native_layers():
    model = a_model("llama")[0]
    translator = native_translator(model, 1)
    ids = random_ids(1, 30)
    cache = TranslatedCache(source_cache(model, ids), translator, target_model=model, input_ids=ids)
    shorter = cache.fork()
    shorter.crop(-9)
    whole = states_of(prefill(model, ids[:, :-1])[0])
    for (keys, values), (want_keys, want_values) in zip(states_of(cache.to_dynamic_cache()), whole, strict=True):
        torch.testing.assert_close(keys, want_keys)
        torch.testing.assert_close(values, want_values)
    assert torch.equal(generate(model, ids[:, :25], shorter), generate(model, ids[:, :25]))


def test_native_layers_need_the_target():
    model = a_model("llama")[0]
    ids = random_ids(1, 20)
    with pytest.raises(HandOffError, match="native_layers"):
        TranslatedCache(source_cache(model, ids), native_translator(model, 1), sink_tokens=0)


def test_a_decoder_of_another_make_is_refused():
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.attention = layer.self_attn
        del layer.self_attn
    with pytest.raises(UnsupportedModelError, match="layer 1"):
        first_layers.run(model, 2, {"input_ids": random_ids(1, VOCABULARY % 7 + 4)})
