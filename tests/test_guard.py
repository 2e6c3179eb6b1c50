"""A model that was given a translated cache stays what it was in everything else, and so do its copies."""

import copy
import inspect
import pickle
from types import MethodType

import pytest
import torch
from builders import generate, identity_translator, random_ids, tiny_model
from transformers import DynamicCache

from hf_crosscache import TranslatedCache
from hf_crosscache.compat import CACHE_ARGUMENT, cache_argument, decoder_of, prefill
from hf_crosscache.errors import HandOffError
from hf_crosscache.guard import _before_forward, guard


def handed_over(model, ids, **changes):
    source_cache, _ = prefill(model, ids)
    return TranslatedCache(source_cache, identity_translator(model), **{"target_model": model, "input_ids": ids, **changes})


def repeating_ids():
    ids = random_ids(1, 24)
    ids[:, 12:] = ids[:, :12]  # something to look up
    return ids


def assert_guarded(model):
    """Prompt lookup and the misuse of a mask are what needs the two halves of a guard."""
    ids = repeating_ids()
    assert torch.equal(generate(model, ids, handed_over(model, ids), prompt_lookup_num_tokens=3), generate(model, ids))
    with pytest.raises(HandOffError, match="covers both"):
        model(ids[:, -1:], attention_mask=torch.ones(1, 3), **cache_argument(handed_over(model, ids)))


def hooks(model):
    return list(decoder_of(model)._forward_pre_hooks.values()).count(_before_forward)


def test_without_a_guard_transformers_is_wrong_without_a_word():
    model, ids = tiny_model("llama"), repeating_ids()
    filled, _ = prefill(model, ids[:, :23])
    assert hooks(model) == 0
    assert not torch.equal(generate(model, ids, filled, prompt_lookup_num_tokens=3), generate(model, ids))


def test_it_is_attached_once():
    model = tiny_model("llama")
    for _ in range(3):
        guard(model)
    assert hooks(model) == 1
    assert isinstance(model.prepare_inputs_for_generation.__wrapped__, MethodType)
    assert_guarded(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_model_is_guarded_by_itself(duplicate):
    model, ids = tiny_model("llama"), random_ids(1, 20)
    guard(model)
    twin = duplicate(model)
    assert twin.prepare_inputs_for_generation.__wrapped__.__self__ is twin
    assert hooks(twin) == 1
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)  # so that the copy answers otherwise than the model
    assert not torch.equal(generate(twin, ids), generate(model, ids))
    assert_guarded(twin)
    assert_guarded(model)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"assisted": True}, {"filled": True}])
def test_other_caches_go_by_a_guard_unseen(settings):
    model, other, ids = tiny_model("llama"), tiny_model("llama"), repeating_ids()
    guard(model)
    found = []
    for one in (model, other):
        mode = {"assistant_model": tiny_model("llama", seed=7)} if settings.get("assisted") else settings
        cache = prefill(one, ids[:, :8])[0] if settings.get("filled") else DynamicCache()
        found.append(generate(one, ids, cache, **{name: value for name, value in mode.items() if name != "filled"}))
    assert torch.equal(*found)


def test_generate_still_knows_which_arguments_a_model_takes():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    before = inspect.signature(model.prepare_inputs_for_generation)
    guard(model)
    assert inspect.signature(model.prepare_inputs_for_generation) == before
    assert generate(model, ids, handed_over(model, ids), logits_to_keep=1).shape == (1, 32)
    with pytest.raises(ValueError, match="not used by the model.*nonsense"):
        generate(model, ids, handed_over(model, ids), nonsense=1)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_model_that_overrides_how_inputs_are_prepared(after):
    model, calls = tiny_model("llama"), []
    if after:
        guard(model)
    own = model.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        calls.append(input_ids.shape)
        return own(input_ids, **kwargs)

    model.prepare_inputs_for_generation = MethodType(prepare_inputs_for_generation, model)
    if not after:
        assert_guarded(model)
    else:
        ids = repeating_ids()
        assert torch.equal(generate(model, ids, handed_over(model, ids), prompt_lookup_num_tokens=3), generate(model, ids))
    assert calls


def test_a_cache_given_by_position_is_seen():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    at = list(inspect.signature(model.forward).parameters).index(CACHE_ARGUMENT)
    before = [None] * (at - 1)
    with torch.no_grad():
        found = model(ids[:, 19:], *before, handed_over(model, ids)).logits
        torch.testing.assert_close(found[:, -1], model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)
        with pytest.raises(HandOffError, match="do not start at position 19"):
            model(ids, *before, handed_over(model, ids))
        with pytest.raises(HandOffError, match="do not start at position 19"):
            decoder_of(model)(ids, *before, handed_over(model, ids))


def test_the_base_model_as_a_target():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    decoder = decoder_of(model)
    guard(decoder)
    with pytest.raises(HandOffError, match="use_cache=False"):
        decoder(ids[:, 19:], use_cache=False, **cache_argument(handed_over(model, ids)))


def test_replicas_of_data_parallel_are_refused():
    model, ids = tiny_model("llama"), random_ids(2, 20)
    cache = handed_over(model, ids)
    replica = decoder_of(model)._replicate_for_data_parallel()
    with pytest.raises(HandOffError, match="nn.DataParallel gives one translated cache to all its replicas"):
        replica(ids[:1, 19:], **cache_argument(cache))
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


@pytest.mark.parametrize("settings", [{"prompt_lookup_num_tokens": 3}, {"assisted": True}])
def test_a_prompt_that_cannot_be_told_from_what_follows_it(settings):
    """Where generate has dropped a mask of ones, as it does from transformers 5.18 on."""
    model, ids = tiny_model("llama"), repeating_ids()
    helper = {"assistant_model": tiny_model("llama", seed=7)} if settings.get("assisted") else settings
    cache = handed_over(model, ids, input_ids=None, sink_tokens=0)
    if CACHE_ARGUMENT == "cache":
        with pytest.raises(HandOffError, match="cannot be seen: pass input_ids= to TranslatedCache"):
            generate(model, ids, cache, **helper)
    else:
        assert torch.equal(generate(model, ids, cache, **helper), generate(model, ids))
    assert torch.equal(generate(model, ids, handed_over(model, ids, input_ids=None, sink_tokens=0)), generate(model, ids))
