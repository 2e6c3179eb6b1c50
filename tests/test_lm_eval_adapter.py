"""The harness on a translated target: with an exact translator it gives what it gives on the target itself."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from builders import MODELS, identity_translator

pytest.importorskip("lm_eval")
from lm_eval.models.huggingface import HFLM

from hf_crosscache.errors import CrossCacheError, HandOffError
from hf_crosscache.lm_eval_adapter import TranslatedLM

LARGE = str(MODELS / "qwen3-large")
TEXT = "The CREATE TABLE command creates a new table in the current database. The table is owned by the user who runs it. "
PAIRS = [
    (TEXT + "To remove a table again, use", " DROP TABLE"),
    (TEXT + "To remove a table again, use", " an index of the database"),
    ("Indexes speed up", " queries"),
    ("Indexes speed up", " the server"),
    ("", "The table"),
]
YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
{more}
"""


@pytest.fixture(scope="module")
def exact_folder(large, tmp_path_factory):
    return str(identity_translator(large).save_pretrained(tmp_path_factory.mktemp("exact"), dtype=torch.float32))


@pytest.fixture(scope="module")
def ours(exact_folder):
    return TranslatedLM(exact_folder, LARGE, LARGE, batch_size=3, device="cpu", dtype="float32", max_length=64)


@pytest.fixture(scope="module")
def theirs():
    return HFLM(LARGE, batch_size=3, device="cpu", dtype="float32", max_length=64)


def asked(*arguments):
    return [SimpleNamespace(args=given, task_name=None) for given in arguments]


def test_an_exact_translation_scores_as_the_target_does(ours, theirs):
    one, other = (model.loglikelihood(asked(*PAIRS), disable_tqdm=True) for model in (ours, theirs))
    assert [likelihood for likelihood, _ in one] == pytest.approx([likelihood for likelihood, _ in other], abs=1e-3)
    assert [greedy for _, greedy in one] == [greedy for _, greedy in other]


def test_an_exact_translation_generates_as_the_target_does(ours, theirs):
    prompts = [(text, {"until": ["."], "max_gen_toks": 12}) for text in (TEXT[:80], "Indexes speed up", TEXT[20:100])]
    assert ours.generate_until(asked(*prompts), disable_tqdm=True) == theirs.generate_until(asked(*prompts), disable_tqdm=True)


def test_whole_texts_are_scored_once_token_for_token(ours, large, tokenizer):
    (total,) = ours.loglikelihood_rolling(asked((TEXT * 4,)), disable_tqdm=True)
    ids = tokenizer(TEXT * 4, return_tensors="pt").input_ids
    rows = [(0, 64)] + [(start, min(start + 33, ids.shape[1])) for start in range(64, ids.shape[1], 33)]
    expected = 0.0
    with torch.no_grad():
        for start, end in rows:  # each window of 64 but the first has what comes before it as its first half
            before = torch.tensor([[ours.prefix_token_id]]) if start == 0 else ids[:, max(0, end - 65) : start]
            log_p = large(torch.cat([before, ids[:, start:end]], 1)).logits[0, before.shape[1] - 1 : -1].log_softmax(-1)
            expected += log_p.gather(-1, ids[0, start:end, None]).sum().item()
    assert total == pytest.approx(expected, rel=1e-4)


def test_what_it_cannot_do_is_said(exact_folder):
    for wrong in ({"recompute_last": 0}, {"batch_size": "auto"}):
        with pytest.raises(HandOffError, match="1 at least expected"):
            TranslatedLM(exact_folder, LARGE, LARGE, **wrong)
    with pytest.raises(CrossCacheError, match="The translator's source"):
        TranslatedLM(exact_folder, str(MODELS / "qwen3-small"), LARGE, device="cpu", dtype="float32")


def test_local_tasks_run_from_the_command(translator, tmp_path):
    folder = translator.save_pretrained(tmp_path / "translator", dtype=torch.float32)
    rows = [
        {"text": TEXT + "To remove a table, use DROP", "options": [" TABLE", " apple", " seven"], "gold": 0},
        {"text": "The open() function opens a", "options": [" file", " pear", " nine"], "gold": 0},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    choice = "doc_to_target: gold\ndoc_to_choice: options\nmetric_list: [{metric: acc}]"
    answer = 'doc_to_target: "{{options[0]}}"\ngeneration_kwargs: {until: ["."], max_gen_toks: 4}\nmetric_list: [{metric: exact_match}]'
    for name, kind, more in (("pocket_choice", "multiple_choice", choice), ("pocket_answer", "generate_until", answer)):
        text = YAML.format(name=name, data=tmp_path / "rows.jsonl", kind=kind, more=more)
        (tmp_path / f"{name}.yaml").write_text(text)
    models = f"translator={folder},source={MODELS / 'qwen3-small'},target={LARGE},dtype=float32"
    command = [sys.executable, "-m", "hf_crosscache.lm_eval_adapter", "--model", "hf_crosscache", "--model_args", models, "--device", "cpu"]
    command += ["--tasks", "pocket_choice,pocket_answer", "--include_path", str(tmp_path), "--batch_size", "2"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    run = subprocess.run(
        [*command, "--output_path", str(tmp_path / "out.json")], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (written,) = tmp_path.glob("out*.json")
    results = json.loads(written.read_text())["results"]
    assert 0 <= results["pocket_choice"]["acc,none"] <= 1 and "exact_match,none" in results["pocket_answer"]
