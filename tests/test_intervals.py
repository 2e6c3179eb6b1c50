"""Intervals hold their figure, and the paired test is the one it says it is."""

import math

import pytest
import torch

from hf_crosscache.intervals import mean, paired_p_value, resamples, share_recovered


def test_the_interval_of_a_mean_is_that_of_its_standard_error():
    scores = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    figure, low, high = mean(scores, resamples(400))
    assert figure == pytest.approx(scores.mean().item()) and low < figure < high
    assert high - low == pytest.approx(2 * 1.96 * scores.std().item() / 20, rel=0.1)


def test_a_share_is_one_for_the_best_and_zero_for_the_worst():
    worst, best = torch.linspace(0, 1, 50).double(), torch.linspace(2, 4, 50).double()
    draws = resamples(50)
    assert share_recovered(worst, best, best, draws) == (1, 1, 1) and share_recovered(worst, worst, best, draws) == (0, 0, 0)
    assert share_recovered(worst, (worst + best) / 2, best, draws) == pytest.approx((0.5, 0.5, 0.5))


def test_right_and_wrong_answers_are_tested_as_mcnemar_does():
    one, other = torch.ones(40).double(), torch.ones(40).double()
    one[:2], other[2:13] = 0, 0  # 13 discordant pairs, 2 against 11
    exact = 2 * sum(math.comb(13, i) for i in range(3)) / 2**13
    assert paired_p_value(one, other) == pytest.approx(exact, abs=0.005) == paired_p_value(other, one)


def test_arms_that_agree_do_not_differ():
    scores = torch.rand(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert paired_p_value(scores, scores) == 1
    assert paired_p_value(scores, scores + 1) < 1e-3
