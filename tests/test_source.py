"""Source caches of several kinds are read alike; those that have lost what is needed are refused."""

import copy

import pytest
import torch
from builders import random_ids, tiny_model
from transformers import DynamicCache, StaticCache

from hf_crosscache import CacheGeometry
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
