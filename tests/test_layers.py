"""A pending layer and the layer that it becomes are one and the same to whoever asks."""

import copy
import pickle

import pytest
import torch
from builders import a_model, generate, identity_translator, random_ids, tiny_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_crosscache import TranslatedCache
from hf_crosscache.compat import cache_argument, prefill
from hf_crosscache.errors import HandOffError


def handed_over(family, tokens=20, **changes):
    (model, translator), ids = a_model(family), random_ids(2, tokens)
    return TranslatedCache(prefill(model, ids)[0], translator, target_model=model, input_ids=ids, recompute_last=0, **changes)


def new_states(tokens, rows=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 2, tokens, 16, generator=generator) for _ in range(2)]


def address(states):
    return states.untyped_storage().data_ptr()


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_with_room_behind_and_without_the_first_update_gives_the_same(family, tokens):
    """Without gradients new states are written behind the context, with them they are concatenated."""
    keys, values = new_states(tokens)
    found, kept = [], []
    for gradients in (False, True):
        layer = handed_over(family).layers[0]
        with torch.set_grad_enabled(gradients):
            found.append(layer.update(keys, values))
        kept.append((layer.keys, layer.values))
        assert layer.get_seq_length() == 20 + tokens and not layer.is_pending and layer.is_initialized
    torch.testing.assert_close(*found, rtol=0, atol=0)
    torch.testing.assert_close(*kept, rtol=0, atol=0)
    assert torch.equal(found[0][0][:, :, -tokens:], keys) and torch.equal(found[0][1][:, :, -tokens:], values)


@pytest.mark.parametrize("removed", [1, 5, 15, 20])
@pytest.mark.parametrize("family", ["gemma3", "mistral_sliding"])
def test_a_pending_layer_that_is_cropped_gets_the_window_before_the_cut(family, removed):
    model, ids = a_model(family)[0], random_ids(2, 20)
    cache, native = handed_over(family), DynamicCache(config=model.config)
    cache.crop(-removed)
    if removed < 20:
        with torch.no_grad():
            model(ids[:, : 20 - removed], **cache_argument(native))
    for layer_idx, layer in enumerate(cache.layers):
        assert layer.get_seq_length() == 20 - removed and layer.is_pending
        assert layer.keys.shape[2] == min(20 - removed, 7 if layer.is_sliding else 20)
        if removed < 20:
            torch.testing.assert_close(layer.keys, native.layers[layer_idx].keys, rtol=1e-4, atol=1e-4)
            assert layer.get_mask_sizes(4) == native.layers[layer_idx].get_mask_sizes(4)


@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_fork_shares_its_tensors_and_a_deep_copy_does_not(family, pending):
    cache = handed_over(family)
    if not pending:
        list(cache)
    fork, twin = cache.fork(), copy.deepcopy(cache)
    for mine, forked, copied in zip(cache.layers, fork.layers, twin.layers, strict=True):
        assert mine.is_pending == forked.is_pending == copied.is_pending == pending
        assert torch.equal(mine.keys, forked.keys) and torch.equal(mine.values, copied.values)
        assert (address(mine.keys) == address(forked.keys)) == (not pending)  # a pending one is translated for itself
        assert address(mine.keys) != address(copied.keys) and address(mine.values) != address(copied.values)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_fork_of_states_that_wait_shares_them_and_does_not_write_behind_them(family):
    cache = handed_over(family).translate()
    forks = [cache.fork() for _ in range(2)]
    with torch.no_grad():
        read = [fork.layers[1].update(*new_states(3, seed=seed))[0] for seed, fork in enumerate(forks)]
    for seed, keys in enumerate(read):
        assert torch.equal(keys[:, :, -3:], new_states(3, seed=seed)[0])
    assert cache.layers[1].get_seq_length() == 20
    assert address(cache.layers[1].keys) == address(cache.fork().layers[1].keys)
    assert torch.equal(read[0][:, :, :-3], cache.layers[1].keys[:, :, -read[0].shape[2] + 3 :])


@pytest.mark.parametrize("family,kinds", [("llama", "fff"), ("gemma3", "sfs"), ("mistral_sliding", "sss")])
def test_a_plain_layer_holds_the_same_tensors(family, kinds):
    cache = handed_over(family)
    for layer, kind in zip(cache.layers, kinds, strict=True):
        plain = layer.plain()
        assert type(plain) is {"f": DynamicLayer, "s": DynamicSlidingWindowLayer}[kind]
        assert plain.keys is layer.keys and plain.values is layer.values
        assert plain.get_seq_length() == 20 and plain.get_mask_sizes(3) == layer.get_mask_sizes(3)


def test_what_a_layer_had_before_an_extension_stands_before_it():
    (model, translator), ids = a_model("gemma3"), random_ids(2, 30)
    given = {"target_model": model, "input_ids": ids, "recompute_last": 0}
    cache = TranslatedCache(prefill(model, ids[:, :20])[0], translator, **given).translate()
    before = [layer.keys for layer in cache.layers]
    longer, _ = prefill(model, ids[:, :24])
    cache.extend(longer, input_ids=ids, recompute_last=0)
    for layer, base, native in zip(cache.layers, before, longer.layers, strict=True):
        old = 3 if layer.is_sliding else 20  # 4 new ones, of 7 that a window of 8 keeps
        assert torch.equal(layer.keys[:, :, :old], base[:, :, -old:])
        torch.testing.assert_close(layer.keys, native.keys[:, :, -old - 4 :], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_layer_that_is_reset_begins_anew(family):
    cache = handed_over(family)
    layer = cache.layers[0]
    for _ in range(2):
        layer.reset()
        assert layer.get_seq_length() == 0 and layer.get_mask_sizes(3) == (3, 0) and not layer.is_pending
        keys, values = new_states(3)
        assert torch.equal(layer.update(keys, values)[0], keys)


FAILURES = {"memory": torch.OutOfMemoryError("no memory"), "interrupt": KeyboardInterrupt()}


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
@pytest.mark.parametrize("translated", [False, True], ids=["pending", "translated"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_pass_that_ended_in_its_midst_is_never_gone_on_with(family, failure, translated, guarded):
    model, ids = tiny_model(family), random_ids(1, 20)
    translator = identity_translator(model)
    cache = TranslatedCache(prefill(model, ids)[0], translator, target_model=model, input_ids=ids)
    if translated:
        cache.translate()
    before = cache.fork()

    def fail(*_):
        raise FAILURES[failure]

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(type(FAILURES[failure])):
        generate(model, ids, cache)
    handle.remove()
    reads = model if guarded else tiny_model(family)
    uses = [
        lambda: generate(reads, ids, cache),
        lambda: reads(ids[:, 19:], **cache_argument(cache)),
        lambda: generate(reads, ids, cache.fork()),
        cache.to_dynamic_cache,
        lambda: cache.to_static_cache(40),
        lambda: list(cache),
        lambda: copy.deepcopy(cache).batch_repeat_interleave(2),
        lambda: pickle.dumps(cache),
        lambda: cache.crop(-1),
        lambda: cache.extend(prefill(model, random_ids(1, 30))[0]),
    ]
    for use in uses:
        with torch.no_grad(), pytest.raises(HandOffError, match="Target layer 1 holds 19 positions, layer 0 holds 20: a forward pass"):
            use()
    for good in (before, cache):
        if good is cache:
            cache.reset()
        assert torch.equal(generate(model, ids, good), generate(model, ids))


def test_a_pass_that_ended_before_its_first_layer_may_be_made_again():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    cache = TranslatedCache(prefill(model, ids)[0], identity_translator(model), target_model=model, input_ids=ids)
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, ids, cache)
    handle.remove()
    assert torch.equal(generate(model, ids, cache), generate(model, ids))
