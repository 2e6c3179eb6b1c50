"""Source caches of several kinds are read alike; those that have lost what is needed are refused."""

import copy

import pytest
import torch
from builders import generate, identity_translator, random_ids, tiny_model
from transformers import Cache, DynamicCache, StaticCache, cache_utils

from hf_crosscache import CacheGeometry, TranslatedCache
from hf_crosscache.compat import cache_argument, prefill
from hf_crosscache.errors import GeometryError, HandOffError
from hf_crosscache.source import SourceStates

READERS = {0: 0b01, 1: 0b11, 2: 0b10}


def test_what_a_target_layer_reads_is_as_cached():
    model, ids = tiny_model("llama"), random_ids(2, 12)
    cache, _ = prefill(model, ids)
    states = SourceStates(cache, CacheGeometry.from_model(model), READERS)
    assert states.held_layers == (0, 1, 2)
    assert torch.equal(states[0][0], cache.layers[0].keys) and torch.equal(states[1][1], cache.layers[1].values)
    assert (states.batch_size, states.length) == (2, 12)


def test_pairs_of_tensors_and_a_static_cache_are_read_like_a_dynamic_one():
    model, ids = tiny_model("llama"), random_ids(1, 12)
    geometry, (cache, _) = CacheGeometry.from_model(model), prefill(model, ids)
    static = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        model(ids, **cache_argument(static))
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    for other in (pairs, tuple(pairs), static):
        states = SourceStates(other, geometry, READERS)
        assert states.length == 12
        found = states[2][0]
        torch.testing.assert_close(found, cache.layers[2].keys, rtol=1e-4, atol=1e-5)


def test_layers_are_let_go_with_their_last_reader():
    model = tiny_model("llama")
    states = SourceStates(prefill(model, random_ids(1, 6))[0], CacheGeometry.from_model(model), READERS)
    first = states.without([0])
    assert first.held_layers == (1, 2) and first.without([1]).held_layers == ()
    assert states.held_layers == copy.deepcopy(states).held_layers == (0, 1, 2)


def test_a_window_that_has_dropped_tokens_is_refused():
    model, ids = tiny_model("mistral_sliding"), random_ids(1, 20)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **cache_argument(cache))
    with pytest.raises(HandOffError, match=r"layer 0: a sliding window has kept the last 7 of 20.*plain DynamicCache"):
        SourceStates(cache, CacheGeometry.from_model(model), READERS)


@pytest.mark.parametrize("empty", [DynamicCache(), []])
def test_an_empty_cache_is_refused(empty):
    with pytest.raises(HandOffError, match="run the source model|Run the source model"):
        SourceStates(empty, CacheGeometry.from_model(tiny_model("llama")), READERS)


def test_layers_of_another_shape_are_named():
    model = tiny_model("llama")
    pairs = [(layer.keys, layer.values) for layer in prefill(model, random_ids(1, 6))[0].layers]
    pairs[1] = (pairs[1][0], pairs[1][1][:, :1])
    with pytest.raises(GeometryError, match=r"layer 1: values of shape \(1, 2, 6, 16\) expected, \(1, 1, 6, 16\) found"):
        SourceStates(pairs, CacheGeometry.from_model(model), READERS)


def test_a_source_that_was_written_to_is_refused():
    model, ids = tiny_model("llama"), random_ids(1, 12)
    static = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        model(ids, **cache_argument(static))
    states = SourceStates(static, CacheGeometry.from_model(model), READERS)
    assert states[0][0].shape[2] == 12
    static.reset()
    with pytest.raises(HandOffError, match="layer 0: it was written to after"):
        states[0]


def test_layers_of_several_dtypes_become_the_widest():
    model = tiny_model("llama")
    pairs = [(layer.keys.half(), layer.values.half()) for layer in prefill(model, random_ids(1, 6))[0].layers]
    pairs[2] = (pairs[2][0], pairs[2][1].float())
    states = SourceStates(pairs, CacheGeometry.from_model(model), READERS)
    assert states.dtype == torch.float32 and all(side.dtype == torch.float32 for side in states[0])


def test_a_cache_that_was_emptied_is_refused():
    cache = DynamicCache()
    cache.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16), 0)
    cache.layers[0].keys = cache.layers[0].values = torch.tensor([])
    with pytest.raises(HandOffError, match="source cache is empty"):
        SourceStates(cache, CacheGeometry.from_model(tiny_model("llama")), READERS)


@torch.no_grad()
def filled(model, ids, cache):
    """A cache after a model has read ids in two passes, so that quantised layers hold a rest in full."""
    model(ids[:, :8], **cache_argument(cache))
    model(ids[:, 8:], **cache_argument(cache))
    return cache


def pairs_of(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


def assert_reads(cache, model, wanted, atol=1e-5):
    """Every layer, keys and values, as in `wanted` pairs."""
    states = SourceStates(cache, CacheGeometry.from_model(model), {0: 1, 1: 1, 2: 1})
    assert (states.batch_size, states.length) == (wanted[0][0].shape[0], wanted[0][0].shape[2])
    for layer_idx, pair in enumerate(wanted):
        torch.testing.assert_close(states[layer_idx], tuple(side.to(states.dtype) for side in pair), rtol=atol, atol=atol)


def mixed(model, length):
    """A static cache of full and sliding layers."""
    return StaticCache(config=model.config, max_cache_len=length)


KINDS = {
    "plain": lambda model, ids: filled(model, ids, DynamicCache()),
    "static": lambda model, ids: filled(model, ids, mixed(model, 64)),
    "static_full": lambda model, ids: filled(model, ids, mixed(model, ids.shape[1])),
    "of_config": lambda model, ids: filled(model, ids, DynamicCache(config=model.config)),
    "triples": lambda model, ids: [(*pair, None) for pair in pairs_of(filled(model, ids, DynamicCache()))],
    "iterator": lambda model, ids: iter(filled(model, ids, DynamicCache())),
    "forward": lambda model, ids: model(ids, use_cache=True),
    "decoder": lambda model, ids: model.get_decoder()(ids, use_cache=True),
    "translated": lambda model, ids: TranslatedCache(
        filled(model, ids, DynamicCache()), identity_translator(model), target_model=model, input_ids=ids, recompute_last=0
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma3n"])
def test_what_is_read_does_not_depend_on_the_kind_of_cache(kind, family):
    model, ids = tiny_model(family, sliding_window=32), random_ids(2, 12)
    wanted = pairs_of(prefill(model, ids)[0])
    with torch.no_grad():
        assert_reads(KINDS[kind](model, ids), model, wanted, 2e-4)
        other = [(keys + 1, values) for keys, values in wanted]
        with pytest.raises(AssertionError):
            assert_reads(KINDS[kind](model, ids), model, other, 2e-4)


DROPPED = {
    "of_config": (r"layer 0: a sliding window has kept the last 7 of 12.*plain DynamicCache\(\)", KINDS["of_config"]),
    "static": (r"layer 0: a sliding window has kept the last 8 of 12.*plain DynamicCache\(\)", KINDS["static"]),
    "translated": (r"layer 0: a sliding window has kept the last 7 of 12.*keep_window=False", KINDS["translated"]),
}


@pytest.mark.parametrize("kind", DROPPED)
def test_layers_that_slid_are_named_with_the_remedy(kind):
    message, made = DROPPED[kind]
    with pytest.raises(HandOffError, match=message):
        model, ids = tiny_model("gemma3"), random_ids(2, 12)
        SourceStates(made(model, ids), CacheGeometry.from_model(model), READERS)


def test_layers_that_record_what_leaves_the_window_are_read_whole():
    model, ids = tiny_model("gemma3"), random_ids(2, 20)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, **cache_argument(cache))
    assert_reads(cache, model, pairs_of(prefill(model, ids)[0]), 2e-4)
    cache.crop(-1)
    with pytest.raises(HandOffError, match="layer 0: a sliding window has kept the last 7 of 19"):
        SourceStates(cache, CacheGeometry.from_model(model), READERS)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}])
def test_an_output_of_generate_is_read(settings):
    model, ids = tiny_model("llama"), random_ids(2, 12)
    output = generate(model, ids, return_dict_in_generate=True, **settings)
    rows = output.sequences[:, :-1].repeat_interleave(settings.get("num_beams", 1), dim=0)
    states = SourceStates(output, CacheGeometry.from_model(model), READERS)
    assert (states.batch_size, states.length) == rows.shape
    if not settings:
        assert_reads(output, model, pairs_of(prefill(model, rows)[0]), 2e-4)


def test_a_translated_cache_is_handed_on():
    model, ids = tiny_model("gemma3"), random_ids(2, 24)
    translator = identity_translator(model)
    source_cache, _ = prefill(model, ids)
    given = {"target_model": model, "input_ids": ids}
    first = TranslatedCache(source_cache, translator, recompute_last=0, keep_window=False, **given)
    assert torch.equal(generate(model, ids, TranslatedCache(first, translator, **given)), generate(model, ids))


@pytest.mark.parametrize("what", [None, {"keys": 1}, "a text", torch.ones(2, 2, 3, 4), [None], [torch.ones(1)], [(1, 2)]])
def test_what_is_no_cache_is_refused(what):
    with pytest.raises(HandOffError, match=r"without keys and values: a Cache, an output of generate"):
        SourceStates(what, CacheGeometry.from_model(tiny_model("llama")), READERS)


def test_an_output_without_a_cache_is_refused():
    model = tiny_model("llama")
    output = model(random_ids(1, 4), use_cache=False)
    with pytest.raises(HandOffError, match=r"CausalLMOutputWithPast without keys and values.*use_cache=True"):
        SourceStates(output, CacheGeometry.from_model(model), READERS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_of_another_dtype_are_read_in_the_widest(dtype):
    model, ids = tiny_model("llama"), random_ids(2, 12)
    cache, _ = prefill(model, ids)
    cache.layers[1].keys, cache.layers[1].values = cache.layers[1].keys.to(dtype), cache.layers[1].values.to(dtype)
    states = SourceStates(cache, CacheGeometry.from_model(model), READERS)
    assert states.dtype == torch.float32
    assert torch.equal(states[1][0], cache.layers[1].keys.float()) and torch.equal(states[0][0], cache.layers[0].keys)


class _Rounding(cache_utils.QuantizedLayer):
    """Quantised to steps of 1/8, without any other package."""

    def _quantize(self, tensor, axis):
        return (tensor * 8).round().to(torch.int16), tensor.dtype

    def _dequantize(self, q_tensor):
        return q_tensor[0].to(q_tensor[1]) / 8


def _rounded(states):
    return (states * 8).round() / 8


@pytest.mark.parametrize("residual_length", [1, 3, 128])
def test_quantised_layers_are_read_as_they_dequantise_with_the_rest_behind(residual_length):
    model, ids = tiny_model("llama"), random_ids(2, 12)
    cache = filled(model, ids, Cache(layers=[_Rounding(residual_length=residual_length) for _ in range(3)]))
    for step in range(2):
        with torch.no_grad():
            model(random_ids(2, 1, seed=step), **cache_argument(cache))
    states = SourceStates(cache, CacheGeometry.from_model(model), READERS)
    with torch.no_grad():
        read = [layer.update(layer.keys.new_zeros(2, 2, 0, 16), layer.keys.new_zeros(2, 2, 0, 16)) for layer in copy.deepcopy(cache.layers)]
    assert states.length == 14
    for layer_idx in range(3):  # what attention would read
        torch.testing.assert_close(states[layer_idx], tuple(read[layer_idx]), rtol=0, atol=0)
    whole = read[0][0]
    assert (whole[:, :, :8] == _rounded(whole[:, :, :8])).all()


@pytest.mark.skipif(not hasattr(_Rounding(), "_pending_beam_idx"), reason="older transformers do not reorder quantised states")
def test_quantised_layers_are_read_in_the_order_that_beams_left():
    model, ids = tiny_model("llama"), random_ids(3, 12)
    cache = filled(model, ids, Cache(layers=[_Rounding(residual_length=128) for _ in range(3)]))
    geometry, order = CacheGeometry.from_model(model), torch.tensor([2, 0, 0])
    before = SourceStates(cache, geometry, READERS)[1]
    cache.reorder_cache(order)
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    torch.testing.assert_close(SourceStates(cache, geometry, READERS)[1], tuple(side[order[[1, 0, 2]]] for side in before))


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="older transformers have no such layer")
def test_layers_of_eight_bit_floats():
    model, ids = tiny_model("llama"), random_ids(2, 12)
    cache = filled(model, ids, Cache(layers=[cache_utils.Fp8QuantizedLayer() for _ in range(3)]))
    wanted = [tuple(map(layer._dequantize, (layer._quantized_keys, layer._quantized_values))) for layer in cache.layers]
    assert_reads(cache, model, wanted, 0)
    keys = prefill(model, ids)[0].layers[0].keys
    assert 0 < (SourceStates(cache, CacheGeometry.from_model(model), READERS)[0][0] - keys).abs().max() < 0.1 * keys.abs().max()


@pytest.mark.parametrize("backend,package", [("quanto", "optimum.quanto"), ("hqq", "hqq")])
def test_quantised_caches_of_transformers(backend, package):
    pytest.importorskip(package)
    model, ids = tiny_model("llama", head_dim=32), random_ids(2, 12)
    axis = {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}
    cache = cache_utils.QuantizedCache(backend, model.config, q_group_size=32, residual_length=3, **axis)
    filled(model, ids, cache)
    with torch.no_grad():
        model(random_ids(2, 1), **cache_argument(cache))
        states = SourceStates(cache, CacheGeometry.from_model(model), READERS)
        for layer_idx, layer in enumerate(cache.layers):  # what attention would read
            read = layer.update(*[torch.zeros(2, 2, 0, 32)] * 2)
            torch.testing.assert_close(states[layer_idx], tuple(side.to(states.dtype) for side in read))
    wanted = prefill(model, torch.cat([ids, random_ids(2, 1)], 1))[0].layers[0].keys
    error = (states[0][0] - wanted).norm() / wanted.norm()
    assert 0 < error < 0.2


def test_a_quantised_source_is_what_is_translated():
    model, ids = tiny_model("llama"), random_ids(2, 12)
    cache = filled(model, ids, Cache(layers=[_Rounding(residual_length=128) for _ in range(3)]))
    translated = TranslatedCache(cache, identity_translator(model), sink_tokens=0, recompute_last=0)
    states = SourceStates(cache, CacheGeometry.from_model(model), READERS)
    for layer_idx, layer in enumerate(translated.layers):
        torch.testing.assert_close((layer.keys, layer.values), states[layer_idx], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(translated.layers[0].keys[:, :, :8], prefill(model, ids)[0].layers[0].keys[:, :, :8], atol=1e-3)
