"""The geometry says what the cache is, and models that would be translated wrongly are refused by name."""

import json

import pytest
import torch
from builders import FAMILIES, MODELS, pocket_model, tiny_model
from transformers import AutoModelForCausalLM, CohereConfig, GPT2Config, SmolLM3Config
from transformers.models.deepseek_v3 import DeepseekV3Config

from hf_crosscache import CacheGeometry
from hf_crosscache.compat import prefill
from hf_crosscache.errors import UnsupportedModelError
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


@pytest.mark.parametrize("config", [CohereConfig(**SMALL), SmolLM3Config(**SMALL, num_key_value_heads=2, no_rope_layers=[1, 0])])
def test_interleaved_rotations_and_layers_without_any_are_refused(config):
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"layer \d: keys at position|does not follow its own frequencies"):
        check_positions(model, CacheGeometry.from_model(model))


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
