"""How sure a figure is: bootstrap intervals over windows or items, and a paired test of two arms on the same ones."""

from __future__ import annotations

import torch

_RESAMPLES = 2000
_SIGN_FLIPS = 10_000


def resamples(n: int) -> torch.Tensor:
    """Draw n of n with replacement, many times; the same draws on every call, so that arms are resampled together: int64 `[R, n]`."""
    return torch.randint(n, (_RESAMPLES, n), generator=torch.Generator().manual_seed(0))


def mean(scores: torch.Tensor, draws: torch.Tensor) -> tuple[float, float, float]:
    """Mean of `[n]` scores, with the 2.5 and 97.5 % quantiles of its bootstrap."""
    return (scores.mean().item(), *_quantiles(scores[draws].mean(1)))


def share_recovered(worst: torch.Tensor, arm: torch.Tensor, best: torch.Tensor, draws: torch.Tensor) -> tuple[float, float, float]:
    """(worst - arm) / (worst - best) of the means of `[n]` scores, with the 2.5 and 97.5 % quantiles of its bootstrap."""
    means = [scores[draws].mean(1) for scores in (worst, arm, best)]
    ratios = (means[0] - means[1]) / (means[0] - means[2])
    return (((worst.mean() - arm.mean()) / (worst.mean() - best.mean())).item() + 0.0, *_quantiles(ratios + 0.0))  # -0 becomes 0


def paired_p_value(one: torch.Tensor, other: torch.Tensor) -> float:
    """Two-sided p-value of a paired sign-flip test: that two arms differ no more than chance would have it.

    Where the scores are right or wrong this is McNemar's test, sampled: only items on which the arms differ count.

    Args:
        one, other: float64 `[n]` scores of the same items.
    """
    differences = one - other
    differences = differences[differences != 0]
    signs = torch.randint(2, (_SIGN_FLIPS, len(differences)), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    as_extreme = (signs @ differences).abs() >= differences.sum().abs() - 1e-9
    return (1 + as_extreme.sum().item()) / (1 + _SIGN_FLIPS)


def _quantiles(resampled: torch.Tensor) -> tuple[float, float]:
    low, high = torch.quantile(resampled, torch.tensor([0.025, 0.975], dtype=resampled.dtype)).tolist()
    return low, high
