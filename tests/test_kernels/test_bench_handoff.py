"""The benchmark of a conversation in turns: exact models give no divergence, and the committed rows say what the README says."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest
from builders import EXAMPLES, MODELS, TEXTS

PATH = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "bench_handoff.py"
RESULTS = EXAMPLES / "results" / "handoff.csv"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_handoff", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(turns, source="qwen3-small"):
    with RESULTS.open() as file:
        return [row for row in csv.DictReader(file) if row["turns"] == str(turns) and row["source"] == source]


def test_rows_are_written(bench, translator, tmp_path, monkeypatch):
    """The pair's translator stands in for both directions, by way of a model that takes turns with itself."""
    folder = translator.save_pretrained(tmp_path / "t")
    models = [str(MODELS / "qwen3-small"), str(MODELS / "qwen3-large")]
    monkeypatch.setattr(bench, "HandoffSession", _one_way(bench.HandoffSession, models))
    out = tmp_path / "handoff.csv"
    options = ["--texts", str(TEXTS), "--csv", str(out), "--turns", "3", "--said", "12", "--answered", "4", "--conversations", "2"]
    monkeypatch.setattr(sys, "argv", ["bench_handoff.py", *models, str(folder), str(folder), *options])
    bench.main()
    with out.open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == 3 and list(written[0]) == list(rows(10)[0])
    assert abs(float(written[0]["kl"])) < 1e-3 and float(written[0]["top1"]) == 1  # nothing was handed over yet
    assert [int(row["translated"]) > 0 for row in written] == [False, True, False]


def _one_way(session, models):
    def one_way(of, translators, **settings):
        return session(of, {pair: t for pair, t in translators.items() if pair == tuple(models)}, **settings)

    return one_way


@pytest.mark.parametrize(("source", "turns"), [("qwen3-small", 10), ("qwen3-small", 20), ("qwen2.5-coder-0.5b-instruct", 10)])
def test_what_is_handed_over_is_worth_it_at_every_turn(source, turns):
    measured = rows(turns, source)
    assert [int(row["turn"]) for row in measured] == list(range(1, turns + 1))
    assert all(row["most_reads"] == "1" for row in measured)
    for row in measured[1:]:
        assert float(row["kl"]) < 0.75 * min(float(row["kl_none"]), float(row["kl_wrong_document"]))
        assert float(row["top1"]) > 0.7


def test_a_switch_costs_what_is_new_and_not_what_was_before():
    measured = rows(20)
    assert len({row["translated"] for row in measured[2:]}) == 1
    switch, prefill = ([float(row[f"{name}_ms"]) for row in measured] for name in ("switch", "prefill"))
    early, late = sum(switch[2:8]), sum(switch[14:20])
    assert late < 2 * early  # the history is four times as long
    assert sum(prefill[14:20]) > 2 * sum(prefill[2:8])
