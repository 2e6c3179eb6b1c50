"""From texts to generation: the planted pair that must be exact, and the pocket pair that must be useful."""

import pytest
import torch
from builders import generate, planted_twin, pocket_model, random_ids, tiny_model

from hf_crosscache import Calibration, TranslatedCache, TranslatorFitter, evaluate_translator, fit_translator
from hf_crosscache.calibration import layer_states
from hf_crosscache.compat import cache_argument, prefill
from hf_crosscache.identity import ModelIdentity
from hf_crosscache.states import PairedStates
from hf_crosscache.translator import CacheTranslator


def fitted(model, twin):
    """A translator from a model to its twin, fitted on random tokens with one source head for each target head."""
    sides = [ModelIdentity.from_model(m) for m in (model, twin)]
    fitter = TranslatorFitter(sides[0].geometry, sides[1].geometry, k=1, candidates=2)

    def states(seed):
        ids = random_ids(8, 64, seed)
        return PairedStates(*(layer_states(prefill(m, ids)[0], s.geometry, 4) for m, s in zip((model, twin), sides, strict=True)))

    for gather in (fitter.screen, fitter.update):
        for seed in range(8):
            gather(states(seed), "validation" if seed < 2 else "fit")
        fitter.choose_candidates()
    maps = fitter.fit()
    return CacheTranslator(*sides, maps.keys, maps.values, r2=maps.r2)


@pytest.fixture(scope="module")
def planted():
    """A model of four heads and its twin of the same function, with a translator fitted from the one to the other."""
    model = tiny_model("llama", hidden_size=128, num_attention_heads=8, num_key_value_heads=4)
    twin, permutations = planted_twin(model)
    return model, twin, permutations, fitted(model, twin)


def test_the_fit_finds_the_planted_permutation(planted):
    _, _, permutations, translator = planted
    for role in (translator.keys, translator.values):
        found = [[(block.layer, block.head) for (block,) in layer_map.blocks] for layer_map in role]
        assert found == [[(layer, head) for head in order] for layer, order in enumerate(permutations)]


def test_the_fit_explains_the_planted_twin(planted):
    assert all(r2.min() > 0.999 for r2 in planted[3].r2.values())


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True}])
def test_the_twin_goes_on_as_if_it_had_read_the_context(planted, settings):
    model, twin, _, translator = planted
    ids = random_ids(3, 40, seed=77)
    cache = TranslatedCache(prefill(model, ids)[0], translator, target_model=twin, input_ids=ids)
    settings = {**settings, "max_new_tokens": 20, "attention_mask": torch.ones_like(ids)}
    torch.manual_seed(0)
    native = twin.generate(ids, **settings)
    torch.manual_seed(0)
    assert torch.equal(twin.generate(ids, **settings, **cache_argument(cache)), native)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_a_model_whose_layers_share_states_is_fitted_and_handed_over(family):
    model, ids = tiny_model(family), random_ids(3, 40, seed=77)
    cache = TranslatedCache(prefill(model, ids)[0], fitted(model, model), target_model=model, input_ids=ids)
    assert len(cache) == 3
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


@pytest.mark.parametrize("source,target", [("qwen3-large", "qwen3-small"), ("llama", "qwen3-large"), ("qwen3-small", "llama")])
def test_pocket_pairs_of_other_heads_sizes_and_depths_recover_context(source, target, tokenizer, texts):
    models = pocket_model(source), pocket_model(target)
    calibration = Calibration(*models, tokenizer, texts, tokens=60_000, window=256, batch_size=16)
    evaluation = evaluate_translator(
        fit_translator(calibration, k=4), *models, tokenizer, texts, windows=32, context_tokens=160, continuation_tokens=64
    )
    translated, control = evaluation["translated"], evaluation["wrong_document"]
    assert translated.context_recovered > 0.2 and control.context_recovered < 0.15
    assert translated.context_recovered_low > control.context_recovered_high


def test_native_first_tokens_cost_nothing_and_more_heads_recover_more(calibration, translator, small, large, tokenizer, texts):
    settings = {"windows": 32, "context_tokens": 160, "continuation_tokens": 64}
    one = evaluate_translator(fit_translator(calibration, k=1), small, large, tokenizer, texts, **settings)
    six = evaluate_translator(translator, small, large, tokenizer, texts, **settings)
    assert six["translated"].context_recovered > one["translated"].context_recovered
