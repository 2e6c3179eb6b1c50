"""A mixture: planted pieces are found again, every token is served by its expert wherever it stands, and one expert changes nothing."""

from dataclasses import replace

import pytest
import torch
from builders import MODELS, TEXTS, a_model, apply_map, identity_translator, native_translator, pocket_model, random_ids
from transformers import AutoTokenizer

from hf_crosscache import (
    CacheTranslator,
    Calibration,
    Refinement,
    TranslatedCache,
    TranslatorFitter,
    fit_translator,
    refine_translator,
)
from hf_crosscache.arithmetic import hand_off_cost
from hf_crosscache.clusters import k_means, nearest_as_affine
from hf_crosscache.compat import prefill
from hf_crosscache.context import Context
from hf_crosscache.distillation import Distillation
from hf_crosscache.errors import CalibrationError
from hf_crosscache.geometry import CacheGeometry
from hf_crosscache.mixture import Mixture, Router
from hf_crosscache.mixture_fitting import ExpertFitters, fit_router, mixture_r2
from hf_crosscache.rope import apply_rope, strip_rope
from hf_crosscache.source import SourceStates
from hf_crosscache.states import LayerStates, PairedStates
from hf_crosscache.trainable_mixture import by_expert
from hf_crosscache.translation import PendingTranslation

MODEL = a_model("llama")[0]
IDS = random_ids(3, 24)


def random_maps(layer_map, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: 0.3 * torch.randn(getattr(layer_map, name).shape, generator=generator) for name in ("weight", "mean_x", "mean_y")}
    return replace(layer_map, **tensors)


def mixed(translator, experts=3, scale=1.0, layers=(1,), roles=("keys", "values")):
    """A mixture of random maps and a random router."""
    generator = torch.Generator().manual_seed(0)
    shape = translator.source.geometry.layers[0]
    width = len(layers) * len(roles) * shape.num_key_value_heads * shape.head_dim
    router = Router(layers, roles, scale * torch.randn(width, experts, generator=generator), torch.zeros(experts))
    sides = []
    for role in ("keys", "values"):
        own = getattr(translator, role)
        of_role = [tuple(m and random_maps(m, 10 * e + i) for i, m in enumerate(own)) for e in range(experts)]
        sides.append(of_role)
    mixture = Mixture(router, tuple(sides[0][1:]), tuple(sides[1][1:]))
    return replace(translator, keys=sides[0][0], values=sides[1][0], mixture=mixture)


TRANSLATOR = mixed(identity_translator(MODEL))


def expected(translator, cache):
    """The formula, token by token in float64: layer -> keys and values `[B, H, T, D]`; and the expert of each token."""
    tables, router = translator.source.geometry.rotary, translator.mixture.router
    positions = torch.arange(cache.layers[0].keys.shape[2], dtype=torch.int32)[None]
    turns = [table.cos_sin(positions, torch.float32) for table in tables]
    keys = [strip_rope(layer.keys, *turn).double() for layer, turn in zip(cache.layers, turns, strict=True)]
    values = [layer.values.double() for layer in cache.layers]
    x = torch.cat([side[router.layers[0]].transpose(1, 2).flatten(2) for side in (keys, values)], -1)
    experts = (x @ router.weight.double() + router.bias.double()).argmax(-1)
    found = {}
    for layer_idx in range(len(translator.keys)):
        pair = []
        for role, states in (("keys", keys), ("values", values)):
            each = torch.stack([apply_map(getattr(expert, role)[layer_idx], states) for expert in translator.experts])
            pair.append(each.gather(0, experts[None, :, None, :, None].expand(1, *each.shape[1:]))[0])
        found[layer_idx] = apply_rope(pair[0], *turns[layer_idx]).double(), pair[1]
    return found, experts


def assert_serves(found, wanted, rows=slice(None)):
    for layer_idx, pair in wanted.items():
        for states, formula in zip(found[layer_idx], pair, strict=True):
            torch.testing.assert_close(states.double(), formula[:, :, rows], rtol=1e-4, atol=1e-4)


def pending(translator, cache, context=None, **changes):
    source = SourceStates(cache, translator.source.geometry, translator.readers)
    return PendingTranslation(source, translator, context or Context(IDS.shape[1]), None, torch.float32, **changes)


@pytest.mark.parametrize("experts,scale", [(2, 1.0), (4, 1.0), (3, 0.0)], ids=["two", "four", "all to one"])
def test_every_token_is_served_by_its_expert(experts, scale):
    translator, cache = mixed(identity_translator(MODEL), experts, scale), prefill(MODEL, IDS)[0]
    wanted, whose = expected(translator, cache)
    assert len(whose.unique()) == (experts if scale else 1)
    waiting = pending(translator, cache)
    assert_serves({i: waiting.take(i, None) for i in wanted}, wanted)


@pytest.mark.parametrize("start,windows", [(9, None), (0, (None, 5, 11)), (7, (3, None, 12))])
def test_from_a_start_and_in_windows(start, windows):
    cache = prefill(MODEL, IDS)[0]
    waiting, (wanted, _) = pending(TRANSLATOR, cache, start=start, windows=windows), expected(TRANSLATOR, cache)
    for layer_idx in (2, 0, 1):
        kept = waiting.kept(layer_idx)
        assert_serves({layer_idx: waiting.take(layer_idx, None)}, {layer_idx: wanted[layer_idx]}, slice(24 - kept, None))


def test_a_fork_that_is_shortened_leaves_the_other_as_it_was():
    cache = prefill(MODEL, IDS)[0]
    one = pending(TRANSLATOR, cache)
    two = one.fork()
    two.shorten(5)
    wanted, _ = expected(TRANSLATOR, cache)
    assert_serves({i: two.take(i, None) for i in wanted}, wanted, slice(19))
    assert_serves({i: one.take(i, None) for i in wanted}, wanted)


def test_a_padded_batch_is_served_row_by_row():
    mask = torch.ones_like(IDS)
    mask[0, :6], mask[2, :1] = 0, 0
    ids = IDS * mask
    read = MODEL(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), use_cache=True).past_key_values
    settings = {"sink_tokens": 0, "recompute_last": 2, "min_context_recovered": 0.0}
    batch = TranslatedCache(read, TRANSLATOR, target_model=MODEL, input_ids=ids, attention_mask=mask, **settings).translate()
    for row, padded in enumerate((6, 0, 1)):
        alone = ids[row : row + 1, padded:]
        single = TranslatedCache(prefill(MODEL, alone)[0], TRANSLATOR, target_model=MODEL, input_ids=alone, **settings).translate()
        for ours, theirs in zip(batch.layers, single.layers, strict=True):
            torch.testing.assert_close(ours.keys[row : row + 1, :, padded:], theirs.keys, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(ours.values[row : row + 1, :, padded:], theirs.values, rtol=1e-3, atol=1e-4)


def test_what_follows_is_handed_over_alike():
    settings = {"sink_tokens": 0, "recompute_last": 0}
    cache = TranslatedCache(prefill(MODEL, IDS[:, :10])[0], TRANSLATOR, target_model=MODEL, input_ids=IDS[:, :10], **settings)
    whole = prefill(MODEL, IDS)[0]
    cache.extend(whole, input_ids=IDS, recompute_last=0).translate()
    wanted, _ = expected(TRANSLATOR, whole)
    assert_serves([(layer.keys, layer.values) for layer in cache.layers], wanted)


def test_features_route_where_there_are_any():
    plain = native_translator(MODEL, 1)
    layers = tuple(range(len(plain.source.geometry), len(plain.source.geometry) + 1))
    translator = mixed(plain, 2, layers=layers, roles=("values",))
    same = replace(translator, mixture=replace(translator.mixture, keys=(translator.keys,), values=(translator.values,)))
    one = replace(translator, mixture=None)
    states = []
    for each in (same, one, translator):
        cache = TranslatedCache(prefill(MODEL, IDS)[0], each, target_model=MODEL, input_ids=IDS, sink_tokens=0).translate()
        states.append(cache.layers[2].values)
    torch.testing.assert_close(states[0], states[1])
    changed = (states[2] - states[1]).abs().amax((1, 3)) > 1e-3
    assert changed.any() and not changed.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mixture_survives_the_disk(tmp_path, dtype):
    again = CacheTranslator.from_pretrained(TRANSLATOR.save_pretrained(tmp_path, dtype=dtype))
    router, before = again.mixture.router, TRANSLATOR.mixture.router
    assert (router.layers, router.roles) == (before.layers, before.roles)
    assert torch.equal(router.weight, before.weight) and torch.equal(router.bias, before.bias)
    for ours, theirs in zip(again.experts, TRANSLATOR.experts, strict=True):
        for role in ("keys", "values"):
            for mine, other in zip(getattr(ours, role), getattr(theirs, role), strict=True):
                assert mine.blocks == other.blocks and torch.equal(mine.weight, other.weight.to(dtype).float())
                assert torch.equal(mine.mean_x, other.mean_x) and torch.equal(mine.mean_y, other.mean_y)
    assert '"format": 2' in (tmp_path / "translator_config.json").read_text()


def test_one_expert_is_the_translator_it_was(tmp_path):
    exact = identity_translator(MODEL)
    assert exact.experts == (exact,)
    told = (exact.save_pretrained(tmp_path) / "translator_config.json").read_text()
    assert '"format": 1' in told and "mixture" not in told and "expert" not in told


def test_a_mixture_costs_its_router_more():
    plain = replace(TRANSLATOR, mixture=None)
    costs = [hand_off_cost(each, MODEL, context_tokens=100, sink_tokens=0).maps for each in (plain, TRANSLATOR)]
    products = sum(m.weight.numel() for m in (*plain.keys, *plain.values))
    assert costs[1] / costs[0] == pytest.approx(1 + TRANSLATOR.mixture.router.weight.numel() / products)


# The fit: two clusters of tokens, each with an affine map of its own.
GEOMETRY = CacheGeometry.from_model(MODEL)
SHAPE = GEOMETRY.layers[0]


def planted(seed, tokens=600):
    """Source states in two clusters, and a target that reads head (0, 0) by one affine map in each."""
    generator = torch.Generator().manual_seed(seed)
    size = (1, SHAPE.num_key_value_heads, tokens, SHAPE.head_dim)
    whose = torch.randint(2, (1, tokens), generator=generator)
    source = [torch.randn(size, generator=generator) + 6 * whose[:, None, :, None] for _ in range(3)]
    fixed = torch.Generator().manual_seed(99)
    weight = torch.randn(2, SHAPE.head_dim, SHAPE.head_dim, generator=fixed)
    bias = torch.randn(2, SHAPE.head_dim, generator=fixed)
    each = torch.stack([source[0] @ weight[i] + bias[i] for i in range(2)])
    target = [each.gather(0, whose[None, :, None, :, None].expand(1, *size))[0]] * 3
    return PairedStates(LayerStates(source, source), LayerStates(target, target)), whose


def fitted(experts):
    fitter = TranslatorFitter(GEOMETRY, GEOMETRY, k=2)
    batches = [(planted(seed)[0], "validation" if seed < 2 else "fit") for seed in range(6)]
    for states, split in batches:
        fitter.screen(states, split)
    fitter.choose_candidates()
    for states, split in batches:
        fitter.update(states, split)
    shared = fitter.fit()
    x = torch.cat([states.source.keys[1].transpose(1, 2).flatten(2)[0] for states, split in batches if split == "fit"])
    weight, bias = nearest_as_affine(k_means((x - x.mean(0)) / x.std(0), experts), x.mean(0), x.std(0))
    fitters = ExpertFitters(Router((1,), ("keys",), weight, bias), fitter, shared)
    for states, split in batches:
        fitters.update(states, split)
    return shared, fitters


def test_planted_pieces_are_found_by_two_experts_and_not_by_one():
    shared, fitters = fitted(2)
    found = fitters.fit()
    for role in ("keys", "values"):
        assert shared.r2[role].max() < 0.95 and mixture_r2(found, shared, role).min() > 0.9999
        assert [m.blocks for m in getattr(found[0], role)] == [m.blocks for m in getattr(shared, role)]
    states, whose = planted(77)
    routed = fitters.router.route(fitters.router.of(states.source))
    assert torch.equal(routed, whose) or torch.equal(routed, 1 - whose)
    for expert, maps in enumerate(found):
        mapped = apply_map(maps.keys[0], states.source.keys)[:, :, (routed == expert)[0]]
        torch.testing.assert_close(mapped, states.target.keys[0].double()[:, :, (routed == expert)[0]], rtol=1e-3, atol=2e-2)


def test_the_r2_of_a_mixture_is_that_of_its_rows():
    shared, fitters = fitted(3)  # three clusters where two would do
    found = fitters.fit()
    states = [planted(seed)[0] for seed in range(2)]
    missed, wanted = 0.0, []
    for each in states:
        whose = fitters.router.route(fitters.router.of(each.source))
        for expert, maps in enumerate(found):
            rows = (whose == expert)[0]
            missed += (apply_map(maps.values[1], each.source.values) - each.target.values[1])[:, :, rows].square().sum((0, 2, 3))
        wanted.append(each.target.values[1].double())
    spread = torch.cat(wanted, 2)
    variance = (spread - spread.mean(2, keepdim=True)).square().sum((0, 2, 3))
    torch.testing.assert_close(mixture_r2(found, shared, "values")[1].double(), 1 - missed / variance, rtol=1e-4, atol=1e-5)


def test_an_expert_of_too_few_rows_shares_the_maps_of_all():
    shared, fitters = fitted(2)
    fitters.rows["fit"][1] = 3
    own, fallen_back = fitters.fit()
    assert fallen_back is shared and own is not shared
    assert (mixture_r2([own, fallen_back], shared, "keys") >= shared.r2["keys"] - 1e-6).all()
    assert torch.equal(mixture_r2([shared, shared], shared, "keys"), shared.r2["keys"])


def test_clusters_are_found_from_a_fixed_seed_and_the_nearest_is_an_affine_choice():
    generator = torch.Generator().manual_seed(3)
    centres = 5 * torch.randn(4, 7, generator=generator)
    x = centres[torch.randint(4, (800,), generator=generator)] + 0.3 * torch.randn(800, 7, generator=generator)
    found = k_means(x, 4)
    assert torch.equal(found, k_means(x, 4))
    assert torch.cdist(centres, found).amin(1).max() < 0.2
    mean, std = x.mean(0), x.std(0)
    centroids = k_means((x - mean) / std, 4)
    weight, bias = nearest_as_affine(centroids, mean, std)
    assert torch.equal((x @ weight + bias).argmax(1), torch.cdist((x - mean) / std, centroids).argmin(1))


@pytest.mark.parametrize("experts", [0, 5])
def test_another_number_of_experts_is_refused(experts):
    with pytest.raises(CalibrationError, match=f"experts = {experts}: 1 to 4 expected"):
        fit_router(None, experts, None)


@pytest.fixture(scope="module")
def pair():
    return pocket_model("qwen3-small"), pocket_model("qwen3-large"), AutoTokenizer.from_pretrained(MODELS / "qwen3-large")


@pytest.mark.parametrize(
    "native_layers,panels",
    [
        (0, {}),
        (1, {"native_features": 32, "attention_weights": True}),
        (0, {"source_features": 16, "nonlinear_features": 16, "other_role": True}),
    ],
    ids=["plain", "native", "source"],
)
def test_a_mixture_is_fitted_from_texts_served_and_trained_alike(pair, native_layers, panels):
    calibration = Calibration(*pair, TEXTS, tokens=20_000, window=192, native_layers=native_layers)
    settings = {"k": 2, "match_variance": True, **panels}
    one, two = (fit_translator(calibration, experts=experts, **settings) for experts in (1, 2))
    assert "experts" not in one.summary and one.mixture is None and two.summary["experts"] == 2
    assert all((two.r2[role][native_layers:].mean() > one.r2[role][native_layers:].mean()) for role in ("keys", "values"))
    maps = Distillation(two, calibration).maps
    ids = calibration.windows["validation"][:2, :64]
    served = TranslatedCache(
        prefill(pair[0], ids)[0], two, target_model=pair[1], input_ids=ids, recompute_last=0, min_context_recovered=0.0
    ).translate()
    paired = calibration.paired(ids)
    source = two.panels.behind(paired.source, paired.hidden)
    trained = maps(source, paired.source.position_ids, torch.float32)
    assert set(trained) == set(range(native_layers, len(two.target.geometry)))
    for layer_idx, (keys, values) in trained.items():
        torch.testing.assert_close(keys, served.layers[layer_idx].keys[:, :, 4:], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(values, served.layers[layer_idx].values[:, :, 4:], rtol=1e-3, atol=1e-3)
    sum(states.square().sum() for layer in trained.values() for states in layer).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in maps.parameters())
    again = maps.to_translator()
    assert torch.allclose(again.mixture.keys[0][-1].weight, two.mixture.keys[0][-1].weight) and len(again.experts) == 2


def test_experts_of_no_tokens_learn_nothing_and_break_nothing():
    maps = {expert: torch.nn.Parameter(torch.ones(1)) for expert in range(3)}
    states = LayerStates([torch.randn(2, 1, 5, 4)], [torch.randn(2, 1, 5, 4)], None, None)
    experts = torch.tensor([[0, 2, 2, 0, 0], [2, 2, 2, 2, 0]])

    def translate(expert):
        return lambda source, _: {0: (source.keys[0] * maps[expert] * (expert + 1), source.values[0])}

    keys, values = by_expert([translate(e) for e in range(3)], experts, states, torch.arange(5)[None])[0]
    assert torch.equal(values, states.values[0])
    torch.testing.assert_close(keys, states.keys[0] * (experts + 1)[:, None, :, None])
    keys.sum().backward()
    assert maps[1].grad == 0 and maps[0].grad != 0


def test_a_mixture_is_refined(pair):
    calibration = Calibration(*pair, TEXTS, tokens=20_000, window=192)
    quick = Refinement(steps=3, batch_size=2, learning_rates=(1e-3,), continuation=64, least_context=32)
    refined = refine_translator(fit_translator(calibration, k=2, experts=2), calibration, quick)
    held_out = refined.summary["refined"]["held_out"]
    assert held_out["after"]["kl"] <= held_out["before"]["kl"] and len(refined.experts) == 2
