"""What only a CUDA device can show: the Triton kernels under the cache and the fitter, against the same on the CPU."""

import pytest
import torch
from accelerate import dispatch_model
from builders import CONFORMING, generate, identity_translator, native_translator, random_ids, tiny_model
from transformers import DynamicCache

from hf_crosscache import TranslatedCache, TranslatorFitter
from hf_crosscache.compat import cache_argument, prefill
from hf_crosscache.errors import HandOffError
from hf_crosscache.states import LayerStates, PairedStates

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.mark.parametrize("family", [*CONFORMING, "llama_yarn"])
@pytest.mark.parametrize("group_bytes", [1, 30_000, 1 << 30])
def test_self_translation_generates_what_the_model_generates(family, group_bytes, monkeypatch):
    monkeypatch.setattr("hf_crosscache.translation._GROUP_BYTES", group_bytes)
    model, ids = tiny_model(family).cuda(), random_ids(2, 24).cuda()
    for context in (24, 10):
        source_cache, _ = prefill(model, ids[:, :context])
        cache = TranslatedCache(source_cache, identity_translator(model), target_model=model, input_ids=ids)
        assert torch.equal(generate(model, ids, cache), generate(model, ids))


@pytest.mark.parametrize("family", CONFORMING)
@pytest.mark.parametrize("native_layers", [1, 2])
def test_native_layers_and_their_features(family, native_layers):
    model, ids = tiny_model(family).cuda(), random_ids(2, 24).cuda()
    source_cache, _ = prefill(model, ids[:, :20])
    cache = TranslatedCache(source_cache, native_translator(model, native_layers), target_model=model, input_ids=ids)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere2"])
def test_padded_rows(family):
    model, ids, mask = tiny_model(family).cuda(), random_ids(3, 24).cuda(), torch.ones(3, 24, dtype=torch.long).cuda()
    for row, pads in enumerate((0, 5, 11)):
        ids[row, :pads], mask[row, :pads] = model.config.pad_token_id, 0
    source_cache, _ = prefill(model, ids, attention_mask=mask)
    cache = TranslatedCache(source_cache, identity_translator(model), target_model=model, input_ids=ids, attention_mask=mask)
    assert torch.equal(generate(model, ids, cache, attention_mask=mask), generate(model, ids, attention_mask=mask))


@pytest.mark.parametrize("where", [(0, 0, "cpu"), ("cpu", 0, "cpu")])
def test_a_target_that_is_split_over_the_device_and_the_cpu(where):
    model, ids = tiny_model("llama"), random_ids(2, 24).cuda()
    translator = identity_translator(model)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    model = dispatch_model(model, {**places, **{f"model.layers.{i}": place for i, place in enumerate(where)}}, main_device=0)
    source_cache, _ = prefill(model, ids)
    cache = TranslatedCache(source_cache, translator, target_model=model, input_ids=ids)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_compiled_decoding_from_a_static_cache(family):
    model, ids = tiny_model(family).cuda(), random_ids(1, 24).cuda()
    source_cache, _ = prefill(model, ids)
    static = TranslatedCache(source_cache, identity_translator(model), target_model=model, input_ids=ids).to_static_cache(40)
    assert torch.equal(generate(model, ids, static), generate(model, ids))


def test_sources_that_lie_elsewhere():
    model, ids = tiny_model("llama").cuda(), random_ids(2, 24).cuda()
    translator, wanted = identity_translator(model), generate(model, ids)
    offloaded = DynamicCache(offloading=True)
    with torch.no_grad():
        model(ids, **cache_argument(offloaded))
    on_cpu = [(layer.keys.cpu(), layer.values.cpu()) for layer in prefill(model, ids)[0].layers]
    for source_cache in (offloaded, on_cpu):
        cache = TranslatedCache(source_cache, translator, target_model=model, input_ids=ids)
        assert torch.equal(generate(model, ids, cache), wanted)


def test_the_device_builds_the_cache_that_the_cpu_builds(translator, small, large):
    ids = torch.randint(2, 4000, (2, 150))
    source_cache, _ = prefill(small, ids)
    here = TranslatedCache(source_cache, translator, input_ids=ids, sink_tokens=0)
    pairs = [(layer.keys.cuda(), layer.values.cuda()) for layer in source_cache.layers]
    there = TranslatedCache(pairs, translator, input_ids=ids.cuda(), sink_tokens=0)
    for mine, theirs in zip(here, there, strict=True):
        for role in range(2):
            torch.testing.assert_close(mine[role], theirs[role].cpu(), rtol=1e-4, atol=1e-4)


def test_states_that_are_not_finite_are_named():
    model, ids = tiny_model("llama").cuda(), random_ids(1, 20).cuda()
    source_cache, _ = prefill(model, ids)
    source_cache.layers[1].values[0, 0, 9, 0] = float("nan")
    for use in (lambda c: generate(model, ids, c), lambda c: c.layers[0].keys, lambda c: c.translate()):
        cache = TranslatedCache(source_cache, identity_translator(model), target_model=model, input_ids=ids)
        with pytest.raises(HandOffError, match="Target layer 1: translated values are not finite"):
            use(cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_device_fits_what_the_cpu_fits(dtype):
    from test_fitter import PLANTED, SOURCE, TARGET, states

    def moved(paired):
        def side(s):
            return LayerStates([t.to("cuda", dtype) for t in s.keys], [t.to("cuda", dtype) for t in s.values])

        return PairedStates(side(paired.source), side(paired.target))

    maps = []
    for place in (lambda s: s, moved):
        fitter = TranslatorFitter(SOURCE, TARGET, k=2, candidates=4)
        for gather in (fitter.screen, fitter.update):
            for i in range(6):
                gather(place(states(4, i)), "fit")
                gather(place(states(2, 100 + i)), "validation")
            fitter.choose_candidates()
        maps.append(fitter.fit())
    for t in range(2):
        for a, b in zip((maps[0].keys[t], maps[0].values[t]), (maps[1].keys[t], maps[1].values[t]), strict=True):
            assert a.blocks == b.blocks and [set(heads) for heads in b.blocks] == [set(PLANTED[t, h]) for h in range(3)]
            torch.testing.assert_close(a.weight, b.weight, rtol=1e-3, atol=1e-3 if dtype == torch.float32 else 2e-2)
