"""From texts to a translator: what the dials of a fit change, and what they leave alone."""

import pytest
import torch
from builders import MODELS, TEXTS, pocket_model
from transformers import AutoTokenizer

from hf_crosscache import Calibration, evaluate_translator, fit_translator
from hf_crosscache.errors import CalibrationError


@pytest.fixture(scope="module")
def pair():
    return pocket_model("qwen3-large"), pocket_model("qwen3-small"), AutoTokenizer.from_pretrained(MODELS / "qwen3-small")


@pytest.fixture(scope="module")
def calibration(pair):
    return Calibration(*pair, TEXTS, tokens=60_000, window=256)


def test_matched_values_vary_as_the_targets_own_and_keep_more(pair, calibration):
    plain, matched = (fit_translator(calibration, k=4, match_variance=match) for match in (False, True))
    for before, after, r2 in zip(plain.values, matched.values, plain.r2["values"], strict=True):
        torch.testing.assert_close(after.weight, before.weight / r2.clamp_min(0.05).sqrt()[:, None, None])
        torch.testing.assert_close(after.mean_y, before.mean_y)
    torch.testing.assert_close(plain.keys[3].weight, matched.keys[3].weight)
    assert matched.summary["match_variance"] and not plain.summary["match_variance"]
    kept = [evaluate_translator(t, *pair, TEXTS, windows=32, context_tokens=256)["translated"].context_recovered for t in (plain, matched)]
    assert kept[1] > kept[0] + 0.02


def test_native_features_explain_more_and_every_map_reads_them(pair, calibration):
    plain = fit_translator(calibration, k=4)
    native = Calibration(*pair, TEXTS, tokens=60_000, window=256, native_layers=1)
    lexical = fit_translator(native, k=4, native_features=64)
    assert lexical.keys[0] is None and lexical.native_layers == 1 and lexical.features.width == 64
    source_layers, heads = len(lexical.source.geometry), lexical.source.geometry.layers[0].num_key_value_heads
    for layer_map in (*lexical.keys[1:], *lexical.values[1:]):
        for row in layer_map.blocks:
            assert [b.layer for b in row if b.layer >= source_layers] == [source_layers] * heads and len(row) == 4 + heads
    for role in ("keys", "values"):
        assert (lexical.r2[role][1:].mean() > plain.r2[role][1:].mean() + 0.02) and (lexical.r2[role][0] == 1).all()


def test_every_target_head_chooses_its_own_heads(calibration):
    translator = fit_translator(calibration, k=8)  # of sixteen, so that twelve candidates are fewer than all
    assert len({row for layer_map in translator.keys for row in layer_map.blocks}) > 1
    small = fit_translator(calibration, k=8, candidates=16)  # all of them are candidates
    assert len({row for layer_map in small.keys for row in layer_map.blocks}) > 1


def test_native_layers_that_the_target_has_not_are_refused(pair):
    with pytest.raises(CalibrationError, match="native_layers = 6: 0 to 5"):
        Calibration(*pair, TEXTS, tokens=20_000, native_layers=6)
