"""Ridge regression as pure functions on moments: solve, score, choose alpha, choose inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import CalibrationError
from .moments import WeightedMoments

ALPHAS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class RidgeSolution:
    """The affine maps `y = (x - mean_x) weight + mean_y` of G regressions.

    weight: `[G, n, m]`, mean_x: `[G, n]`, mean_y: `[G, m]`; float64.
    """

    weight: torch.Tensor
    mean_x: torch.Tensor
    mean_y: torch.Tensor


def solve(moments: WeightedMoments, alpha: float) -> RidgeSolution:
    """Solve G ridge regressions.

        weight = (sigma_xx + alpha * mean(diag(sigma_xx)) * I)^-1 sigma_xy

    alpha is relative to the mean variance of the inputs, so that it means the same for keys of any scale and any number of rows.

    Raises:
        CalibrationError: sigma_xx is not positive definite, as with constant inputs or fewer rows than inputs at alpha = 0.
    """
    factor = _cholesky(_penalised(moments.sigma_xx, alpha), alpha)
    weight = torch.cholesky_solve(moments.sigma_xy, factor)
    return RidgeSolution(weight, moments.mean_x, moments.mean_y.expand(weight.shape[0], -1))


def residual_variance(solution: RidgeSolution, moments: WeightedMoments) -> torch.Tensor:
    """Mean squared error of the maps on the rows behind some moments, `[G, m]`; held-out moments give the held-out error."""
    w = solution.weight
    sigma_xx, sigma_xy = moments.sigma_xx, moments.sigma_xy
    spread = moments.variance_y - 2 * (w * sigma_xy).sum(1) + (w * (sigma_xx @ w)).sum(1)
    offset = moments.mean_y - solution.mean_y - ((moments.mean_x - solution.mean_x)[:, None] @ w)[:, 0]
    return spread + offset.square()


def r2(solution: RidgeSolution, moments: WeightedMoments, head_dim: int) -> torch.Tensor:
    """Share of the variance explained, head by head.

    Args:
        head_dim: the m outputs are m / head_dim heads side by side.

    Returns:
        `[G, m / head_dim]`: 1 - error / variance, both summed over the head; at most 1, below 0 where the mean would do better.
    """
    error = residual_variance(solution, moments).unflatten(-1, (-1, head_dim)).sum(-1)
    variance = moments.variance_y.unflatten(-1, (-1, head_dim)).sum(-1)
    return 1 - error / variance.clamp_min(1e-30)


def cholesky(moments: WeightedMoments, alpha: float) -> torch.Tensor:
    """Return the lower factor of `sigma_xx` with its ridge, `[G, n, n]` float64; raises as `solve` does."""
    return _cholesky(_penalised(moments.sigma_xx, alpha), alpha)


def greedy_select(fit: WeightedMoments, held_out: WeightedMoments, block: int, k: int, alpha: float, given: int = 0) -> torch.Tensor:
    """Choose k of the input blocks by forward selection on held-out error.

    At each step every remaining block is tried beside the blocks already chosen, the ridge fitted on `fit`, the error measured on
    `held_out`, and the best block taken. Choosing a block is one step of block elimination, applied to both sets of moments as the
    same change of basis, so the n^3 of k full solves is paid once and not once a candidate.

    Args:
        block: width of one input block; the n inputs are n / block blocks side by side.
        k: number of blocks to choose.
        given: how many of the last blocks are read in any case; they do not count towards k.
        alpha: relative ridge, as in `solve`.

    Returns:
        `[G, k + given]` block indices, ascending.
    """
    a, c = _penalised(fit.sigma_xx, alpha), fit.sigma_xy
    h, hc = held_out.sigma_xx, held_out.sigma_xy
    groups, n, _ = c.shape
    count = n // block
    everyone = torch.arange(groups, device=c.device)
    eye = torch.eye(block, dtype=a.dtype, device=a.device)
    chosen = torch.zeros(groups, count, dtype=torch.bool, device=a.device)
    for step in range(given + k):
        blocks = torch.arange(count, device=a.device)
        a_bb = a.view(groups, count, block, count, block)[:, blocks, :, blocks].transpose(0, 1)
        h_bb = h.view(groups, count, block, count, block)[:, blocks, :, blocks].transpose(0, 1)
        factor = _cholesky(torch.where(chosen[:, :, None, None], eye, a_bb), alpha)
        v = torch.cholesky_solve(c.unflatten(1, (count, block)), factor)
        gain = (v * (2 * hc.unflatten(1, (count, block)) - h_bb @ v)).sum((-1, -2))
        best = gain.masked_fill(chosen, -torch.inf).argmax(1)
        if step < given:
            best = torch.full_like(best, count - given + step)
        chosen[everyone, best] = True
        # Eliminate the chosen block: x_j <- x_j - x_b m_j and y <- y - x_b v for every other input j.
        a_b = a.unflatten(1, (count, block))[everyone, best]
        h_b = h.unflatten(1, (count, block))[everyone, best]
        hc_b = hc.unflatten(1, (count, block))[everyone, best]
        m, v_b = torch.cholesky_solve(a_b, factor[everyone, best]), v[everyone, best]
        h_bb_best, m_t = h_bb[everyone, best], m.transpose(1, 2)
        a = a - a_b.transpose(1, 2) @ m
        c = c - a_b.transpose(1, 2) @ v_b
        hc = hc - m_t @ hc_b - h_b.transpose(1, 2) @ v_b + m_t @ (h_bb_best @ v_b)
        cross = m_t @ h_b
        h = h - cross - cross.transpose(1, 2) + m_t @ (h_bb_best @ m)
    return chosen.nonzero()[:, 1].view(groups, given + k)


def _penalised(sigma_xx: torch.Tensor, alpha: float) -> torch.Tensor:
    diagonal = sigma_xx.diagonal(dim1=-2, dim2=-1)
    penalty = alpha * diagonal.mean(-1, keepdim=True)
    return sigma_xx + torch.diag_embed(penalty.expand_as(diagonal))


def _cholesky(matrix: torch.Tensor, alpha: float) -> torch.Tensor:
    factor, info = torch.linalg.cholesky_ex(matrix)
    if info.any():
        raise CalibrationError(
            f"The Gram matrix of the inputs is not positive definite at alpha = {alpha:g}: the calibration has too few tokens for "
            f"{matrix.shape[-1]} inputs, or a source head is constant. Use more text, a smaller k, or a larger alpha."
        )
    return factor
