"""The commands, as a user types them."""

import csv
import json

import pytest
from builders import MODELS, TEXTS

from hf_crosscache.cli import main

SOURCE, TARGET = str(MODELS / "qwen3-small"), str(MODELS / "llama")
PAIR = ["--source", SOURCE, "--target", TARGET]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """qwen3-small -> llama: other depth of heads (2 -> 1) and head size (32 -> 64)."""
    out = tmp_path_factory.mktemp("cli") / "translator"
    fit = ["fit", SOURCE, TARGET, "--texts", str(TEXTS), "--out", str(out), "--k", "4", "--tokens", "30000", "--window", "256"]
    assert main(fit) == 0
    return out


def test_info_says_what_it_is(folder, capsys):
    assert main(["info", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "qwen3-small (qwen3, 6 layers, 2 heads of 32)" in told and "llama (llama, 6 layers, 1 heads of 64)" in told
    assert "support head, k = 4; first 4 tokens native" in told and "held-out R2: keys 0." in told


def test_eval_prints_writes_and_records(folder, tmp_path, capsys):
    command = ["eval", str(folder), *PAIR, "--texts", str(TEXTS), "--windows", "16", "--context-tokens", "160"]
    command += ["--continuation-tokens", "64", "--json", str(tmp_path / "e.json"), "--csv", str(tmp_path / "e.csv"), "--record"]
    assert main(command) == 0
    table = capsys.readouterr().out
    arms = {arm["arm"]: arm for arm in json.loads((tmp_path / "e.json").read_text())["arms"]}
    assert set(arms) == {"native", "none", "source", "translated", "wrong_document"} and "wrong_document" in table
    assert arms["translated"]["context_recovered"] > arms["wrong_document"]["context_recovered"] + 0.1
    with (tmp_path / "e.csv").open() as file:
        assert [row["arm"] for row in csv.DictReader(file)] == list(arms)
    main(["info", str(folder)])
    assert "context recovered on held-out documents: 0." in capsys.readouterr().out


def test_tasks_prints_and_writes_a_row_a_score(folder, tmp_path, capsys):
    command = ["tasks", str(folder), *PAIR, "--texts", str(TEXTS), "--tasks", "copy_passage", "--items", "8", "--context-tokens", "128"]
    assert main([*command, "--json", str(tmp_path / "t.json"), "--csv", str(tmp_path / "t.csv"), "--commit", "abc"]) == 0
    table = capsys.readouterr().out.splitlines()
    scores = json.loads((tmp_path / "t.json").read_text())["scores"]
    assert len(table) == 1 + len(scores) == 1 + 5 * 2 and "copy_passage" in table[1] and "wrong_document" in table[-1]
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["metric"]) for row in rows] == [(score["arm"], score["metric"]) for score in scores]
    assert {(row["k"], row["context_tokens"], row["items"], row["commit"]) for row in rows} == {("4", "128", "8", "abc")}


def test_report_writes_a_page(folder, tmp_path, capsys):
    command = [
        "report",
        str(folder),
        *PAIR,
        "--texts",
        str(TEXTS),
        "--windows",
        "8",
        "--context-tokens",
        "96",
        "--continuation-tokens",
        "32",
    ]
    assert main([*command, "--out", str(tmp_path / "new" / "page.html")]) == 0
    verdict, path = capsys.readouterr().out.splitlines()
    page = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert "llama keeps " in verdict and path.endswith("page.html") and page.startswith("<!doctype html>")


def test_generate_answers(folder, tmp_path, capsys):
    prompt = "The CREATE TABLE command creates a new table in the current database. The table is owned by the user"
    command = ["generate", str(folder), *PAIR, "--max-new-tokens", "8", "--recompute-last", "4"]
    assert main([*command, "--prompt", prompt]) == 0
    answer = capsys.readouterr().out
    assert main([*command[:-2], "--prompt", "a few words"]) == 0  # shorter than what is left to the target by default
    capsys.readouterr()
    (tmp_path / "p.txt").write_text(prompt)
    assert main([*command, "--prompt-file", str(tmp_path / "p.txt")]) == 0
    assert answer.strip() and capsys.readouterr().out == answer


def test_errors_are_told_in_a_line(folder, tmp_path, capsys):
    swapped = ["--source", TARGET, "--target", SOURCE]
    assert main(["generate", str(folder), *swapped, "--prompt", "a b c d e f"]) == 2
    assert "The translator's source is 'qwen3-small'" in capsys.readouterr().err
    assert main(["info", str(tmp_path / "none")]) == 2
    assert main(["fit", SOURCE, TARGET, "--texts", str(tmp_path / "no.txt"), "--out", str(tmp_path / "x")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_bench_prints_a_line_a_provider_and_writes_rows(capsys, tmp_path):
    models = [str(MODELS / name) for name in ("qwen3-small", "qwen3-large")]
    assert main(["bench", *models, "--k", "2", "--tokens", "16", "40", "--csv", str(tmp_path / "rows.csv"), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 and "reference" in printed[-1] and "x  " in printed[-1]
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [row["tokens"] for row in rows] == ["16", "40"] and all(float(row["relative_error"]) < 1e-5 for row in rows)
    assert all(float(row["ms_p20"]) <= float(row["ms_p50"]) <= float(row["ms_p80"]) for row in rows)


def test_bench_full_support_in_another_dtype(capsys):
    models = [str(MODELS / name) for name in ("gemma3", "qwen3-small")]
    assert main(["bench", *models, "--support", "full", "--k", "2", "--tokens", "20", "--device", "cpu", "--dtype", "bfloat16"]) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_a_translator_is_fitted_with_native_layers_and_refined(tmp_path, capsys):
    texts = ["--texts", str(TEXTS)]
    options = ["--tokens", "20000", "--window", "128", "--k", "2", "--native-layers", "2", "--native-features", "32", "--experts", "2"]
    assert main(["fit", SOURCE, TARGET, *texts, "--out", str(tmp_path / "t"), *options]) == 0
    told = capsys.readouterr().out
    assert "first 2 layers native" in told and "k = 2, 2 experts" in told
    options = ["--tokens", "20000", "--window", "192", "--steps", "3", "--batch-size", "2", "--learning-rate", "1e-3"]
    assert main(["refine", str(tmp_path / "t"), *PAIR, *texts, "--out", str(tmp_path / "r"), *options]) == 0
    assert "refined in 3 steps" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "r").iterdir()} >= {"translator_config.json", "translator.safetensors"}


def test_tune_keeps_what_the_budget_allows(tmp_path, capsys):
    options = ["--budget", "0.3", "--native-layers", "0", "1", "--recompute-last", "0", "16", "--windows", "6", "--context-tokens", "128"]
    command = ["tune", SOURCE, TARGET, "--texts", str(TEXTS), "--out", str(tmp_path), "--k", "2", "--fit-tokens", "16000", *options]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "1 native layers, last 16" in told and "kept:" in told and (tmp_path / "native-1" / "translator_config.json").exists()
