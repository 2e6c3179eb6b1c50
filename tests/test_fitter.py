"""The fitter finds planted heads, whatever the order, the chunks or the passes."""

import pytest
import torch
from builders import apply_map

from hf_crosscache import CacheGeometry, TranslatorFitter
from hf_crosscache.errors import CalibrationError, GeometryError
from hf_crosscache.geometry import LayerGeometry
from hf_crosscache.maps import SourceHead
from hf_crosscache.rope import RotaryTable
from hf_crosscache.states import AttentionWeights, LayerStates, PairedStates


def geometry(layers, heads, dim):
    table = RotaryTable(torch.ones(dim // 2), 1.0)
    return CacheGeometry("test", (LayerGeometry(heads, dim, "full_attention", None, dim),) * layers, (table,) * layers)


SOURCE, TARGET = geometry(3, 2, 8), geometry(2, 3, 4)
PLANTED = {(t, h): (SourceHead((t + h) % 3, h % 2), SourceHead((t + h + 1) % 3, (h + 1) % 2)) for t in range(2) for h in range(3)}


def states(batch, seed, noise=0.02):
    """Target heads that are affine maps of two source heads each, the same maps for every seed."""
    generator, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1234)
    sides = {}
    for role in ("keys", "values"):
        source = [torch.randn(batch, 2, 64, 8, generator=generator) + 3 for _ in range(3)]
        target = []
        for t in range(2):
            heads = []
            for h in range(3):
                x = torch.cat([source[layer][:, head] for layer, head in PLANTED[t, h]], -1)
                y = x @ torch.randn(16, 4, generator=fixed) + torch.randn(4, generator=fixed)
                heads.append(y + noise * torch.randn(y.shape, generator=generator))
            target.append(torch.stack(heads, 1))
        sides[role] = source, target
    return PairedStates(LayerStates(sides["keys"][0], sides["values"][0]), LayerStates(sides["keys"][1], sides["values"][1]))


def fitted(fitter, batches=4):
    if fitter.needs_screening:
        for i in range(batches):
            fitter.screen(states(4, i), "fit").screen(states(2, 100 + i), "validation")
        fitter.choose_candidates()
    for i in range(batches):
        fitter.update(states(4, i), "fit").update(states(2, 100 + i), "validation")
    return fitter.fit()


def test_head_support_finds_the_planted_heads():
    maps = fitted(TranslatorFitter(SOURCE, TARGET, k=2, candidates=5))
    for t in range(2):
        for role in (maps.keys, maps.values):
            assert [set(heads) for heads in role[t].blocks] == [set(PLANTED[t, h]) for h in range(3)]
            assert role[t].weight.shape == (3, 16, 4)
    assert maps.r2["keys"].shape == (2, 3) and maps.r2["keys"].min() > 0.99


@pytest.mark.parametrize("support,k", [("full", 3), ("full", 2), ("head", 6), ("head", 3)])
def test_maps_reproduce_the_target(support, k):
    maps = fitted(TranslatorFitter(SOURCE, TARGET, support=support, k=k))
    held_out = states(3, 999, noise=0.0)
    for t in range(2):
        out = apply_map(maps.keys[t], held_out.source.keys)
        error = (out - held_out.target.keys[t]).square().sum() / (held_out.target.keys[t] - held_out.target.keys[t].mean()).square().sum()
        assert error < (0.6 if (support, k) == ("full", 2) else 1e-3)


def test_chunks_of_groups_change_nothing(monkeypatch):
    whole = fitted(TranslatorFitter(SOURCE, TARGET, k=2, candidates=3))
    monkeypatch.setattr("hf_crosscache.fitter._CHUNK_ELEMENTS", 1)
    pieces = fitted(TranslatorFitter(SOURCE, TARGET, k=2, candidates=3))
    for a, b in zip(whole.keys + whole.values, pieces.keys + pieces.values, strict=True):
        assert a.blocks == b.blocks
        torch.testing.assert_close(a.weight, b.weight, rtol=1e-4, atol=1e-5)


def test_passes_over_target_layers_change_nothing():
    whole = fitted(TranslatorFitter(SOURCE, TARGET, k=2))
    second = fitted(TranslatorFitter(SOURCE, TARGET, k=2, target_layers=[1]))
    assert whole.keys[1].blocks == second.keys[0].blocks
    torch.testing.assert_close(whole.keys[1].weight, second.keys[0].weight, rtol=1e-4, atol=1e-5)


def test_merge_equals_one_fitter():
    def screened():
        fitter = TranslatorFitter(SOURCE, TARGET, k=2)
        return fitter.screen(states(4, 0), "fit").screen(states(2, 100), "validation").choose_candidates()

    one, left, right = screened(), screened(), screened()
    for i in range(4):
        one.update(states(4, i), "fit").update(states(2, 100 + i), "validation")
        (left if i % 2 else right).update(states(4, i), "fit").update(states(2, 100 + i), "validation")
    a, b = one.fit(), left.merge(right).fit()
    torch.testing.assert_close(a.keys[0].weight, b.keys[0].weight, rtol=1e-4, atol=1e-5)


def test_sample_weight_of_zero_leaves_a_row_out():
    def fit(weight, spoil):
        fitter = TranslatorFitter(SOURCE, TARGET, support="full", k=3)
        fit_states = states(4, 0)
        if spoil:
            fit_states.target.keys[0][0] = 50.0
        fitter.update(PairedStates(fit_states.source, fit_states.target, weight), "fit")
        return fitter.update(states(2, 100), "validation").fit().keys[0].weight

    weight = torch.ones(4, 64)
    weight[0] = 0
    torch.testing.assert_close(fit(weight, spoil=True), fit(weight, spoil=False), rtol=1e-3, atol=1e-4)


def fit_weighted(make, k, support="head", attention_weights=None, sample_weight=None, noise=1.0):
    fitter = TranslatorFitter(SOURCE, TARGET, support=support, k=k, candidates=k)
    rows, held_out = make(states(4, 0, noise)), states(2, 100, noise)
    if fitter.needs_screening:
        fitter.screen(states(4, 0, noise), "fit").screen(held_out, "validation").choose_candidates()
    weighted = PairedStates(rows.source, rows.target, sample_weight, attention_weights)
    return fitter.update(weighted, "fit").update(held_out, "validation").fit()


def first_window_twice(paired):
    sides = []
    for side in (paired.source, paired.target):
        sides.append(LayerStates(*([torch.cat([x, x[:1]]) for x in role] for role in (side.keys, side.values))))
    return PairedStates(*sides)


def one_window_counts_twice(heads):
    """Weights of 2 on the first window for the keys of some target heads (layer, head), of 1 for all else."""
    weights = AttentionWeights([torch.ones(4, 3, 64) for _ in range(2)], [torch.ones(4, 3, 64) for _ in range(2)])
    for layer, head in heads:
        weights.keys[layer][0, head] = 2
    return weights


def assert_maps_equal(one, another, heads=slice(None)):
    assert [one.blocks[h] for h in range(len(one.blocks))] == [another.blocks[h] for h in range(len(another.blocks))]
    torch.testing.assert_close(one.weight[heads], another.weight[heads], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(one.mean_y[heads], another.mean_y[heads], rtol=1e-3, atol=1e-4)


def test_each_head_and_role_has_attention_weights_of_its_own(monkeypatch):
    monkeypatch.setattr("hf_crosscache.ridge.ALPHAS", (1e-4,))  # one alpha serves all heads
    plain = fit_weighted(lambda rows: rows, 2)
    twice = fit_weighted(first_window_twice, 2)
    weighted = fit_weighted(lambda rows: rows, 2, attention_weights=one_window_counts_twice([(1, 2)]))
    assert_maps_equal(weighted.keys[1], twice.keys[1], heads=2)
    assert_maps_equal(weighted.keys[1], plain.keys[1], heads=slice(0, 2))
    for one, another in [(weighted.keys[0], plain.keys[0]), *zip(weighted.values, plain.values, strict=True)]:
        assert_maps_equal(one, another)
    assert (twice.keys[1].weight[2] - plain.keys[1].weight[2]).abs().max() > 1e-2


@pytest.mark.parametrize("support,k,served", [("full", 2, 3), ("full", 3, 6), ("head", 6, 6)])
def test_a_shared_regression_takes_the_mean_of_the_attention_weights(support, k, served, monkeypatch):
    """Of a layer's heads, or of all heads where every target reads everything."""
    monkeypatch.setattr("hf_crosscache.ridge.ALPHAS", (1e-4,))
    weights = one_window_counts_twice([(1, h) for h in range(3)] if served == 3 else [(t, h) for t in range(2) for h in range(3)])
    weights.keys[1][0] = torch.tensor([4.0, 1.0, 1.0])[:, None].expand(3, 64)  # 2 on average
    weighted = fit_weighted(lambda rows: rows, k, support, weights)
    assert_maps_equal(weighted.keys[1], fit_weighted(first_window_twice, k, support).keys[1])
    assert_maps_equal(weighted.values[1], fit_weighted(lambda rows: rows, k, support).values[1])


def test_attention_weights_multiply_sample_weights(monkeypatch):
    monkeypatch.setattr("hf_crosscache.ridge.ALPHAS", (1e-4,))
    sample_weight = torch.ones(4, 64)
    sample_weight[0] = 0.5
    both = fit_weighted(lambda rows: rows, 2, attention_weights=one_window_counts_twice([(0, 1)]), sample_weight=sample_weight)
    assert_maps_equal(both.keys[0], fit_weighted(lambda rows: rows, 2).keys[0], heads=1)


def test_what_is_missing_is_said():
    with pytest.raises(CalibrationError, match="screen"):
        TranslatorFitter(SOURCE, TARGET, k=2).update(states(1, 0), "fit")
    with pytest.raises(CalibrationError, match="validation split has no rows"):
        TranslatorFitter(SOURCE, TARGET, support="full", k=3).update(states(1, 0), "fit").fit()
    with pytest.raises(GeometryError, match="k = 9 source heads asked for; the source has 6"):
        TranslatorFitter(SOURCE, TARGET, k=9)
    with pytest.raises(GeometryError, match="'head' or 'full'"):
        TranslatorFitter(SOURCE, TARGET, support="heads")  # type: ignore[arg-type]
    a = TranslatorFitter(SOURCE, TARGET, k=1).screen(states(1, 0), "fit").screen(states(1, 1), "validation").choose_candidates()
    with pytest.raises(CalibrationError, match="different candidate heads"):
        a.merge(TranslatorFitter(SOURCE, TARGET, k=1))


def test_the_largest_published_pair_fits_an_80_gib_card():
    """Qwen3-14B (40 layers) -> Qwen3-32B (64 layers), 8 heads of 128: the moments of all target layers, or of a pass over some."""
    source, target = geometry(40, 8, 128), geometry(64, 8, 128)
    whole = TranslatorFitter(source, target, k=8).moments_bytes()
    assert whole["moments"] < 45 * 2**30
    one_pass = TranslatorFitter(source, target, k=8, target_layers=range(16)).moments_bytes()
    assert max(one_pass.values()) < 24 * 2**30
    # Never the Gram of all layers and heads: 40,960 inputs would take 4 x 40,960^2 x 8 bytes = 50 GiB on their own.
    assert one_pass["moments"] < 12 * 2**30


def test_moments_bytes_is_what_the_moments_take():
    fitter = TranslatorFitter(SOURCE, TARGET, k=2, candidates=3)
    fitter.screen(states(2, 0), "fit").screen(states(2, 1), "validation")

    def taken(moments):
        return sum(t.numel() * t.element_size() for m in moments for t in (m.sum_xx, m.sum_xy))

    promised = fitter.moments_bytes()
    assert promised["screening"] == taken(m for role in fitter._roles.values() for m in role._screening.values())
    fitter.choose_candidates().update(states(2, 0), "fit").update(states(2, 1), "validation")
    assert promised["moments"] == taken(m for role in fitter._roles.values() for m in role._moments.values())
