"""A survey holds what evaluations of the same setting say, and tells what it could not measure."""

import pytest
from builders import TEXTS

from hf_crosscache import evaluate_translator
from hf_crosscache.attention_cosine import AttentionCosine
from hf_crosscache.errors import CalibrationError
from hf_crosscache.html_report import html_report
from hf_crosscache.survey import survey_translator

SETTINGS = {"windows": 8, "context_tokens": 96, "continuation_tokens": 32, "batch_size": 8}


@pytest.fixture(scope="module")
def survey(translator, small, large, tokenizer):
    asked = {"recompute_lasts": (0, 16, 96), "lengths": (48, 5000, 3500), "recompute_last": 8}
    return survey_translator(translator, small, large, tokenizer, TEXTS, **SETTINGS, **asked)


def test_the_main_figures_are_those_of_an_evaluation(survey, translator, small, large, tokenizer):
    assert survey.evaluation == evaluate_translator(translator, small, large, tokenizer, TEXTS, recompute_last=8, **SETTINGS)


def test_the_series_vary_one_thing_each(survey):
    assert [found.recompute_last for found in survey.by_recompute_last] == [0, 8, 16]
    assert {found.context_tokens for found in survey.by_recompute_last} == {96}
    assert [found.context_tokens for found in survey.by_context_tokens] == [48, 96]
    assert {found.recompute_last for found in survey.by_context_tokens} == {8}
    assert survey.by_recompute_last[1] is survey.by_context_tokens[1] is survey.evaluation


def test_what_is_not_measured_is_told(survey):
    assert list(survey.not_measured) == [3500, 5000]
    assert "beyond the 4,096 positions" in survey.not_measured[5000]
    assert survey.not_measured[3500] == "the test documents hold only 3 windows so long"


def test_it_makes_a_page(survey):
    assert isinstance(survey.attention, AttentionCosine) and survey.attention.n == 8
    assert survey.setting["texts"] == "documents.jsonl.xz" and survey.setting["device"] == "CPU"
    assert "qwen3-small → qwen3-large" in html_report(survey)


def test_a_lone_window_is_refused(translator, small, large, tokenizer):
    with pytest.raises(CalibrationError, match=r"Two windows of 128 tokens needed"):
        survey_translator(translator, small, large, tokenizer, TEXTS, **{**SETTINGS, "windows": 1})
