"""Both models read the same tokens; what the fitter sees is what they cache, pre-RoPE, without the first positions."""

import pytest
import torch
from builders import MODELS, pocket_model, tiny_model
from transformers import AutoTokenizer

from hf_crosscache import CacheGeometry, Calibration, fit_translator
from hf_crosscache.calibration import layer_states
from hf_crosscache.compat import prefill
from hf_crosscache.errors import CalibrationError


def test_states_are_those_of_both_models_on_the_same_tokens(calibration, small, large):
    states, split = next(iter(calibration.states("test")))
    ids = calibration.windows["fit"][: calibration.batch_size]
    assert split == "fit"
    for model, side in ((small, states.source), (large, states.target)):
        cache, _ = prefill(model, ids)
        torch.testing.assert_close(side.values[3], cache.layers[3].values[:, :, 4:])
        alone, _ = prefill(model, ids[:, 9:10])
        torch.testing.assert_close(side.of_role("keys").stripped(0)[:, :, 5:6], alone.layers[0].keys, rtol=1e-4, atol=1e-4)


def test_tokens_bound_what_is_read_and_both_splits_are_in_it(calibration):
    seen = {"fit": 0, "validation": 0}
    for states, split in calibration.states("test", tokens=10_000):
        seen[split] += states.source.keys[0].shape[0] * calibration.window
    assert seen["validation"] > 0 and sum(seen.values()) == pytest.approx(10_000, rel=0.2)


def test_fit_reports_what_it_did(translator):
    summary = translator.summary
    assert summary["support"] == "head" and summary["k"] == 6 and summary["candidates"] == 9
    assert summary["windows"]["fit"] > 8 * summary["windows"]["validation"] * 0.8
    assert translator.r2["keys"].shape == (8, 2)
    assert 0.4 < summary["r2"]["values"] < summary["r2"]["keys"] < 0.9


def test_passes_over_layers_give_as_good_a_translator(calibration, translator):
    again = fit_translator(calibration, k=6, layers_per_pass=5)
    assert [m.blocks for m in again.keys] == [m.blocks for m in translator.keys]
    for role in ("keys", "values"):  # alpha is chosen pass by pass, so the maps agree to what alpha makes of them
        torch.testing.assert_close(again.r2[role], translator.r2[role], rtol=0, atol=2e-3)


def test_a_shared_opening_is_stored_and_an_open_one_is_not(translator, texts):
    assert translator.opening is None  # qwen3's tokenizer puts nothing before a text
    gemma, tokenizer = pocket_model("gemma3"), AutoTokenizer.from_pretrained(MODELS / "gemma3")
    calibration = Calibration(gemma, gemma, tokenizer, texts, tokens=4000, window=128)
    opening = calibration.opening()
    assert opening is not None and opening.token_ids == (tokenizer.bos_token_id,)
    native, _ = prefill(gemma, torch.tensor([[tokenizer.bos_token_id]]))
    assert torch.equal(opening.keys[4], native.layers[4].keys)


def test_a_datasets_like_table_of_rows_is_read(small, tokenizer):
    rows = [{"text": f"{i}. " + "the cat sat on the mat and looked at the dog. " * 40} for i in range(60)]
    assert Calibration(small, small, tokenizer, rows, tokens=4000, window=64).tokens >= 3000


def test_too_little_text_is_refused(small, tokenizer):
    with pytest.raises(CalibrationError, match="Give more or longer texts"):
        Calibration(small, small, tokenizer, ["too short"])
    with pytest.raises(CalibrationError, match="leaves nothing to fit"):
        Calibration(small, small, tokenizer, ["x"], window=8, sink_tokens=8)


def test_layer_states_drop_the_first_positions():
    model = tiny_model("llama")
    cache = prefill(model, torch.ones(1, 9, dtype=torch.long))[0]
    states = layer_states(cache, CacheGeometry.from_model(model), 3)
    assert {k.shape for k in states.keys} == {(1, 2, 6, 16)} and states.position_ids.tolist() == [[3, 4, 5, 6, 7, 8]]
    # the same token everywhere: without RoPE, the first layer's keys are all one
    stripped = states.of_role("keys").mean()[0]
    torch.testing.assert_close(stripped, cache.layers[0].keys[0, :, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["glm4", "cohere2", "smollm3", "gpt_oss"])
def test_layer_states_are_stripped_whatever_turned_them(family):
    model = tiny_model(family)
    geometry, ids = CacheGeometry.from_model(model), torch.full((1, 9), 7)
    states = layer_states(prefill(model, ids)[0], geometry, 3).of_role("keys")
    alone = layer_states(prefill(model, ids[:, :1])[0], geometry, 0).of_role("keys")
    torch.testing.assert_close(states.stripped(0), alone.stripped(0).expand(1, 2, 6, -1), rtol=1e-4, atol=1e-4)
