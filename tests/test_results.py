"""The committed results: what the README claims stands in them, with its controls, and the scripts beside them make such rows."""

import csv
import subprocess
import sys
from itertools import pairwise

import pytest
from builders import EXAMPLES, MODELS, TEXTS

RESULTS = EXAMPLES / "results"
UP, DOWN = "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"  # as sources


def rows_of(name, **wanted):
    with (RESULTS / name).open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row[column] == str(value) for column, value in wanted.items())]


def only(rows):
    (row,) = rows
    return {name: float(value) if value.replace(".", "", 1).lstrip("-").isdigit() else value for name, value in row.items()}


def test_refined_translators_reach_their_marks_within_their_cost():
    up = {tail: only(rows_of("frontier.csv", source=UP, refined=1, native_layers=2, recompute_last=tail)) for tail in (0, 16)}
    assert up[16]["context_recovered"] >= 0.95 and up[16]["gap_recovered"] >= 0.90 and up[16]["cost"] <= 0.10
    assert up[0]["context_recovered"] >= 0.93 and up[0]["cost"] <= 0.10
    down = {tail: only(rows_of("frontier.csv", source=DOWN, refined=1, native_layers=2, recompute_last=tail)) for tail in (0, 16)}
    assert down[16]["context_recovered"] >= 0.99 and down[16]["kl"] < 0.06
    assert down[0]["context_recovered"] >= 0.985 and down[0]["cost"] <= 0.10
    for row in (*up.values(), *down.values()):
        assert row["n"] >= 256 and row["wrong_document"] <= 0.05


@pytest.mark.parametrize("source", [UP, DOWN])
def test_the_frontier_has_points_from_nothing_to_half_a_prefill(source):
    points = rows_of("frontier.csv", source=source, refined=0, recompute_last=0)
    costs = sorted(float(row["cost"]) for row in points)
    assert len(set(costs)) >= 8 and costs[0] < 0.03 and 0.45 < costs[-1] <= 0.5
    assert all(int(row["n"]) >= 256 and float(row["wrong_document"]) <= 0.05 for row in points)
    kept = [float(row["context_recovered"]) for row in sorted(points, key=lambda row: float(row["cost"]))]
    assert all(later > earlier - 0.005 for earlier, later in pairwise(kept))


def test_source_features_are_worth_their_cost():
    plain, pointed = (only(rows_of(name, source=UP, native_layers=0, recompute_last=0, **given)) for name, given in (
        ("frontier.csv", {}),
        ("supports.csv", {"source_features": 512, "nonlinear_features": 0}),
    ))  # fmt: skip
    assert pointed["context_recovered"] > plain["context_recovered"] + 0.12 and pointed["cost"] < plain["cost"] + 0.01


@pytest.mark.parametrize("source", [UP, DOWN])
def test_tasks_are_large_and_hold_their_controls(source):
    rows = rows_of("tasks.csv", source=source)
    assert {row["task"] for row in rows} == {"choose_continuation", "retrieve_key", "copy_passage", "answer_questions"}
    assert all(int(row["items"]) >= 500 for row in rows)
    told = {(row["task"], row["metric"], row["arm"]): float(row["accuracy"]) for row in rows}
    for task, metric, arm in told:
        if arm == "translated":
            nothing, control = told[task, metric, "none"], told[task, metric, "wrong_document"]
            assert told[task, metric, arm] > max(nothing, control) + 0.1 and abs(control - nothing) < 0.08
    assert told["retrieve_key", "exact", "translated"] > 0.85


def test_points_are_measured_and_drawn(tmp_path):
    point = '{"fit_tokens": 20000, "k": 4, "native_layers": 1, "native_features": 16, "source_features": 16}'
    measure = [sys.executable, RESULTS / "measure_points.py", MODELS / "qwen3-small", MODELS / "qwen3-large", "--texts", TEXTS,
               "--csv", tmp_path / "points.csv", "--out", tmp_path, "--point", point, "--windows", "8", "--context-tokens", "64",
               "--recompute-last", "0"]  # fmt: skip
    subprocess.run(measure, check=True, capture_output=True, timeout=300)
    with (tmp_path / "points.csv").open() as file:
        (row,) = csv.DictReader(file)
    with (RESULTS / "frontier.csv").open() as file:
        assert list(csv.DictReader(file).fieldnames) == list(row)
    assert float(row["translate_ms"]) > 0 and 0 < float(row["cost"]) < 1 and row["source_features"] == "16"
    drawn = tmp_path / "frontier.svg"
    subprocess.run([sys.executable, RESULTS / "plot_frontier.py", "--csv", tmp_path / "points.csv", "--out", drawn], check=True)
    assert "context recovered" in drawn.read_text()
