"""What became of a hand-off is told, and a hand-off that went wrong costs the time of a prefill, not the answer."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from builders import a_model, generate, random_ids

from hf_crosscache import TranslatedCache
from hf_crosscache.compat import cache_argument, prefill, states_of
from hf_crosscache.errors import HandOffError, HandOffWarning

FAMILIES = ["llama", "gemma3"]


def with_reach(translator, size):
    layers = len(translator.keys)
    return replace(translator, reach={"keys": torch.full((layers,), size), "values": torch.full((layers,), size)})


def damaged(model, ids, layer_idx, value, role="values", **given):
    cache, _ = prefill(model, ids, **given)
    getattr(cache.layers[layer_idx], role)[0, 0, -3, 0] = value
    return cache


DAMAGE = {"nan": (float("nan"), "not finite"), "inf": (float("inf"), "not finite"), "wild": (1e6, "100 times as large")}


def falls_back_once(layer_idx, reason):
    return pytest.warns(HandOffWarning, match=f"target prefills the context itself.*Target layer {layer_idx}: .*{reason}")


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("layer_idx", [0, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_that_must_not_be_used_are_left_to_the_target(family, layer_idx, damage, settings):
    (model, translator), ids = a_model(family), random_ids(2, 24)
    value, reason = DAMAGE[damage]
    cache = TranslatedCache(
        damaged(model, ids, layer_idx, value), with_reach(translator, 10.0), target_model=model, input_ids=ids, on_error="prefill"
    )
    assert cache.report().fallback_reason is None
    with falls_back_once(layer_idx, reason) as caught:
        found = generate(model, ids, cache, **settings)
    assert sum(issubclass(one.category, HandOffWarning) for one in caught) == 1
    assert torch.equal(found, generate(model, ids, **settings))
    report = cache.report()
    assert reason in report.fallback_reason and f"layer {layer_idx}" in report.fallback_reason
    assert (report.native_tokens, report.translated_tokens, report.fallen_back_tokens, report.left_to_target) == (0, 0, 23, 1)
    assert report.native_seconds > 0
    with warnings.catch_warnings():  # it goes on as any cache
        warnings.simplefilter("error", HandOffWarning)
        if not settings:
            assert torch.equal(generate(model, torch.cat([found, ids], 1), cache), generate(model, torch.cat([found, ids], 1)))


@pytest.mark.parametrize("damage", DAMAGE)
def test_or_raised_where_that_is_asked_for(damage):
    (model, translator), ids = a_model("llama"), random_ids(2, 24)
    value, reason = DAMAGE[damage]
    cache = TranslatedCache(damaged(model, ids, 1, value), with_reach(translator, 10.0), target_model=model, input_ids=ids)
    with pytest.raises(HandOffError, match=f"Target layer 1: translated values are .*{reason}"):
        generate(model, ids, cache)


def test_states_as_large_as_in_the_fit_are_not_wild():
    (model, translator), ids = a_model("llama"), random_ids(2, 24)
    largest = max(layer.values.abs().max().item() for layer in prefill(model, ids)[0].layers)
    for size, refused in ((1.0, False), (largest / 300, True)):
        cache = TranslatedCache(prefill(model, ids)[0], with_reach(translator, size), target_model=model, input_ids=ids)
        if refused:
            with pytest.raises(HandOffError, match="100 times as large"):
                cache.translate()
        else:
            assert torch.equal(generate(model, ids, cache), generate(model, ids))


USES = {
    "translate": lambda c: c.translate(),
    "iterate": list,
    "to_dynamic_cache": lambda c: c.to_dynamic_cache(),
    "reorder": lambda c: c.reorder_cache(torch.tensor([0, 1])),
    "fork": lambda c: c.fork().translate(),
    "update": lambda c: None,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_asks_first(family, use):
    (model, translator), ids = a_model(family), random_ids(2, 24)
    cache = TranslatedCache(damaged(model, ids, 2, float("nan")), translator, target_model=model, input_ids=ids, on_error="prefill")
    if use != "update":
        with falls_back_once(2, "not finite"):
            USES[use](cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if use in ("update", "fork") else "error", HandOffWarning)
        assert torch.equal(generate(model, ids, cache), generate(model, ids))


def test_a_layer_that_is_read_first_is_not_used_where_a_later_one_is_damaged():
    (model, translator), ids = a_model("gemma3"), random_ids(2, 24)
    cache = TranslatedCache(damaged(model, ids, 2, float("nan")), translator, target_model=model, input_ids=ids, on_error="prefill")
    with pytest.raises(HandOffError, match="Target layer 2"):
        cache.layers[0].keys.sum()
    with falls_back_once(2, "not finite"):
        assert torch.equal(generate(model, ids, cache), generate(model, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_fall_back_too(family):
    (model, translator), ids = a_model(family), random_ids(3, 24)
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 5, 7)):
        ids[row, :pads], mask[row, :pads] = model.config.pad_token_id, 0
    source_cache = damaged(model, ids, 1, float("nan"), attention_mask=mask)
    cache = TranslatedCache(source_cache, translator, target_model=model, input_ids=ids, attention_mask=mask, on_error="prefill")
    with falls_back_once(1, "not finite"):
        found = generate(model, ids, cache, attention_mask=mask)
    assert torch.equal(found, generate(model, ids, attention_mask=mask))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_extension_of_a_padded_batch_falls_back_too(family):
    (model, translator), ids = a_model(family), random_ids(2, 30)
    mask = torch.ones_like(ids)
    ids[1, :7], mask[1, :7] = model.config.pad_token_id, 0
    given = {"input_ids": ids, "attention_mask": mask}
    source_cache, _ = prefill(model, ids[:, :14], attention_mask=mask[:, :14])
    cache = TranslatedCache(source_cache, translator, target_model=model, on_error="prefill", **given)
    cache.extend(damaged(model, ids, 1, float("nan"), attention_mask=mask), **given)
    with falls_back_once(1, "not finite"):
        found = generate(model, ids, cache, attention_mask=mask)
    assert torch.equal(found, generate(model, ids, attention_mask=mask))
    assert cache.report().fallen_back == ((13, 29),)


def test_an_extension_behind_fewer_than_the_first_tokens_gets_these_from_the_target():
    (model, translator), ids = a_model("llama"), random_ids(1, 20)
    wrong = replace(translator, values=tuple(replace(layer, mean_y=layer.mean_y + 1) for layer in translator.values))
    cache = TranslatedCache(prefill(model, ids[:, :3])[0], wrong, target_model=model, input_ids=ids)
    cache.extend(prefill(model, ids)[0], input_ids=ids)
    off = [
        (layer.values - own).abs().amax((0, 1, 3))
        for layer, (_, own) in zip(cache.layers, states_of(prefill(model, ids[:, :19])[0]), strict=True)
    ]
    assert all(layer[:4].max() < 1e-4 and layer[4:].min() > 0.9 for layer in off)
    assert (cache.report().native_tokens, cache.report().translated_tokens) == (4, 15)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_extension_falls_back_by_itself(family):
    (model, translator), ids = a_model(family), random_ids(2, 30)
    given = {"target_model": model, "input_ids": ids}
    cache = TranslatedCache(prefill(model, ids[:, :12])[0], translator, recompute_last=0, on_error="prefill", **given)
    longer, _ = prefill(model, ids[:, :28])
    longer.layers[1].keys[1, 1, 20, 3] = float("nan")
    cache.extend(longer, input_ids=ids)
    with falls_back_once(1, "not finite"):
        assert torch.equal(generate(model, ids, cache), generate(model, ids))
    report = cache.report()
    assert (report.native_tokens, report.translated_tokens, report.fallen_back_tokens, report.left_to_target) == (4, 8, 15, 1)


def test_what_the_target_read_itself_is_extended_too():
    (model, translator), ids = a_model("gemma3"), random_ids(2, 30)
    cache = TranslatedCache(damaged(model, ids[:, :12], 1, float("nan")), translator, target_model=model, input_ids=ids, on_error="prefill")
    with falls_back_once(1, "not finite"):
        cache.translate()
    cache.extend(prefill(model, ids)[0], input_ids=ids)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))
    report = cache.report()
    assert (report.native_tokens, report.translated_tokens, report.fallen_back_tokens, report.left_to_target) == (0, 18, 11, 1)


def test_falling_back_needs_a_model_and_its_tokens():
    (model, translator), ids = a_model("llama"), random_ids(1, 24)
    source_cache, _ = prefill(model, ids)
    for given in ({}, {"target_model": model}, {"input_ids": ids}):
        with pytest.raises(HandOffError, match='on_error="prefill" needs target_model= and input_ids='):
            TranslatedCache(source_cache, translator, sink_tokens=0, on_error="prefill", **given)
    cache = TranslatedCache(source_cache, translator, target_model=model, input_ids=ids, on_error="prefill")
    with pytest.raises(HandOffError, match='on_error="prefill" needs input_ids='):
        cache.extend(prefill(model, random_ids(1, 30))[0])
    with pytest.raises(HandOffError, match='on_error="ignore": "raise" or "prefill" expected'):
        TranslatedCache(source_cache, translator, target_model=model, input_ids=ids, on_error="ignore")


def recovered(translator, share):
    return replace(translator, summary={"evaluation": {"arms": [{"arm": "translated", "context_recovered": share}]}})


def test_a_translator_that_keeps_little_is_warned_of():
    (model, translator), ids = a_model("llama"), random_ids(1, 24)
    source_cache, _ = prefill(model, ids)
    given = {"target_model": model, "input_ids": ids}
    with pytest.warns(HandOffWarning, match=r"kept 0\.30 of the context.*min_context_recovered = 0\.5"):
        TranslatedCache(source_cache, recovered(translator, 0.3), **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HandOffWarning)
        TranslatedCache(source_cache, recovered(translator, 0.6), **given)
        TranslatedCache(source_cache, recovered(translator, 0.3), min_context_recovered=0.2, **given)
        TranslatedCache(source_cache, translator, **given)
        TranslatedCache(source_cache, replace(translator, summary={"evaluation": {"arms": []}}), **given)


@pytest.mark.parametrize("changes", [{}, {"recompute_last": 7}, {"recompute_last": 22}, {"sink_tokens": 0}], ids=str)
def test_the_positions_add_up_to_the_context(changes):
    (model, translator), ids = a_model("llama"), random_ids(2, 24)
    cache = TranslatedCache(prefill(model, ids)[0], translator, target_model=model, input_ids=ids, **changes)
    report = cache.report()
    assert report.native_tokens + report.translated_tokens + report.left_to_target == 24
    assert report.left_to_target == changes.get("recompute_last", 1) and report.native_tokens <= 4
    assert report.translated_layers == 0 and report.translation_seconds == 0
    generate(model, ids, cache)
    assert report.translated_layers == 3 and report.translation_seconds > 0 and report.fallback_reason is None
    assert json.loads(json.dumps(report.to_dict()))["translated_tokens"] == report.translated_tokens
    assert report.native_tokens == 0 or report.native_seconds > 0


def test_extensions_and_forks_have_reports_of_their_own():
    (model, translator), ids = a_model("llama"), random_ids(1, 30)
    given = {"target_model": model, "input_ids": ids}
    cache = TranslatedCache(prefill(model, ids[:, :12])[0], translator, **given).translate()
    early = cache.fork()
    with torch.no_grad():
        model(ids[:, 11:14], attention_mask=torch.ones(1, 14), **cache_argument(cache))
    cache.extend(prefill(model, ids)[0], input_ids=ids)
    report, fork = cache.report(), cache.fork()
    assert (report.native_tokens, report.translated_tokens, report.left_to_target) == (4, 7 + 15, 1)  # 3 the target read in between
    assert (early.report().translated_tokens, early.report().translated_layers) == (7, 3)
    assert early.report().translation_seconds > 0
    fork.translate()
    assert (fork.report().translated_tokens, fork.report().translated_layers, report.translated_layers) == (22, 6, 3)
    assert fork.report().translation_seconds > report.translation_seconds > 0


def test_a_fork_of_what_fell_back_says_so_too():
    (model, translator), ids = a_model("llama"), random_ids(1, 24)
    cache = TranslatedCache(damaged(model, ids, 1, float("nan")), translator, target_model=model, input_ids=ids, on_error="prefill")
    with falls_back_once(1, "not finite"):
        cache.translate()
    assert cache.fork().report().to_dict() == cache.report().to_dict()


def test_a_pending_cache_that_is_cropped_into_its_first_tokens():
    (model, translator), ids = a_model("llama"), random_ids(1, 24)
    cache = TranslatedCache(prefill(model, ids)[0], translator, target_model=model, input_ids=ids)
    cache.crop(-21)
    assert (cache.get_seq_length(), cache.report().translated_tokens) == (2, 0)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))
