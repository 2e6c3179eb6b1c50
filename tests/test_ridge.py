"""Theorems about the solver: optimality, held-out error, and a selection that equals its brute force."""

import itertools

import pytest
import torch
from test_moments import gather, rows

from hf_crosscache import ridge
from hf_crosscache.errors import CalibrationError


def planted(groups=2, n_rows=400, n=6, m=3, seed=0, noise=0.1):
    x, _, w = rows(groups, n_rows, n, m, seed, offset=1.0)
    generator = torch.Generator().manual_seed(seed + 50)
    truth = torch.randn(groups, n, m, generator=generator)
    return x, x @ truth + 4 + noise * torch.randn(groups, n_rows, m, generator=generator), w, truth


def test_gradient_is_zero_at_the_solution():
    x, y, w, _ = planted()
    moments = gather((x, y, w))
    alpha = 0.05
    solution = ridge.solve(moments, alpha)
    weight = solution.weight.clone().requires_grad_()
    total = w.double() / w.double().sum()
    error = (y.double() - solution.mean_y[:, None]) - (x.double() - solution.mean_x[:, None]) @ weight
    penalty = alpha * moments.sigma_xx.diagonal(dim1=1, dim2=2).mean(1)
    loss = (total[:, None] * error.square()).sum() + (penalty[:, None, None] * weight.square()).sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.abs().max() < 1e-4


def test_without_noise_the_planted_map_is_found():
    x, y, w, truth = planted(noise=0.0)
    solution = ridge.solve(gather((x, y, w)), 1e-10)
    torch.testing.assert_close(solution.weight.float(), truth, rtol=1e-4, atol=1e-4)
    assert ridge.r2(solution, gather((x, y, w)), head_dim=3).min() > 1 - 1e-6


def test_held_out_error_from_moments_is_the_error_on_the_rows():
    x, y, w, _ = planted(seed=1)
    x2, y2, w2, _ = planted(seed=2)
    solution = ridge.solve(gather((x, y, w)), 1e-3)
    error = y2.double() - solution.mean_y[:, None] - (x2.double() - solution.mean_x[:, None]) @ solution.weight
    direct = (w2.double()[:, None] * error.square()).sum(1) / w2.double().sum()
    torch.testing.assert_close(ridge.residual_variance(solution, gather((x2, y2, w2))), direct, rtol=1e-4, atol=1e-6)


def test_a_random_map_is_worse_than_the_mean_and_the_solution_is_better():
    x, y, w, _ = planted(seed=3)
    moments = gather((x, y, w))
    solution = ridge.solve(moments, 1e-3)
    wrong = ridge.RidgeSolution(torch.randn_like(solution.weight) * 3, solution.mean_x, solution.mean_y)
    assert ridge.r2(solution, moments, 3).min() > 0.9
    assert ridge.r2(wrong, moments, 3).max() < 0


def test_alpha_is_relative_to_the_scale_of_the_inputs():
    x, y, w, _ = planted(seed=4)
    plain, scaled = ridge.solve(gather((x, y, w)), 0.1), ridge.solve(gather((100 * x, y, w)), 0.1)
    torch.testing.assert_close(plain.weight, 100 * scaled.weight, rtol=1e-4, atol=1e-6)


def test_a_constant_input_at_alpha_zero_is_refused():
    x, y, w = rows(1, 50, 3, 2, seed=5)
    x[..., 1] = 7.0
    with pytest.raises(CalibrationError, match="not positive definite"):
        ridge.solve(gather((x, y, w)), 0.0)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_greedy_selection_equals_forward_selection_by_full_solves(k):
    groups, block, count = 2, 3, 5
    x, _, w = rows(groups, 600, block * count, 2, seed=6)
    x2, _, w2 = rows(groups, 300, block * count, 2, seed=7)
    truth = torch.randn(groups, block * count, 2, generator=torch.Generator().manual_seed(8))
    truth *= torch.tensor([1.0, 0.1, 0.6, 0.3, 0.9]).repeat_interleave(block)[:, None]
    noise = torch.randn(groups, 600, 2, generator=torch.Generator().manual_seed(9))
    fit, held_out = gather((x, x @ truth + noise, w)), gather((x2, x2 @ truth, w2))
    found = ridge.greedy_select(fit, held_out, block, k, 1e-6)

    def error(group, blocks):
        columns = torch.tensor([b * block + i for b in blocks for i in range(block)])[None].expand(groups, -1)
        solution = ridge.solve(fit.select_inputs(columns), 1e-6)
        return ridge.residual_variance(solution, held_out.select_inputs(columns))[group].sum().item()

    for group in range(groups):
        chosen: list[int] = []
        for _ in range(k):
            rest = [b for b in range(count) if b not in chosen]
            chosen.append(min(rest, key=lambda b, group=group, chosen=chosen: error(group, [*chosen, b])))
        assert sorted(chosen) == found[group].tolist()


def test_greedy_selection_finds_the_planted_blocks():
    block, count, planted_blocks = 4, 8, [1, 4, 6]
    x, _, w = rows(1, 2000, block * count, 3, seed=10)
    keep = torch.zeros(block * count, 1)
    for b, i in itertools.product(planted_blocks, range(block)):
        keep[b * block + i] = 1
    y = x @ (keep * torch.randn(block * count, 3, generator=torch.Generator().manual_seed(11)))
    moments = gather((x, y, w))
    assert ridge.greedy_select(moments, moments, block, 3, 1e-6).tolist() == [planted_blocks]
