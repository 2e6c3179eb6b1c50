"""The frozen translator: what it computes, what it saves, and whom it refuses."""

import json

import pytest
import torch
from builders import apply_map, identity_translator, random_ids, tiny_model

from hf_crosscache import CacheTranslator
from hf_crosscache.compat import prefill
from hf_crosscache.errors import ArtefactError, CrossCacheError, GeometryError, IdentityError
from hf_crosscache.maps import LayerMap, PackedMaps, SourceHead
from hf_crosscache.native_states import Opening
from hf_crosscache.rope import apply_rope, strip_rope


def random_map(heads=3, blocks=2, source_dim=4, dim=5, shared=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if shared else heads
    read = tuple(tuple(SourceHead((h + b) % 2, b) for b in range(blocks)) for h in range(rows))
    n = blocks * source_dim
    return LayerMap(
        read,
        torch.randn(heads, n, dim, generator=generator),
        torch.randn(rows, n, generator=generator),
        torch.randn(heads, dim, generator=generator),
    )


@pytest.mark.parametrize("shared", [False, True])
def test_packed_maps_are_their_formula(shared):
    maps = [random_map(shared=shared, seed=seed) for seed in range(4)]
    packed = PackedMaps.pack(maps[:2], maps[2:], 4, torch.float32, torch.device("cpu"))
    states = [torch.randn(2, 2, 7, 4) for _ in packed.source_layers]
    for n in range(2):
        for role, weight in enumerate((packed.key_weight, packed.value_weight)):
            expected = apply_map(maps[2 * role + n], states)
            for head in range(3):
                reads = packed.blocks[n, role, 0 if shared else head].tolist()
                x = torch.cat([states[packed.source_layers[layer]][:, source] for layer, source in reads], -1)
                found = x @ weight[n, head] + packed.bias[n, role, head]
                torch.testing.assert_close(found.double(), expected[:, head], rtol=1e-5, atol=1e-5)


def test_maps_of_fewer_blocks_are_padded_with_weights_of_zero():
    short, long = random_map(blocks=1), random_map(blocks=2, shared=True)
    packed = PackedMaps.pack([short, long], [long, short], 4, torch.float32, torch.device("cpu"))
    assert packed.blocks.shape == (2, 2, 3, 2, 2)
    assert packed.key_weight[0, :, 4:].abs().max() == 0 and torch.equal(packed.key_weight[0, :, :4], short.weight)


def test_a_selection_reads_only_the_source_layers_that_it_needs():
    maps = [LayerMap(((SourceHead(layer, 0),),), torch.randn(1, 4, 5), torch.randn(1, 4), torch.randn(1, 5)) for layer in (7, 3, 9)]
    packed = PackedMaps.pack(maps, maps, 4, torch.float32, torch.device("cpu"))
    assert packed.source_layers == (3, 7, 9)
    some = packed.select(1, 3)
    assert some.source_layers == (3, 9) and some.blocks[..., 0].flatten().tolist() == [0, 0, 1, 1]
    assert torch.equal(some.key_weight, packed.key_weight[1:])


def test_weights_that_their_dtype_cannot_hold_are_refused():
    layer_map = random_map()
    layer_map.weight[0, 0, 0] = 1e6
    with pytest.raises(GeometryError, match="weights of the keys exceed torch.float16.*Prefill the source in float32"):
        PackedMaps.pack([layer_map], [random_map()], 4, torch.bfloat16, torch.device("cpu"))


def test_keys_are_stripped_mapped_and_rotated_and_values_mapped():
    model = tiny_model("llama")
    translator = identity_translator(model)
    cache, _ = prefill(model, random_ids(2, 9))
    rotary = translator.source.geometry.rotary[1]
    here, there = torch.arange(9, dtype=torch.int32)[None], torch.arange(30, 39, dtype=torch.int32)[None]
    keys, values = torch.full((2, 1, *cache.layers[1].keys.shape), float("nan"))
    states = {1: (cache.layers[1].keys, cache.layers[1].values)}
    flags = translator.translate(range(1, 2), states, here, there, 39, keys, values)
    stripped = strip_rope(cache.layers[1].keys, *rotary.cos_sin(here, torch.float32))
    torch.testing.assert_close(keys[0], apply_rope(stripped, *rotary.cos_sin(there, torch.float32)))
    torch.testing.assert_close(values[0], cache.layers[1].values)
    assert not flags.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_translator_is_the_same(tmp_path, translator, small, large, tokenizer, dtype):
    translator.save_pretrained(tmp_path, dtype=dtype)
    again = CacheTranslator.from_pretrained(tmp_path, source_model=small, target_model=large, tokenizer=tokenizer)
    tolerance = 0 if dtype == torch.float32 else 2**-8
    for role in ("keys", "values"):
        for a, b in zip(getattr(translator, role), getattr(again, role), strict=True):
            assert a.blocks == b.blocks and b.weight.dtype == torch.float32
            torch.testing.assert_close(a.weight, b.weight, rtol=tolerance, atol=0)
            assert torch.equal(a.mean_x, b.mean_x) and torch.equal(a.mean_y, b.mean_y)
        assert torch.equal(translator.r2[role], again.r2[role])
    assert again.summary == translator.summary and again.sink_tokens == translator.sink_tokens


def test_rounding_the_weight_moves_nothing_at_the_mean(tmp_path, translator):
    again = CacheTranslator.from_pretrained(translator.save_pretrained(tmp_path))
    for a, b in zip(translator.keys, again.keys, strict=True):
        at_mean = (b.mean_x[:, None] @ b.weight)[:, 0] + b.bias
        torch.testing.assert_close(at_mean, a.mean_y, rtol=1e-4, atol=1e-4)


def test_the_artefact_says_what_it_is(tmp_path, translator):
    translator.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "translator_config.json").read_text())
    assert config["source"]["name"] == "qwen3-small" and config["target"]["name"] == "qwen3-large"
    assert len(config["target"]["weights_digest"]) == 64 and len(config["target"]["tokenizer_digest"]) == 64
    assert config["target"]["geometry"]["rotary"] and config["summary"]["tokens"] > 0
    assert "/" not in config["source"]["name"]  # no folder of the machine that fitted it


def test_opening_is_saved(tmp_path):
    model = tiny_model("llama")
    cache, _ = prefill(model, torch.tensor([[7, 8]]))
    opening = Opening((7, 8), tuple(c.keys for c in cache.layers), tuple(c.values for c in cache.layers))
    identity_translator(model, opening=opening).save_pretrained(tmp_path, dtype=torch.float32)
    again = CacheTranslator.from_pretrained(tmp_path).opening
    assert again is not None and again.token_ids == (7, 8) and torch.equal(again.keys[2], opening.keys[2])


def test_other_models_are_refused_by_what_differs(translator, small, large, llama):
    with pytest.raises(GeometryError, match="translator's source .*: 6 layers expected, 8 found"):
        translator.check(source_model=large)
    with pytest.raises(GeometryError, match=r"translator's target .*8 layers expected, 6 found"):
        translator.check(target_model=llama)
    other = tiny_model("llama", seed=1)
    mine = identity_translator(tiny_model("llama", seed=0))
    with pytest.raises(IdentityError, match="same cache geometry but other weights"):
        mine.check(target_model=other)
    mine.check(target_model=tiny_model("llama", seed=0))


def test_the_same_model_in_another_dtype_is_the_same_model(translator):
    from builders import MODELS
    from transformers import AutoModelForCausalLM

    translator.check(source_model=AutoModelForCausalLM.from_pretrained(MODELS / "qwen3-small", dtype=torch.bfloat16))


def test_another_tokenizer_is_refused(translator):
    from builders import MODELS
    from transformers import AutoTokenizer

    with pytest.raises(IdentityError, match="another tokenizer"):
        translator.check(tokenizer=AutoTokenizer.from_pretrained(MODELS / "gemma3"))


def test_damaged_artefacts_are_refused(tmp_path, translator):
    folder = translator.save_pretrained(tmp_path)
    tensors, config = folder / "translator.safetensors", folder / "translator_config.json"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtefactError, match="truncated or damaged"):
        CacheTranslator.from_pretrained(folder)
    tensors.unlink()
    with pytest.raises(ArtefactError, match="does not exist"):
        CacheTranslator.from_pretrained(folder)
    tensors.write_bytes(whole)
    config.write_text(config.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(ArtefactError, match="format 9"):
        CacheTranslator.from_pretrained(folder)
    config.write_text("{")
    with pytest.raises(ArtefactError, match="not valid JSON"):
        CacheTranslator.from_pretrained(folder)
    with pytest.raises(ArtefactError, match="does not exist"):
        CacheTranslator.from_pretrained(tmp_path / "nowhere")


def test_tensors_that_are_missing_or_not_finite_are_refused(tmp_path, translator):
    from safetensors.torch import load_file, save_file

    folder = translator.save_pretrained(tmp_path)
    tensors = load_file(folder / "translator.safetensors")
    spoilt = {**tensors, "layers.2.keys.weight": torch.full_like(tensors["layers.2.keys.weight"], float("nan"))}
    save_file(spoilt, folder / "translator.safetensors")
    with pytest.raises(ArtefactError, match=r"layers\.2\.keys\.weight' is not finite"):
        CacheTranslator.from_pretrained(folder)
    del tensors["layers.1.values.mean_x"]
    save_file(tensors, folder / "translator.safetensors")
    with pytest.raises(ArtefactError, match=r"lacks the tensor 'layers\.1\.values\.mean_x'"):
        CacheTranslator.from_pretrained(folder)


def test_other_dtypes_are_refused(tmp_path, translator):
    with pytest.raises(CrossCacheError, match="bfloat16 or torch.float32"):
        translator.save_pretrained(tmp_path, dtype=torch.float16)
