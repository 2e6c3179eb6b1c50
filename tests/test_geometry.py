"""The geometry says what the cache is, and models that would be translated wrongly are refused by name."""

import json
from dataclasses import replace

import pytest
import torch
from builders import FAMILIES, MODELS, MORE_FAMILIES, pocket_model, random_ids, tiny_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DynamicCache,
    Exaone4Config,
    Gemma4TextConfig,
    GemmaConfig,
    GPT2Config,
    HunYuanDenseV1Config,
    Llama4TextConfig,
    NanoChatConfig,
    PhiConfig,
    Qwen3NextConfig,
)
from transformers.models.deepseek_v3 import DeepseekV3Config

from hf_crosscache import CacheGeometry
from hf_crosscache.compat import cache_argument, prefill, states_of
from hf_crosscache.errors import GeometryError, UnsupportedModelError
from hf_crosscache.geometry import check_positions

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TINY_GEMMA4 = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0}


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry_is_that_of_the_cache(family):
    model = tiny_model(family)
    geometry = CacheGeometry.from_model(model)
    cache, _ = prefill(model, torch.randint(0, 200, (2, 20)))
    assert len(geometry) == len(cache.layers)
    for layer, states in zip(geometry.layers, cache.layers, strict=True):
        assert states.keys.shape == (2, layer.num_key_value_heads, 20, layer.head_dim)
        assert layer.rotary_dim == layer.head_dim
    check_positions(model, geometry)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_more_families_are_read_right(family):
    model = tiny_model(family)
    geometry = CacheGeometry.from_model(model)
    check_positions(model, geometry)
    assert {layer.rotary_dim for layer in geometry.layers} == {8 if family == "glm4" else 16}
    assert {table.interleaved for table in geometry.rotary} == {family in ("glm4", "cohere2")}
    turns = [True, family not in ("smollm3", "cohere2"), True]
    assert [bool(table.inv_freq.any()) for table in geometry.rotary][:3] == turns
    mixed = family.startswith("gemma") or family in ("ministral", "gpt_oss", "cohere2")
    windows = [8, None, 8, 8, None] if mixed else [None] * 3
    assert [layer.sliding_window for layer in geometry.layers] == windows[: 5 if family == "gemma4_tied" else 3]
    again = CacheGeometry.from_dict(json.loads(json.dumps(geometry.to_dict())))
    assert geometry.difference(again) is None and again.difference(geometry) is None


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_more_families_heed_their_context(family):
    model, ids = tiny_model(family), random_ids(8, 24)
    other = torch.cat([random_ids(8, 23, seed=1), ids[:, -1:]], 1)
    with torch.no_grad():
        same = model(ids).logits[:, -1].argmax(-1) == model(other).logits[:, -1].argmax(-1)
    assert same.float().mean() <= 0.5


@pytest.mark.parametrize("family", ["glm4", "cohere2", "gpt_oss"])
def test_the_order_of_pairs_is_found_in_half_precision_too(family):
    model = tiny_model(family).bfloat16()
    geometry = CacheGeometry.from_model(model)
    assert geometry.rotary[0].interleaved == (family != "gpt_oss")
    check_positions(model, geometry)


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**SMALL),
        Exaone4Config(**SMALL, num_key_value_heads=2, layer_types=["sliding_attention", "full_attention"], sliding_window=8),
        PhiConfig(**SMALL, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    ],
    ids=lambda config: config.model_type,
)
def test_rotation_is_read_off_models_of_no_known_name(config):
    model = AutoModelForCausalLM.from_config(config).float().eval()
    check_positions(model, CacheGeometry.from_model(model))


def test_attention_type_and_window_are_told():
    assert {layer.sliding_window for layer in CacheGeometry.from_model(tiny_model("mistral_sliding")).layers} == {8}
    assert {layer.attention for layer in CacheGeometry.from_model(tiny_model("mistral")).layers} == {"full_attention"}


def test_layers_of_two_types_have_two_tables():
    geometry = CacheGeometry.from_model(pocket_model("gemma3"))
    assert [layer.sliding_window for layer in geometry.layers] == [128, 128, None, 128, 128, None]
    assert not geometry.rotary[0].same_as(geometry.rotary[2])
    check_positions(pocket_model("gemma3"), geometry)


def test_geometry_survives_json():
    geometry = CacheGeometry.from_model(pocket_model("gemma3"))
    again = CacheGeometry.from_dict(json.loads(json.dumps(geometry.to_dict())))
    assert geometry.difference(again) is None and again.difference(geometry) is None
    assert len(geometry.to_dict()["rotary"]) == 2


def test_differences_are_named():
    llama = CacheGeometry.from_model(tiny_model("llama"))
    assert "3 layers expected, 2 found" in (llama.difference(CacheGeometry.from_model(tiny_model("llama", num_hidden_layers=2))) or "")
    other = CacheGeometry.from_model(tiny_model("llama", num_key_value_heads=4))
    assert "layer 0: num_key_value_heads 2 expected, 4 found" in (llama.difference(other) or "")
    scaled = CacheGeometry.from_model(tiny_model("llama_yarn"))
    assert "rotary frequencies" in (llama.difference(scaled) or "")
    swapped = replace(llama, rotary=tuple(replace(table, interleaved=True) for table in llama.rotary))
    assert "order of the pairs" in (llama.difference(swapped) or "")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_refused(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(UnsupportedModelError, match=rope_type):
        CacheGeometry.from_model(tiny_model("llama", rope_parameters=rope))


def test_models_without_rope_are_refused():
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(UnsupportedModelError, match="no rotary embedding"):
        CacheGeometry.from_model(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("family", ["llama", "glm4", "cohere2", "smollm3"])
def test_tables_that_pair_or_turn_wrongly_are_refused(family):
    model = tiny_model(family)
    geometry = CacheGeometry.from_model(model)
    swapped = tuple(replace(table, interleaved=not table.interleaved) for table in geometry.rotary)
    turned = tuple(geometry.rotary[0] for _ in geometry.rotary)
    with pytest.raises(UnsupportedModelError, match="layer 0: keys at position"):
        check_positions(model, replace(geometry, rotary=swapped))
    if family in ("cohere2", "smollm3"):
        with pytest.raises(UnsupportedModelError, match="layer 1: keys at position"):
            check_positions(model, replace(geometry, rotary=turned))


def test_rotation_the_other_way_is_refused():
    with pytest.raises(UnsupportedModelError, match="turns them the other way"):
        CacheGeometry.from_model(AutoModelForCausalLM.from_config(NanoChatConfig(**SMALL)))


def test_weights_on_turned_keys_are_refused():
    model = AutoModelForCausalLM.from_config(HunYuanDenseV1Config(**SMALL, head_dim=8)).float().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.key_layernorm.weight.uniform_(0.5, 1.5)
    with pytest.raises(UnsupportedModelError, match="layer 0: keys at position"):
        check_positions(model, CacheGeometry.from_model(model))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Llama4TextConfig(**SMALL, num_local_experts=2), "layer 0: a layer of chunked_attention"),
        (
            Qwen3NextConfig(**SMALL, num_experts=2, layer_types=["full_attention", "linear_attention"]),
            "layer 1: a layer of linear_attention",
        ),
        (Gemma4TextConfig(), r"layer 5: .* \(4, 256\) in layer 0, \(4, 512\) here"),
        (Gemma4TextConfig(global_head_dim=256, attention_k_eq_v=True, num_global_key_value_heads=1), r"layer 5: .* \(1, 256\) here"),
        (Gemma4TextConfig(**TINY_GEMMA4, num_kv_shared_layers=2), "all its layers read the states of another model"),
        (Gemma4TextConfig(**TINY_GEMMA4, use_bidirectional_attention="all"), "attend to later ones"),
        (GemmaConfig(**SMALL, use_bidirectional_attention=True), "attend to later ones"),
    ],
    ids=lambda case: getattr(case, "model_type", ""),
)
def test_other_kinds_of_layer_are_refused_by_name(config, message):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=message):
        CacheGeometry.from_model(model)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_layers_that_share_states_have_none_of_their_own(family):
    model, ids = tiny_model(family), random_ids(2, 20)
    geometry = CacheGeometry.from_model(model)
    assert len(geometry) == 3 and model.config.num_hidden_layers == 5
    assert len(prefill(model, ids)[0].layers) == 3
    from_config = DynamicCache(config=model.config)  # with two empty layers from transformers 5.24 on
    model(ids, use_cache=True, **cache_argument(from_config))
    assert [keys.shape[1:2] for keys, _ in states_of(from_config)] == [(2,)] * 3
    with pytest.raises(GeometryError, match="promises 2 layers with keys and values of their own, the model caches 3"):
        check_positions(model, replace(geometry, layers=geometry.layers[:2], rotary=geometry.rotary[:2]))


def test_artefacts_saved_before_the_order_of_pairs_was_written_are_half_split():
    saved = CacheGeometry.from_model(tiny_model("llama")).to_dict()
    del saved["rotary"][0]["interleaved"]
    assert not CacheGeometry.from_dict(saved).rotary[0].interleaved


def test_latent_attention_is_refused():
    config = DeepseekV3Config(**SMALL, n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=1, first_k_dense_replace=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="latent"):
        CacheGeometry.from_model(model)


def test_the_pocket_models_are_all_supported():
    for name in ("qwen3-small", "qwen3-large", "llama", "gemma3"):
        model = pocket_model(name)
        check_positions(model, CacheGeometry.from_model(model))
        assert sum(f.stat().st_size for f in (MODELS / name).iterdir()) < 6e6
    assert sum(f.stat().st_size for f in MODELS.rglob("*") if f.is_file()) < 18e6
