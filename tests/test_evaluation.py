"""The arms mean what they say, and their order on a real pair is the order that theory asks for."""

import math

import pytest
import torch
from builders import MODELS, identity_translator
from transformers import AutoTokenizer

from hf_crosscache import evaluate_translator
from hf_crosscache.errors import CrossCacheError
from hf_crosscache.evaluation import _score, _summarize

SETTINGS = {"windows": 32, "context_tokens": 160, "continuation_tokens": 64, "batch_size": 16}


@pytest.fixture(scope="module")
def evaluation(translator, small, large, tokenizer, texts):
    return evaluate_translator(translator, small, large, tokenizer, texts, **SETTINGS)


def test_arms_are_ordered(evaluation):
    assert evaluation["native"].context_recovered == 1 and evaluation["none"].context_recovered == 0
    assert evaluation["native"].kl == pytest.approx(0, abs=1e-5) and evaluation["native"].top1 == 1
    assert evaluation["native"].nll < evaluation["translated"].nll < evaluation["none"].nll
    assert evaluation["translated"].kl < evaluation["wrong_document"].kl
    assert evaluation["raw_copy"].nll > evaluation["translated"].nll
    assert {arm.n for arm in evaluation.arms} == {32}


def test_wrong_document_is_clearly_worse(evaluation):
    translated, control = evaluation["translated"], evaluation["wrong_document"]
    assert translated.context_recovered_low > control.context_recovered_high + 0.1
    assert control.context_recovered < 0.15


def test_intervals_hold_their_figure(evaluation):
    for arm in evaluation.arms:
        for metric in ("nll", "kl", "top1", "context_recovered", "gap_recovered"):
            low, figure, high = (getattr(arm, metric + end) for end in ("_low", "", "_high"))
            assert low - 1e-6 <= figure <= high + 1e-6


def test_gap_recovered_is_of_the_target_that_is_better(evaluation):
    assert evaluation["source"].gap_recovered == pytest.approx(0) and evaluation["native"].gap_recovered == pytest.approx(1)


def test_no_window_is_without_a_wrong_document(translator, small, large, tokenizer, texts):
    settings = {**SETTINGS, "windows": 5, "batch_size": 4}
    assert {arm.n for arm in evaluate_translator(translator, small, large, tokenizer, texts, **settings).arms} == {5}


def test_recomputing_the_tail_helps(evaluation, translator, small, large, tokenizer, texts):
    tail = evaluate_translator(translator, small, large, tokenizer, texts, recompute_last=48, **SETTINGS)
    assert tail["translated"].context_recovered > evaluation["translated"].context_recovered
    assert tail["native"].nll == pytest.approx(evaluation["native"].nll)


def test_self_translation_recovers_everything(large, tokenizer, texts):
    exact = identity_translator(large)
    arm = evaluate_translator(exact, large, large, tokenizer, texts, **{**SETTINGS, "windows": 4})["translated"]
    assert arm.context_recovered == pytest.approx(1, abs=1e-4) and arm.kl == pytest.approx(0, abs=1e-5)


def test_scores_are_those_of_a_softmax():
    logits = torch.tensor([[[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    native = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    nll, kl, top1 = _score(logits, native, torch.tensor([[0, 1]]))[0].tolist()
    log_z = math.log(math.exp(2) + 2)
    assert nll == pytest.approx(((log_z - 2) + math.log(3)) / 2)
    assert kl == pytest.approx(((math.log(1 / 3) + log_z) - 2 / 3) / 2, abs=1e-6) and top1 == 1


def test_gap_is_not_told_where_the_source_is_better():
    def scores(value):
        return torch.tensor([[value, 0.1, 0.9], [value + 0.1, 0.1, 0.9]])

    arms = _summarize({"native": scores(3.0), "none": scores(4.0), "translated": scores(3.5), "source": scores(2.0)})
    assert all(arm.gap_recovered is None for arm in arms)
    assert arms[2].context_recovered == pytest.approx(0.5)


def test_strangers_are_refused(translator, small, large, texts):
    with pytest.raises(CrossCacheError, match="another tokenizer"):
        evaluate_translator(translator, small, large, AutoTokenizer.from_pretrained(MODELS / "gemma3"), texts)
