"""Tables and CSV rows say what the evaluation says."""

import csv

import torch

from hf_crosscache.evaluation import Arm, Evaluation
from hf_crosscache.report import append_csv, results_table

COLUMNS = [
    "source",
    "target",
    "support",
    "k",
    "lexical",
    "refined",
    "sink_tokens",
    "recompute_last",
    "native_layers",
    "context_tokens",
    "arm",
    "n",
    "nll",
    "kl",
    "top1",
    "context_recovered",
    "context_recovered_low",
    "context_recovered_high",
    "gap_recovered",
    "artefact_mb",
    "fit_seconds",
    "device",
    "torch",
    "transformers",
    "commit",
]
ARM = Arm("translated", 9, 2.51234, 2.4, 2.6, 0.2, 0.1, 0.3, 0.8, 0.7, 0.9, 0.6, 0.5, 0.7, None, None, None)
EVALUATION = Evaluation((ARM,), 384, 128, 4, 16)


def test_table_has_a_line_an_arm():
    lines = results_table(EVALUATION).splitlines()
    assert len(lines) == 2 and "2.5123" in lines[1] and "0.600 [0.500, 0.700]" in lines[1] and lines[1].endswith("-")


def test_rows_are_appended_under_one_heading(tmp_path, translator):
    folder = translator.save_pretrained(tmp_path / "t")
    for _ in range(2):
        append_csv(tmp_path / "new" / "q.csv", EVALUATION, translator, folder, torch.device("cpu"), commit="abc")
    with (tmp_path / "new" / "q.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS and len(rows) == 2
    assert rows[1]["context_recovered"] == "0.6" and rows[1]["gap_recovered"] == "" and rows[1]["commit"] == "abc"
    assert float(rows[0]["artefact_mb"]) > 0 and rows[0]["source"] == "qwen3-small"


def test_committed_results_hold_the_figures_that_the_readme_claims(examples):
    with (examples / "results" / "quality.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS

    def recovered(source, support, arm="translated", native_layers="0", refined="0"):
        wanted = (support, arm, "0", native_layers, refined)
        names = ("support", "arm", "recompute_last", "native_layers", "refined")
        at_384 = [row for row in rows if row["context_tokens"] == "384" and source in row["source"]]
        chosen = [row for row in at_384 if tuple(row[name] for name in names) == wanted]
        assert len(chosen) == 1 and int(chosen[0]["n"]) >= 256 and float(chosen[0]["fit_seconds"]) < 120
        return float(chosen[0]["context_recovered"])

    assert recovered("1.5b", "head") >= 0.84 and recovered("0.5b", "head") >= 0.61
    assert recovered("1.5b", "full") >= 0.95 and recovered("0.5b", "full") >= 0.79
    for source in ("1.5b", "0.5b"):
        for support in ("head", "full"):
            assert recovered(source, support, "wrong_document") < 0.05
    assert recovered("0.5b", "head", native_layers="2", refined="1") >= 0.93
    assert recovered("1.5b", "head", native_layers="2", refined="1") >= 0.985
    for source in ("1.5b", "0.5b"):
        assert recovered(source, "head", "wrong_document", native_layers="2", refined="1") < 0.05
