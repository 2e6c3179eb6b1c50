"""Panels behind a source: served as float64 makes them, in padded batches, grown caches, forks and from disk."""

from dataclasses import replace

import pytest
import torch
from builders import a_model, random_ids

from hf_crosscache import CacheTranslator, TranslatedCache, first_layers
from hf_crosscache.arithmetic import hand_off_cost
from hf_crosscache.calibration import layer_states
from hf_crosscache.compat import prefill, states_of
from hf_crosscache.errors import CalibrationError
from hf_crosscache.features import NativeFeatures
from hf_crosscache.maps import LayerMap
from hf_crosscache.nonlinear_features import NonlinearFeatures
from hf_crosscache.panels import Panels, blocks_of
from hf_crosscache.rope import to_half_split, to_interleaved
from hf_crosscache.source_features import SourceFeatures
from hf_crosscache.trainable import TrainableMaps
from hf_crosscache.translation import PendingTranslation

NATIVE, SOURCE, HIDDEN_UNITS = 10, 21, 13  # not multiples of a head
KINDS = {
    "source": {"source": True},
    "other": {"other_role": True},
    "nonlinear": {"source": True, "nonlinear": True},
    "native": {"native": True, "source": True},
    "all": {"native": True, "source": True, "nonlinear": True, "other_role": True},
}


def random_panels(geometry, hidden, generator, native=False, source=False, nonlinear=False, other_role=False):
    shape = geometry.layers[0]
    inputs = 2 * len(geometry) * shape.num_key_value_heads * shape.head_dim

    def projection(n, r):
        return torch.randn(n, generator=generator), torch.randn(n, r, generator=generator) / n**0.5

    width = NATIVE * native + SOURCE * source
    units = torch.rand(HIDDEN_UNITS, generator=generator)
    return Panels(
        geometry,
        NativeFeatures(1, *projection(hidden, NATIVE)) if native else None,
        SourceFeatures(*projection(inputs, SOURCE)) if source else None,
        replace(NonlinearFeatures.drawn(width, HIDDEN_UNITS), mean=units, scale=units + 1) if nonlinear else None,
        other_role,
    )


def random_translator(model, exact, kind, k=2):
    """Random maps of a model to itself that read k heads and all features."""
    generator = torch.Generator().manual_seed(3)
    geometry = exact.source.geometry
    panels = random_panels(geometry, model.config.hidden_size, generator, **KINDS[kind])
    selectable, given = blocks_of(geometry, "head", panels.width, panels.other_role)
    native = 0 if panels.native is None else 1
    sides = []
    for _ in range(2):
        maps = [None] * native
        for layer in geometry.layers[native:]:
            heads, dim = layer.num_key_value_heads, layer.head_dim
            rows = [torch.randperm(len(selectable), generator=generator)[:k].tolist() for _ in range(heads)]
            blocks = tuple(tuple(block[0] for block in (*[selectable[i] for i in row], *given)) for row in rows)
            n = len(blocks[0]) * dim
            weight = torch.randn(heads, n, dim, generator=generator) / n**0.5
            mean_x, mean_y = torch.randn(heads, n, generator=generator), torch.randn(heads, dim, generator=generator)
            maps.append(LayerMap(blocks, weight, mean_x, mean_y))
        sides.append(tuple(maps))
    made = {"features": panels.native, "source_features": panels.source, "nonlinear_features": panels.nonlinear}
    return CacheTranslator(exact.source, exact.target, *sides, sink_tokens=0, other_role=panels.other_role, **made)


def turned(keys, table, by):
    """Keys `[B, H, T, D]` float64 with RoPE put on (by = 1) or taken off (-1), as complex numbers."""
    if table.interleaved:
        keys = to_half_split(keys, table.rotary_dim)
    angles = torch.arange(keys.shape[2])[:, None].double() * table.inv_freq.double()
    rotation = torch.polar(torch.full_like(angles, table.attention_scaling), angles)
    real, imaginary = keys[..., : table.rotary_dim].chunk(2, -1)
    pairs = torch.complex(real, imaginary)
    pairs = pairs * rotation if by == 1 else pairs / rotation
    keys = torch.cat((pairs.real, pairs.imag, keys[..., table.rotary_dim :]), -1)
    return to_interleaved(keys, table.rotary_dim) if table.interleaved and by == 1 else keys


def reference(model, translator, ids):
    """Translated states of a whole context without padding, from the formulas: per layer keys and values `[B, H, T, D]` float64."""
    geometry, native = translator.source.geometry, translator.native_layers
    pairs = [(keys.double(), values.double()) for keys, values in states_of(prefill(model, ids)[0])]
    keys = [turned(pair[0], table, -1) for pair, table in zip(pairs, geometry.rotary, strict=True)]
    values = [pair[1] for pair in pairs]
    kinds = []
    if native:
        given = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None].expand_as(ids)}
        hidden = first_layers.run(model, native, given).hidden.double()
        kinds.append((hidden - translator.features.mean.double()) @ translator.features.projection.double())
    if (of := translator.source_features) is not None:
        x = torch.cat([side.transpose(1, 2).flatten(2) for side in (*keys, *values)], -1)
        kinds.append((x - of.mean.double()) @ of.projection.double())
    if (of := translator.nonlinear_features) is not None:
        units = torch.nn.functional.gelu(torch.cat(kinds, -1) @ of.weight.double() + of.bias.double())
        kinds.append((units - of.mean.double()) * of.scale.double())
    heads, dim = geometry.layers[0].num_key_value_heads, geometry.layers[0].head_dim
    layers = []
    if kinds:
        flat = torch.cat(kinds, -1)
        flat = torch.nn.functional.pad(flat, (0, -flat.shape[-1] % (heads * dim)))
        layers = list(flat.unflatten(-1, (-1, heads, dim)).permute(2, 0, 3, 1, 4))
    sides = [*keys, *layers, *values], [*values, *layers, *keys]
    found = []
    for layer_idx, table in enumerate(translator.target.geometry.rotary):
        if layer_idx < native:
            found.append(pairs[layer_idx])
            continue
        mapped = []
        for layer_map, read in zip(translator.maps(layer_idx), sides, strict=True):
            each = []
            for head, row in enumerate(layer_map.blocks):
                x = torch.cat([read[layer][:, at] for layer, at in row], -1)
                each.append((x - layer_map.mean_x[head].double()) @ layer_map.weight[head].double() + layer_map.mean_y[head].double())
            mapped.append(torch.stack(each, 1))
        found.append((turned(mapped[0], replace(table, interleaved=False), 1), mapped[1]))
        if table.interleaved:
            found[-1] = to_interleaved(found[-1][0], table.rotary_dim), mapped[1]
    return found


def served_by(cache):
    return [(keys, values) for keys, values, _ in cache]


def assert_served(found, want, slots=slice(None), rows=slice(None), of=slice(None)):
    for pair, wanted in zip(found, want, strict=True):
        for states, exact in zip(pair, wanted, strict=True):
            torch.testing.assert_close(states[rows, :, slots].double(), exact[:, :, of], rtol=1e-4, atol=1e-4)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("family", ["llama", "llama_yarn", "qwen3", "gemma3", "glm4", "cohere2", "smollm3"])
def test_served_as_float64_makes_them(family, kind):
    model, exact = a_model(family)
    translator, ids = random_translator(model, exact, kind), random_ids(2, 19)
    given = {"target_model": model, "input_ids": ids, "recompute_last": 0, "keep_window": False}
    assert_served(served_by(TranslatedCache(prefill(model, ids)[0], translator, **given)), reference(model, translator, ids))


@pytest.mark.parametrize("masks", [("0001111111", "000111111111"), ("1111111000", "000111111111"), ("1101111010", "001111111000")])
def test_padded_rows_are_served_as_alone(masks, kind):
    model, exact = a_model("llama")
    translator = random_translator(model, exact, kind)
    read, prompt = (torch.tensor([[1] * len(mask), [int(slot) for slot in mask]]) for mask in masks)
    tokens = random_ids(2, 12)
    ids = [torch.zeros_like(mask) for mask in (read, prompt)]
    for side, mask in zip(ids, (read, prompt), strict=True):
        for row in range(2):
            side[row, mask[row] == 1] = tokens[row, : mask[row].sum()]
    position_ids = (read.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        source = model(ids[0], attention_mask=read, position_ids=position_ids, use_cache=True).past_key_values
    cache = TranslatedCache(
        source, translator, target_model=model, input_ids=ids[1], attention_mask=prompt, source_attention_mask=read, recompute_last=0
    )
    found = served_by(cache)
    length = found[-1][0].shape[2]
    for row in range(2):
        slots = prompt[row, :length].nonzero()[:, 0]
        want = reference(model, translator, tokens[row : row + 1, : len(slots)])
        assert_served(found[translator.native_layers :], want[translator.native_layers :], slots, slice(row, row + 1))


def test_maps_to_be_trained_begin_as_they_are_served(kind):
    model, exact = a_model("llama")
    translator, ids = random_translator(model, exact, kind), random_ids(2, 19)
    given = {"target_model": model, "input_ids": ids, "recompute_last": 0}
    served = served_by(TranslatedCache(prefill(model, ids)[0], translator, **given))
    position_ids = torch.arange(19)[None]
    hidden = first_layers.run(model, 1, {"input_ids": ids, "position_ids": position_ids.expand_as(ids)}).hidden
    states = layer_states(prefill(model, ids)[0], exact.source.geometry, 0)
    source = translator.panels.behind(states, hidden)
    begun = TrainableMaps(translator, source, states)(source, position_ids, torch.float32)
    assert begun.keys() == set(range(translator.native_layers, 3))
    for layer_idx, pair in begun.items():
        for found, want in zip(pair, served[layer_idx], strict=True):
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_a_cache_grows_and_forks(kind):
    model, exact = a_model("llama")
    translator, ids = random_translator(model, exact, kind), random_ids(1, 30)
    want = reference(model, translator, ids)
    cache = TranslatedCache(prefill(model, ids[:, :17])[0], translator, target_model=model, input_ids=ids[:, :17])
    fork, shorter = cache.fork(), cache.fork()
    shorter.crop(-5)
    assert_served(served_by(shorter), want, of=slice(11))
    cache.extend(prefill(model, ids)[0], input_ids=ids)
    assert_served(served_by(cache), want, of=slice(29))
    assert_served(served_by(fork), want, of=slice(16))


def test_a_round_trip_through_disk_serves_the_same(kind, tmp_path):
    model, exact = a_model("llama")
    translator, ids = random_translator(model, exact, kind), random_ids(1, 18)
    translator = replace(translator, summary={"support": "head", "k": 2})
    loaded = CacheTranslator.from_pretrained(translator.save_pretrained(tmp_path, dtype=torch.float32), target_model=model)
    source = prefill(model, ids)[0]
    served = [served_by(TranslatedCache(source, t, target_model=model, input_ids=ids)) for t in (translator, loaded)]
    for pair, again in zip(*served, strict=True):
        assert all(torch.equal(*states) for states in zip(pair, again, strict=True))
    cost = hand_off_cost(loaded, model, context_tokens=64)
    assert cost == hand_off_cost(translator, model, context_tokens=64)


def test_what_is_read_is_held_and_what_is_not_is_let_go():
    model, exact = a_model("llama")
    translator, ids = random_translator(model, exact, "source", k=1), random_ids(1, 18)
    assert set(translator.readers) == {0, 1, 2} and translator.readers != translator.map_readers
    held = []
    translate = PendingTranslation._translate

    def watched(self, layers, *rest):
        translate(self, layers, *rest)
        held.append(self.source.held_layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingTranslation, "_translate", watched)
        list(TranslatedCache(prefill(model, ids)[0], translator))
    assert held[-1] == () and set(held[0]) <= set(translator.map_readers)


def test_features_count_as_cost():
    model, exact = a_model("llama")
    translator = random_translator(model, exact, "all")
    panels = translator.panels
    products = panels.native.projection.numel() + panels.source.projection.numel() + panels.nonlinear.weight.numel()
    assert panels.products == products and panels.width == NATIVE + SOURCE + HIDDEN_UNITS
    without = replace(translator, source_features=None, nonlinear_features=None)
    assert hand_off_cost(translator, model, context_tokens=64).maps > hand_off_cost(without, model, context_tokens=64).maps


def test_hidden_units_of_nothing_are_refused():
    with pytest.raises(CalibrationError, match="nonlinear_features = 8 of no features"):
        NonlinearFeatures.drawn(0, 8)
    with pytest.raises(CalibrationError, match="at least 1"):
        NonlinearFeatures.drawn(5, 0)
