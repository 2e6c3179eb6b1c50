"""What each kind of panel is for: it recovers a planted target that source heads alone do not reach."""

from types import SimpleNamespace

import pytest
import torch

from hf_crosscache import CacheGeometry, TranslatorFitter
from hf_crosscache.errors import CalibrationError, GeometryError
from hf_crosscache.feature_choice import choose_panels
from hf_crosscache.geometry import LayerGeometry
from hf_crosscache.nonlinear_features import NonlinearFeatures
from hf_crosscache.panels import Panels
from hf_crosscache.rope import RotaryTable, apply_rope
from hf_crosscache.source_features import inputs_of
from hf_crosscache.states import LayerStates, PairedStates

RANK, UNITS = 3, 40
TABLE = RotaryTable(torch.tensor([1.0, 0.3, 0.1, 0.03]), 1.2)


def geometry(layers, heads, dim):
    return CacheGeometry("test", (LayerGeometry(heads, dim, "full_attention", None, 8),) * layers, (TABLE,) * layers)


SOURCE, TARGET = geometry(3, 2, 8), geometry(2, 2, 8)
FIXED = torch.Generator().manual_seed(7)
WITHIN, SHIFT = torch.randn(96, RANK, generator=FIXED) / 96**0.5, torch.randn(96, generator=FIXED)
READOUT = {(role, i): torch.randn(UNITS, 16, generator=FIXED) for role in ("keys", "values") for i in range(2)}
DRAWN = NonlinearFeatures.drawn(RANK, UNITS)


def paired(planted, seed, batch=6):
    """Source states with biases, and target heads that are a function of them: "low_rank", "values" (for keys) or "gelu"."""
    generator = torch.Generator().manual_seed(seed)
    position_ids = torch.arange(4, 68, dtype=torch.int32)[None]
    cos_sin = TABLE.cos_sin(position_ids, torch.float32)
    stripped, values = ([torch.randn(batch, 2, 64, 8, generator=generator) + 4 for _ in range(3)] for _ in range(2))
    source = LayerStates([apply_rope(keys, *cos_sin) for keys in stripped], values, SOURCE.rotary, position_ids)
    z = (inputs_of(source) - SHIFT) @ WITHIN
    hidden = torch.nn.functional.pad(z, (0, UNITS - RANK)) if planted == "low_rank" else DRAWN.of(z - 4 * WITHIN.sum(0) + SHIFT @ WITHIN)
    sides = {role: [(hidden @ READOUT[role, i]).unflatten(-1, (2, 8)).transpose(1, 2) for i in range(2)] for role in ("keys", "values")}
    if planted == "values":  # and values from keys
        sides = {"keys": [layer.flip(1) - 1 for layer in values[:2]], "values": [2 * layer for layer in stripped[1:]]}
    keys = [apply_rope(layer, *cos_sin) for layer in sides["keys"]]
    return PairedStates(source, LayerStates(keys, sides["values"], TARGET.rotary, position_ids))


def calibration(planted):
    """As much of a Calibration as choosing needs."""

    def states(description, tokens=None, panels=None):
        for split, seeds in (("fit", range(6)), ("validation", range(100, 102))):
            for seed in seeds:
                yield paired(planted, seed), split

    side = SimpleNamespace(geometry=SOURCE), SimpleNamespace(geometry=TARGET)
    return SimpleNamespace(source=side[0], target=side[1], states=states, native_layers=0, tokens=6144)


def r2(planted, panels, k=1, **settings):
    """The least held-out R2 of any head, and the maps."""
    fitter = TranslatorFitter(SOURCE, TARGET, k=k, features=panels.width, other_role=panels.other_role, **settings)
    for visit in (fitter.screen, fitter.update):
        if visit == fitter.update:
            fitter.choose_candidates()
        for states, split in calibration(planted).states(""):
            visit(PairedStates(panels.behind(states.source, None), states.target), split)
    fitted = fitter.fit()
    return min(scores.min().item() for scores in fitted.r2.values()), fitted


def test_source_features_recover_a_planted_low_rank_map():
    given = calibration("low_rank")
    of_rank = choose_panels(given, source_features=RANK)
    assert r2("low_rank", of_rank)[0] > 1 - 1e-4
    assert r2("low_rank", choose_panels(given, source_features=RANK - 1))[0] < 0.95
    assert r2("low_rank", Panels(SOURCE))[0] < 0.5
    states = paired("low_rank", 500).source
    features = of_rank.source.of(states).flatten(0, 1)
    torch.testing.assert_close(features.T.cov(), torch.eye(RANK), atol=0.15, rtol=0)  # of held-out rows
    planted = ((inputs_of(states) - SHIFT) @ WITHIN).flatten(0, 1)
    both = torch.linalg.lstsq(torch.nn.functional.pad(features, (0, 1), value=1.0), planted)
    assert both.residuals.sum() < 1e-4 * planted.var(0).sum() * len(planted)


def test_the_other_role_is_found_where_it_is_planted():
    assert r2("values", Panels(SOURCE))[0] < 0.05
    found, fitted = r2("values", Panels(SOURCE, other_role=True))
    assert found > 1 - 1e-4
    behind = len(SOURCE)
    keys, values = ([[tuple(b) for row in m.blocks for b in row] for m in side] for side in (fitted.keys, fitted.values))
    assert keys == [[(behind + i, 1), (behind + i, 0)] for i in (0, 1)]
    assert values == [[(behind + i, 0), (behind + i, 1)] for i in (1, 2)]


def test_the_other_role_doubles_what_there_is_to_choose_from():
    fitter = TranslatorFitter(SOURCE, TARGET, k=12, other_role=True)
    assert not fitter.needs_screening and fitter.candidates == 12
    assert TranslatorFitter(SOURCE, TARGET, support="full", k=6, other_role=True).candidates == 6
    with pytest.raises(GeometryError, match="k = 7 source heads asked for; the source has 6"):
        TranslatorFitter(SOURCE, TARGET, k=7)


def test_hidden_units_recover_a_planted_readout():
    """Nearly: the planted units are others, over an affine map of the same three features, and ten times fewer."""
    given = calibration("gelu")
    linear = choose_panels(given, source_features=RANK)
    wide = choose_panels(given, source_features=RANK, nonlinear_features=400)
    plain, with_units = r2("gelu", linear)[0], r2("gelu", wide)[0]
    assert with_units > 0.99 > plain + 0.02
    units = wide.nonlinear.of(wide.source.of(paired("gelu", 900).source)).flatten(0, 1)
    assert units.mean(0).abs().max() < 0.3 and (units.std(0) - 1).abs().max() < 0.3


@pytest.mark.parametrize("width", [0, 97])
def test_a_width_that_the_source_has_not_is_refused(width):
    with pytest.raises(CalibrationError, match=f"source_features = {width}: 1 to 96, the width of all keys and values"):
        choose_panels(calibration("low_rank"), source_features=width)


def test_hidden_units_need_features_to_read():
    with pytest.raises(CalibrationError, match="source_features="):
        choose_panels(calibration("low_rank"), nonlinear_features=8)
