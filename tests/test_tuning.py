"""Tuning counts the arithmetic of a hand-off, measures the frontier, and keeps what a budget allows."""

import pytest
import torch
from builders import MODELS, TEXTS, identity_translator, native_translator, pocket_model, tiny_model
from transformers import AutoTokenizer

from hf_crosscache import CacheTranslator, tune_translator
from hf_crosscache.arithmetic import hand_off_cost
from hf_crosscache.errors import CalibrationError


def products_of_a_prefill(model, tokens):
    """Counted by torch, which counts two operations a product and, for attention, all pairs of positions."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(torch.arange(1, tokens + 1)[None], use_cache=False)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_sliding", "gemma3", "phi3"])
def test_weights_are_counted_as_torch_counts_them(family):
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    translator = identity_translator(model)
    few, many = products_of_a_prefill(model, 1), products_of_a_prefill(model, 2)
    each_layer = 2 * model.config.num_attention_heads * translator.target.geometry.layers[0].head_dim
    pairs = len(translator.target.geometry) * each_layer
    assert many - few == pytest.approx(few - pairs + 3 * pairs, rel=1e-2)  # the weights of a token, and three more pairs of positions
    cost = hand_off_cost(translator, model, context_tokens=2, recompute_last=1, sink_tokens=0)
    assert cost.tail == pytest.approx((few + pairs) / (2 * few + pairs), rel=1e-2)


def test_costs_add_up_to_a_prefill_and_grow_with_what_is_native():
    model = tiny_model("llama")
    assert hand_off_cost(identity_translator(model), model, context_tokens=100, recompute_last=100).total == pytest.approx(1)
    assert hand_off_cost(identity_translator(model), model, context_tokens=100, sink_tokens=0).native == 0
    native = [hand_off_cost(native_translator(model, m), model, context_tokens=100, sink_tokens=0).native for m in (1, 2)]
    assert 0 < native[0] < 1 / 6 and 1 / 3 < native[1] < 1 / 2  # projections alone, then a whole layer of three and projections


def test_the_best_within_the_budget_is_kept(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "qwen3-large")
    pair = pocket_model("qwen3-small"), pocket_model("qwen3-large"), tokenizer
    settings = {"windows": 8, "k": 2, "fit_tokens": 16_000, "native_layers": (0, 3), "recompute_last": (0, 32), "context_tokens": 128}
    chosen = tune_translator(*pair, TEXTS, budget=0.6, source_features=16, folder=tmp_path, **settings)
    assert chosen.summary["source_features"] == 16
    frontier, tuned = chosen.summary["frontier"], chosen.summary["tuned"]
    assert [p["cost"] for p in frontier] == sorted(p["cost"] for p in frontier) and len(frontier) == 4
    affordable = [p for p in frontier if p["cost"] <= 0.6]
    assert tuned == max(affordable, key=lambda p: p["context_recovered"]) and chosen.native_layers == tuned["native_layers"]
    assert CacheTranslator.from_pretrained(tmp_path / "native-3").native_layers == 3
    with pytest.raises(CalibrationError, match="the cheapest costs"):
        tune_translator(*pair, TEXTS, budget=1e-4, **{**settings, "native_layers": (0,), "recompute_last": (0,)})
