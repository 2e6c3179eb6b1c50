"""The benchmark of a whole switch: its check against float64 passes, and catches a wrong translation."""

import csv
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders import MODELS, TEXTS

from hf_crosscache import Calibration, fit_translator

PATH = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "bench_switch.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_switch", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_written_with_their_error(bench, translator, tmp_path, monkeypatch):
    folder = translator.save_pretrained(tmp_path / "t")
    models = [str(MODELS / "qwen3-small"), str(MODELS / "qwen3-large")]
    out = tmp_path / "switch.csv"
    options = ["--texts", str(TEXTS), "--csv", str(out), "--tokens", "64", "128", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_switch.py", *models, str(folder), *options])
    bench.main()
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["context_tokens"] for row in rows] == ["64", "128"] and all(float(row["relative_error"]) < 1e-5 for row in rows)
    with (PATH.parent / "results" / "switch.csv").open() as file:
        committed = list(csv.DictReader(file))
    assert list(committed[0]) == list(rows[0]) and all(float(row["relative_error"]) < 5e-3 for row in committed)


def test_a_wrong_translation_ends_the_run(bench, translator, small, large, tokenizer):
    ids = tokenizer("some words to read " * 30, return_tensors="pt").input_ids
    wrong = replace(translator, values=tuple(replace(m, weight=m.weight * 1.01) for m in translator.values))
    layers = list(bench.TranslatedCache(bench.prefill(small, ids)[0], wrong, target_model=large, input_ids=ids))
    pairs = bench.states_of(bench.prefill(small, ids)[0])
    errors = [bench.relative_error(layers, pairs, maps, large, ids, 3) for maps in (wrong, translator)]
    assert errors[0] < 1e-5 < 1e-3 < errors[1]


@pytest.mark.parametrize(
    "native_layers,panels",
    [
        (2, {"native_features": 40}),
        (1, {"native_features": 20, "source_features": 24, "nonlinear_features": 32, "other_role": True}),
    ],
)
def test_panels_are_held_against_the_oracle(bench, small, large, tokenizer, native_layers, panels):
    calibration = Calibration(small, large, tokenizer, TEXTS, tokens=20_000, native_layers=native_layers)
    translator = fit_translator(calibration, k=2, **panels)
    ids = tokenizer("some words to read " * 30, return_tensors="pt").input_ids
    pairs = bench.states_of(bench.prefill(small, ids)[0])
    layers = list(bench.TranslatedCache(pairs, translator, target_model=large, input_ids=ids))
    assert bench.relative_error(layers, pairs, translator, large, ids, 5) < 1e-5
