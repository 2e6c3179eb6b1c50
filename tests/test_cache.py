"""A TranslatedCache generates what the model alone generates, translates on first use, and refuses what it cannot do right."""

import copy

import pytest
import torch
from builders import FAMILIES, TOKENS, generate, identity_translator, planted_twin, random_ids, tiny_model
from transformers import DynamicCache

from hf_crosscache import TranslatedCache
from hf_crosscache.compat import CACHE_ARGUMENT, cache_argument, prefill
from hf_crosscache.errors import GeometryError, HandOffError, IdentityError
from hf_crosscache.identity import weights_digest
from hf_crosscache.native_states import Opening


def handed_over(model, ids, context=None, **changes):
    source_cache, _ = prefill(model, ids[:, :context])
    return TranslatedCache(source_cache, identity_translator(model), **{"target_model": model, "input_ids": ids, **changes})


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
@pytest.mark.parametrize("family", FAMILIES)
def test_self_translation_generates_what_the_model_generates(family, settings):
    model, ids = tiny_model(family), random_ids(2, 24)
    assert torch.equal(generate(model, ids, handed_over(model, ids), **settings), generate(model, ids, **settings))


@pytest.mark.parametrize("context,recompute_last", [(24, 1), (24, 7), (24, 23), (10, 0), (10, 1), (23, 0), (3, 1), (2, 1)])
def test_prompt_longer_than_or_equal_to_the_context(context, recompute_last):
    model, ids = tiny_model("qwen2"), random_ids(2, 24)
    cache = handed_over(model, ids, context, recompute_last=recompute_last)
    assert cache.get_seq_length() == context - recompute_last
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


def test_hybrid_layers_with_two_ropes(examples):
    from builders import pocket_model

    model = pocket_model("gemma3")
    ids = torch.randint(2, 3000, (1, 300), generator=torch.Generator().manual_seed(0))
    assert torch.equal(generate(model, ids, handed_over(model, ids)), generate(model, ids))


def test_generation_depends_on_the_cache():
    model, ids = tiny_model("llama"), random_ids(2, 24)
    wrong_source, _ = prefill(model, random_ids(2, 24, seed=9))
    cache = TranslatedCache(wrong_source, identity_translator(model), target_model=model, input_ids=ids)
    assert not torch.equal(generate(model, ids, cache), generate(model, ids))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_planted_twin_reads_its_twin(seed):
    model = tiny_model("llama", num_key_value_heads=4, num_attention_heads=8)
    twin, permutations = planted_twin(model, seed)
    assert any(order != sorted(order) for order in permutations)
    ids = random_ids(2, 20)
    torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)


def test_layers_are_translated_on_first_use_in_order_and_once():
    model, ids = tiny_model("llama"), random_ids(1, 16)
    cache = handed_over(model, ids)
    calls = []
    translate = cache._hand_off._translate
    cache._hand_off._translate = lambda layers, *rest: calls.append(list(layers)) or translate(layers, *rest)
    assert cache.get_seq_length() == 15 and cache.get_mask_sizes(3, 0) == (18, 0)
    assert len(cache) == 3 and cache.is_initialized and not cache.is_compileable and calls == []
    generate(model, ids, cache)
    assert calls == [[0], [1], [2]]


def test_source_layers_are_let_go_when_no_target_layer_needs_them(translator, small, large):
    ids = torch.randint(2, 4000, (1, 40))
    source_cache, _ = prefill(small, ids)
    cache = TranslatedCache(source_cache, translator, target_model=large, input_ids=ids)
    held = [set(cache._hand_off.source.held_layers)]
    for layer_idx in range(len(cache)):
        assert cache.layers[layer_idx].keys.shape == (1, 2, 39, 32)
        held.append(set(cache._hand_off.source.held_layers))
        later = set().union(*(translator.source_layers(i) for i in range(layer_idx + 1, len(cache))))
        assert held[-1] == later
    assert held[-1] == set()
    assert source_cache.layers[0].keys.shape[2] == 40  # the caller's cache is as it was


def test_first_positions_are_the_targets_own_and_the_source_is_not_touched(translator, small, large):
    ids = torch.randint(2, 4000, (2, 40))
    source_cache, _ = prefill(small, ids)
    before = [layer.keys.clone() for layer in source_cache.layers]
    cache = TranslatedCache(source_cache, translator, target_model=large, input_ids=ids)
    native, _ = prefill(large, ids)
    for layer_idx, layer in enumerate(cache.layers):
        torch.testing.assert_close(layer.keys[:, :, :4], native.layers[layer_idx].keys[:, :, :4], rtol=1e-4, atol=1e-4)
        if layer_idx:
            assert not torch.allclose(layer.values[:, :, 4:], native.layers[layer_idx].values[:, :, 4:39], atol=1e-3)
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, source_cache.layers, strict=True))


def test_after_translation_it_is_a_dynamic_cache_that_holds_the_same_tensors():
    model, ids = tiny_model("qwen3"), random_ids(3, 20)
    cache, native = handed_over(model, ids, 20), prefill(model, ids[:, :19])[0]
    order = torch.tensor([2, 0, 1])
    for operate in (
        lambda c: c.reorder_cache(order),
        lambda c: c.batch_repeat_interleave(2),
        lambda c: c.batch_select_indices(torch.tensor([0, 3, 5])),
        lambda c: c.crop(-4),
    ):
        operate(cache)
        operate(native)
        assert cache.get_seq_length() == native.get_seq_length()
        for mine, theirs in zip(cache, native.layers, strict=True):
            torch.testing.assert_close(mine[0], theirs.keys, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine[1], theirs.values, rtol=1e-4, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.is_initialized
    pending = handed_over(model, ids)
    pending.reset()
    assert pending.get_seq_length() == 0 and torch.equal(generate(model, ids, pending), generate(model, ids))


def test_a_copy_made_before_use_serves_another_continuation():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    cache = handed_over(model, ids, 12, recompute_last=0)
    twin = copy.deepcopy(cache)
    other = torch.cat([ids[:, :12], random_ids(1, 6, seed=5)], 1)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))
    assert twin.get_seq_length() == 12
    assert torch.equal(generate(model, other, twin), generate(model, other))


def test_generation_goes_on_turn_after_turn():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    cache = handed_over(model, ids)
    first = generate(model, ids, cache)
    longer = torch.cat([first, random_ids(1, 5, seed=2)], 1)
    assert torch.equal(generate(model, longer, cache), generate(model, longer))


def test_bfloat16_equals_a_native_cache_with_the_same_split():
    model, ids = tiny_model("llama").to(torch.bfloat16), random_ids(1, 24)
    native = DynamicCache()
    model(ids[:, :23], **cache_argument(native))
    cache = handed_over(model, ids, 23, recompute_last=0, sink_tokens=0)
    for mine, theirs in zip(cache, native.layers, strict=True):
        assert mine[0].dtype == torch.bfloat16
        assert (mine[0] != theirs.keys).float().mean() < 5e-3  # strip and rotate in float32, one cast
    assert torch.equal(generate(model, ids, cache), generate(model, ids, native))


def test_opening_constants_serve_where_the_context_begins_with_them():
    model, ids = tiny_model("llama"), random_ids(2, 20)
    ids[:, :2] = torch.tensor([7, 8])
    native, _ = prefill(model, ids[:1, :2])
    opening = Opening((7, 8), tuple(c.keys for c in native.layers), tuple(c.values for c in native.layers))
    translator = identity_translator(model, opening=opening, sink_tokens=2)
    source_cache, _ = prefill(model, ids)
    cache = TranslatedCache(source_cache, translator, input_ids=ids)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))
    with pytest.raises(HandOffError, match="does not begin with the tokens"):
        TranslatedCache(source_cache, translator, input_ids=ids + 1)
    with pytest.raises(HandOffError, match="without input_ids"):
        TranslatedCache(source_cache, translator)
    with pytest.raises(HandOffError, match="carries states for 2"):
        TranslatedCache(source_cache, translator, input_ids=ids, sink_tokens=4)


def test_without_a_model_or_an_opening_it_says_to_pass_the_model():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    source_cache, _ = prefill(model, ids)
    with pytest.raises(HandOffError, match="Pass target_model= and input_ids="):
        TranslatedCache(source_cache, identity_translator(model), input_ids=ids)
    assert TranslatedCache(source_cache, identity_translator(model), sink_tokens=0).get_seq_length() == 19


def test_a_first_step_that_leaves_the_cache_unused_is_refused():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    with pytest.raises(HandOffError, match="recompute_last=1 at least"):
        generate(model, ids, handed_over(model, ids, recompute_last=0))


@pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="older transformers hand no positions to the cache")
def test_positions_that_do_not_continue_the_cache_are_refused():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    cache = handed_over(model, ids)
    with pytest.raises(HandOffError, match="do not start at position 19"):
        model(ids[:, -1:], position_ids=torch.tensor([[3]]), **cache_argument(cache))


def test_wrong_inputs_are_refused_at_construction():
    model, ids = tiny_model("llama"), random_ids(2, 20)
    translator = identity_translator(model)
    source_cache, _ = prefill(model, ids)
    with pytest.raises(HandOffError, match="recompute_last = 20"):
        TranslatedCache(source_cache, translator, target_model=model, input_ids=ids, recompute_last=20)
    with pytest.raises(HandOffError, match=r"input_ids of shape \[2, at least 20\]"):
        TranslatedCache(source_cache, translator, target_model=model, input_ids=ids[:, :10])
    with pytest.raises(HandOffError, match="input_ids of shape"):
        TranslatedCache(source_cache, translator, target_model=model, input_ids=ids[:1])
    with pytest.raises(IdentityError, match="other weights"):
        TranslatedCache(source_cache, translator, target_model=tiny_model("llama", seed=3), input_ids=ids)
    other = tiny_model("llama", num_hidden_layers=2)
    with pytest.raises(GeometryError, match="3 layers expected, 2 found"):
        TranslatedCache(source_cache, translator, target_model=other, input_ids=ids)
    with pytest.raises(GeometryError, match="has 2 layers; the translator's source has 3"):
        TranslatedCache(prefill(other, ids)[0], translator, target_model=model, input_ids=ids)


def test_padded_batches_without_a_mask_are_refused():
    model, ids = tiny_model("llama"), random_ids(2, 20)
    ids[1, :5] = model.config.pad_token_id
    with pytest.raises(HandOffError, match="pass attention_mask="):
        handed_over(model, ids)


def test_a_source_cache_that_is_not_finite_is_refused_with_the_layer_named():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    source_cache, _ = prefill(model, ids)
    source_cache.layers[1].values[0, 0, 9, 0] = float("nan")
    cache = TranslatedCache(source_cache, identity_translator(model), target_model=model, input_ids=ids)
    with pytest.raises(HandOffError, match="Target layer 1: translated values are not finite"):
        generate(model, ids, cache)
    assert cache.layers[1].is_pending and cache.get_seq_length(1) == 19


def test_a_batch_that_is_not_a_multiple_is_refused():
    model = tiny_model("llama")
    cache = handed_over(model, random_ids(2, 20))
    with pytest.raises(HandOffError, match="holds 2 sequences, the target reads 3"):
        model(random_ids(3, 1), **cache_argument(cache))


def test_both_spellings_of_the_argument_work():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    names = {"past_key_values", CACHE_ARGUMENT}
    with pytest.warns() if len(names) > 1 else torch.no_grad():
        for name in names:
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                **{name: handed_over(model, ids)},
            )
            assert torch.equal(output, generate(model, ids))


def test_a_plain_forward_pass_with_gradients_works():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    logits = model(ids[:, 19:], **cache_argument(handed_over(model, ids))).logits
    torch.testing.assert_close(logits[:, -1], model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)
    logits.sum().backward()


def test_states_that_cannot_be_appended_leave_the_context():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    cache = handed_over(model, ids)
    layer, keys = cache.layers[0], torch.randn(1, 2, 1, 16)
    with torch.no_grad(), pytest.raises(RuntimeError):
        layer.update(keys, torch.randn(1, 2, 3, 16))
    assert layer.get_seq_length() == 19


def test_a_compiled_model_takes_a_pending_cache():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    compiled = torch.compile(model, backend="eager")
    assert weights_digest(compiled) == weights_digest(model)
    assert torch.equal(generate(compiled, ids, handed_over(model, ids, target_model=compiled)), generate(model, ids))
    with torch.no_grad():
        found = compiled(ids[:, 19:], position_ids=torch.tensor([[19]]), **cache_argument(handed_over(model, ids))).logits
        torch.testing.assert_close(found[:, -1], model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)


def poisoned(model, ids, layer_idx):
    """A cache of a source that holds NaN in one layer."""
    source_cache, _ = prefill(model, ids)
    source_cache.layers[layer_idx].values[0, 0, 9, 0] = float("nan")
    return TranslatedCache(source_cache, identity_translator(model), target_model=model, input_ids=ids)


def test_what_is_not_finite_stays_refused():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    cache = poisoned(model, ids, 1)
    refused = pytest.raises(HandOffError, match="Target layer 1: translated values are not finite")
    with refused:
        generate(model, ids, cache)
    for use in (lambda: cache.layers[1].keys, lambda: list(cache), cache.translate, lambda: model(ids[:, -1:], **cache_argument(cache))):
        with refused:
            use()


@pytest.mark.parametrize("layer_idx", [0, 1, 2])
def test_flags_that_are_read_late_are_read_all_the_same(monkeypatch, layer_idx):
    """As on a device: groups of two layers, whose flags are looked at when the second is taken."""
    monkeypatch.setattr("hf_crosscache.translation.PendingTranslation._at_once", lambda *_: 2)
    monkeypatch.setattr("hf_crosscache.translation._reads_flags_at_once", lambda device: False)
    model, ids = tiny_model("llama"), random_ids(1, 20)
    assert torch.equal(generate(model, ids, handed_over(model, ids)), generate(model, ids))
    refused = pytest.raises(HandOffError, match=f"Target layer {layer_idx}")
    uses = [lambda c: generate(model, ids, c), list, lambda c: c.translate(), lambda c: c.layers[layer_idx].keys]
    for use in uses:
        cache = poisoned(model, ids, layer_idx)
        with refused:
            use(cache)
        with refused:
            cache.layers[2].values.sum()
    cache = poisoned(model, ids, layer_idx)
    with torch.no_grad():  # a pass that ends after the first layer, and the next one
        cache.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), 0)
        if layer_idx < 2:
            with refused:
                cache.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), 0)


def test_a_dtype_that_cannot_hold_the_states_is_refused():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    source_cache, _ = prefill(model, ids)
    for layer in source_cache.layers:
        layer.values *= 1e6
    cache = TranslatedCache(source_cache, identity_translator(model), target_model=model, input_ids=ids).translate()
    with torch.no_grad(), pytest.raises(HandOffError, match="Target layer 0: translated values are not finite"):
        cache.update(torch.zeros(1, 2, 1, 16).half(), torch.zeros(1, 2, 1, 16).half(), 0)
