"""Refinement: it starts at the closed form, never ends worse, goes on where it stopped, and refuses what does not fit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import MODELS, TEXTS, pocket_model
from transformers import AutoTokenizer

from hf_crosscache import CacheTranslator, Calibration, Refinement, evaluate_translator, fit_translator, refine_translator
from hf_crosscache.distillation import Distillation, HeldOut
from hf_crosscache.errors import CalibrationError
from hf_crosscache.refinement import PROGRESS

QUICK = Refinement(steps=12, batch_size=4, learning_rates=(3e-3,), continuation=64, least_context=32)


@pytest.fixture(scope="module")
def pair():
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "qwen3-large")
    return pocket_model("qwen3-small"), pocket_model("qwen3-large"), tokenizer


def fit(pair, native_layers):
    calibration = Calibration(*pair, TEXTS, tokens=40_000, window=192, native_layers=native_layers)
    return calibration, fit_translator(calibration, k=4, native_features=48 if native_layers else None)


@pytest.fixture(scope="module")
def fitted(pair):
    return fit(pair, 2)


@pytest.fixture(scope="module", params=[0, 2])
def either(request, pair, fitted):
    return fitted if request.param else fit(pair, 0)


def test_the_loss_starts_where_the_served_cache_stands(either, pair):
    calibration, translator = either
    windows = calibration.windows["validation"][:8]
    here = Distillation(translator, calibration).check(windows, 128)
    served = evaluate_translator(translator, *pair, TEXTS, windows=24, context_tokens=128, continuation_tokens=64, split="validation")[
        "translated"
    ]
    assert served.context_recovered_low - 0.1 < here.context_recovered < served.context_recovered_high + 0.1


def test_maps_as_trained_are_maps_as_served(either):
    calibration, translator = either
    distillation = Distillation(translator, calibration)
    maps = distillation.maps
    with torch.no_grad():
        for parameter in maps.parameters():
            parameter.normal_(std=0.01)
    moved = maps.to_translator()
    again = Distillation(moved, calibration)
    windows = calibration.windows["validation"][:4]
    assert again.check(windows, 100).kl == pytest.approx(distillation.check(windows, 100).kl, rel=1e-3)
    assert moved.keys[-1].blocks == translator.keys[-1].blocks and moved.keys[-1].weight.shape == translator.keys[-1].weight.shape
    assert not torch.equal(moved.keys[-1].weight, translator.keys[-1].weight)


def test_refined_is_better_than_the_closed_form(either, pair, tmp_path):
    calibration, translator = either
    refined = refine_translator(translator, calibration, QUICK)
    held_out = refined.summary["refined"]["held_out"]
    assert held_out["after"]["kl"] < held_out["before"]["kl"]
    refined.save_pretrained(tmp_path)
    found = CacheTranslator.from_pretrained(tmp_path)
    before, after = (evaluate_translator(t, *pair, TEXTS, windows=32, context_tokens=128) for t in (translator, found))
    assert after["translated"].kl < before["translated"].kl
    assert after["translated"].context_recovered > before["translated"].context_recovered
    assert abs(after["wrong_document"].context_recovered) < 0.25 < after["translated"].context_recovered


def test_errors_of_attention_outputs_count_where_wanted(fitted):
    calibration, translator = fitted
    windows = calibration.windows["fit"][:2]
    plain, listening = (Distillation(translator, calibration, weight) for weight in (0.0, 0.5))
    kl, loss = (distillation.loss(windows[:, :160], 96) for distillation in (plain, listening))
    assert loss > kl > 0
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in listening.maps.parameters())
    listening._translated = lambda source, native, translated: calibration.read(windows[:, :96]).target  # as good as native
    assert listening.loss(windows[:, :160], 96).item() == pytest.approx(0, abs=1e-4)


def test_short_contexts_are_drawn_as_often_as_long_ones(fitted, monkeypatch):
    calibration, translator = fitted
    drawn, looked_at = [], []

    def loss(self, ids, context):
        drawn.append(context)
        assert ids.shape[1] == context + 16
        return sum(parameter.sum() for parameter in self.maps.parameters()) * 0

    def check(self, windows, context):
        looked_at.append(context)
        return HeldOut(1.0, 0.0)

    monkeypatch.setattr(Distillation, "loss", loss)
    monkeypatch.setattr(Distillation, "check", check)
    settings = Refinement(steps=300, batch_size=2, learning_rates=(1e-3,), continuation=16, least_context=11)
    refine_translator(translator, calibration, settings)
    longest = calibration.window - 16
    assert min(drawn) >= 11 and max(drawn) <= longest and set(looked_at) == {44, longest}
    assert 0.4 < sum(context < 44 for context in drawn) / len(drawn) < 0.6


def test_a_step_too_far_is_not_kept(fitted):
    calibration, translator = fitted
    refined = refine_translator(
        translator, calibration, Refinement(steps=4, batch_size=2, learning_rates=(30.0,), continuation=64, least_context=32)
    )
    held_out = refined.summary["refined"]["held_out"]
    assert held_out["after"] == held_out["before"]
    torch.testing.assert_close(refined.values[-1].weight, translator.values[-1].weight)


def test_a_batch_that_overflows_is_left_out(fitted, monkeypatch):
    calibration, translator = fitted
    steps, loss = 0, Distillation.loss

    def overflows(self, ids, context):
        nonlocal steps
        steps += 1
        return loss(self, ids, context) * (float("nan") if steps in (2, 5) else 1.0)

    monkeypatch.setattr(Distillation, "loss", overflows)
    held_out = refine_translator(translator, calibration, QUICK).summary["refined"]["held_out"]
    assert steps == QUICK.steps and held_out["after"]["kl"] < held_out["before"]["kl"]


def test_the_better_learning_rate_is_taken(fitted):
    calibration, translator = fitted
    settings = Refinement(steps=20, batch_size=2, learning_rates=(30.0, 1e-3), continuation=64, least_context=32)
    refined = refine_translator(translator, calibration, settings).summary["refined"]
    assert refined["learning_rate"] == 1e-3 and refined["pilots"]["30"] > refined["pilots"]["0.001"]


def test_a_run_goes_on_where_it_stopped(fitted, tmp_path, monkeypatch):
    calibration, translator = fitted
    whole = refine_translator(translator, calibration, QUICK)

    class Interrupt(Exception):
        pass

    steps = 0
    loss = Distillation.loss

    def stops(self, ids, context):
        nonlocal steps
        steps += 1
        if steps == 9:
            raise Interrupt
        return loss(self, ids, context)

    monkeypatch.setattr(Distillation, "loss", stops)
    with pytest.raises(Interrupt):
        refine_translator(translator, calibration, QUICK, folder=tmp_path)
    assert (tmp_path / PROGRESS).exists()
    monkeypatch.setattr(Distillation, "loss", loss)
    resumed = refine_translator(translator, calibration, QUICK, folder=tmp_path)
    torch.testing.assert_close(resumed.keys[-1].weight, whole.keys[-1].weight, atol=1e-5, rtol=1e-4)


def test_refining_again_in_the_same_folder_begins_anew(fitted, tmp_path):
    calibration, translator = fitted
    once = refine_translator(translator.with_summary({"evaluation": {"arms": []}}), calibration, QUICK, folder=tmp_path)
    twice = refine_translator(once, calibration, QUICK, folder=tmp_path)
    first, second = (refined.summary["refined"]["held_out"] for refined in (once, twice))
    assert second["before"]["kl"] == pytest.approx(first["after"]["kl"], rel=1e-3) and "evaluation" not in once.summary
    again = Distillation(twice, calibration).check(calibration.windows["validation"][:64], 128)
    assert again.kl == pytest.approx(second["after"]["kl"], rel=1e-3)


def test_processes_end_together(tmp_path):
    """The second process's clock runs ahead: it would end the run alone, and the first wait for it for ever."""
    launched = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(Path(__file__).parent / "two_processes.py"),
    ]
    found = subprocess.run(launched, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("refined") == 2


def test_a_limit_of_time_ends_the_run(fitted):
    calibration, translator = fitted
    settings = Refinement(steps=100_000, batch_size=2, learning_rates=(1e-3,), continuation=64, least_context=32, minutes=0.1)
    assert refine_translator(translator, calibration, settings).summary["refined"]["steps"] < 1000


def test_what_does_not_fit_is_refused(fitted, pair):
    calibration, translator = fitted
    other = Calibration(*pair, TEXTS, tokens=20_000, window=64, native_layers=1)
    with pytest.raises(CalibrationError, match="native_layers"):
        refine_translator(translator, other)
    with pytest.raises(CalibrationError, match="least_context = 300"):
        refine_translator(translator, calibration, Refinement(least_context=300))
