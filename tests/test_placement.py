"""Models that accelerate has offloaded, or split over devices, read and are read as those that lie on one."""

import accelerate
import pytest
import torch
from builders import generate, identity_translator, random_ids, tiny_model

from hf_crosscache import TranslatedCache, cache
from hf_crosscache.compat import prefill
from hf_crosscache.errors import HandOffWarning, UnsupportedModelError
from hf_crosscache.identity import weights_digest
from hf_crosscache.placement import device_of, layer_devices, stored_parameters
from hf_crosscache.translation import PendingTranslation

CPU = torch.device("cpu")
SPLIT = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
OFFLOADED = {
    "cpu": lambda model, folder: accelerate.cpu_offload(model, execution_device=CPU),
    "disk": lambda model, folder: accelerate.disk_offload(model, folder, execution_device=CPU),
    "split": lambda model, folder: accelerate.dispatch_model(model, SPLIT, main_device="cpu", offload_dir=folder, force_hooks=True),
    "split_embeddings": lambda model, folder: accelerate.dispatch_model(
        model, {**SPLIT, "model.embed_tokens": "disk"}, main_device="cpu", offload_dir=folder, force_hooks=True
    ),
}


@pytest.fixture(params=OFFLOADED)
def offloaded(request, tmp_path):
    model = OFFLOADED[request.param](tiny_model("gemma3"), str(tmp_path))
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    return model


def test_an_offloaded_target_reads_a_translated_cache(offloaded):
    model, ids = tiny_model("gemma3"), random_ids(2, 24)
    cache = TranslatedCache(prefill(model, ids)[0], identity_translator(model), target_model=offloaded, input_ids=ids)
    found = generate(offloaded, ids, cache)
    assert torch.equal(found, generate(model, ids)) and torch.equal(found, generate(offloaded, ids))


def test_an_offloaded_target_reads_the_context_itself_where_it_must(offloaded):
    model, ids = tiny_model("gemma3"), random_ids(2, 24)
    source_cache, _ = prefill(model, ids)
    source_cache.layers[2].keys[1, 0, -3, 0] = float("nan")
    cache = TranslatedCache(source_cache, identity_translator(model), target_model=offloaded, input_ids=ids, on_error="prefill")
    with pytest.warns(HandOffWarning, match="Target layer 2: translated keys are not finite"):
        assert torch.equal(generate(offloaded, ids, cache), generate(model, ids))


def test_an_offloaded_source_is_read(offloaded):
    model, ids = tiny_model("gemma3"), random_ids(2, 24)
    cache = TranslatedCache(prefill(offloaded, ids)[0], identity_translator(offloaded), target_model=model, input_ids=ids)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", OFFLOADED)
def test_offloading_does_not_change_who_a_model_is(how, tied, tmp_path):
    plain = tiny_model("llama", tie_word_embeddings=tied)
    model = OFFLOADED[how](tiny_model("llama", tie_word_embeddings=tied), str(tmp_path))
    assert device_of(model) == CPU
    assert weights_digest(model) == weights_digest(plain)
    wanted = dict(plain.named_parameters())
    found = stored_parameters(model)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert weights_digest(tiny_model("llama", seed=1, tie_word_embeddings=tied)) != weights_digest(plain)


def test_layers_work_where_accelerate_brings_them(tmp_path):
    assert layer_devices(tiny_model("llama"), 3) is None
    model = OFFLOADED["split"](tiny_model("llama"), str(tmp_path))
    assert layer_devices(model, 3) == (CPU, CPU, CPU)
    assert layer_devices(model, 2) == (CPU, CPU)  # the third has no states of its own
    assert layer_devices(model, 4) is None  # not the layers that the translator knows
    hooks = [next(part._hf_hook for part in layer.modules() if hasattr(part, "_hf_hook")) for layer in model.model.layers]
    hooks[1].execution_device, hooks[2].execution_device = "cuda:1", "cuda:3"
    assert layer_devices(model, 3) == (CPU, torch.device("cuda:1"), torch.device("cuda:3"))


def test_a_model_without_weights_is_refused():
    with pytest.raises(UnsupportedModelError, match="model.embed_tokens.weight has no values: the model is on the meta device"):
        weights_digest(tiny_model("llama").to("meta"))


@pytest.mark.parametrize(
    "places,groups",
    [("0000", [[0, 1, 2, 3]]), ("0011", [[0, 1], [2, 3]]), ("0110", [[0], [1, 2], [3]]), ("0101", [[0], [1], [2], [3]])],
)
def test_layers_of_several_devices_are_translated_apart(monkeypatch, places, groups):
    """Two names of the one device there is: each group is built on its own, and its maps are packed for it alone."""
    devices = tuple(torch.device("cpu") if place == "0" else torch.device("cpu:0") for place in places)
    assert torch.device("cpu") != torch.device("cpu:0")
    built, translate = [], PendingTranslation._translate
    monkeypatch.setattr(cache, "layer_devices", lambda model, layers: devices)
    monkeypatch.setattr(
        PendingTranslation,
        "_translate",
        lambda self, layers, dtype, room, device: built.append((list(layers), device)) or translate(self, layers, dtype, room, device),
    )
    model, ids = tiny_model("llama", num_hidden_layers=4), random_ids(1, 20)
    translator = identity_translator(model)
    handed = TranslatedCache(prefill(model, ids)[0], translator, target_model=model, input_ids=ids).translate()
    assert built == [(group, devices[group[0]]) for group in groups]
    packed = [key[0] for key in translator._prepared if isinstance(key[0], range)]
    assert [list(layers) for layers in packed] == groups
    assert torch.equal(generate(model, ids, handed), generate(model, ids))
