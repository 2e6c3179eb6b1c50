"""Theorems about moments: batches, merges, weights and shifts change nothing but the rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_crosscache import WeightedMoments
from hf_crosscache.errors import CalibrationError, GeometryError


def rows(groups, n_rows, n, m, seed, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(groups, n_rows, n, generator=generator) + offset
    y = torch.randn(groups, n_rows, m, generator=generator) - offset
    return x, y, torch.rand(n_rows, generator=generator) + 0.1


def gather(*batches):
    moments = WeightedMoments.empty_like(batches[0][0], batches[0][1])
    for x, y, weight in batches:
        moments.update(x, y, weight)
    return moments


def assert_equal(a, b, rtol=1e-5):
    for name in ("mean_x", "mean_y", "sigma_xx", "sigma_xy", "variance_y"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=rtol, atol=1e-5)
    assert a.weight == pytest.approx(b.weight)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(2, 40), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
def test_update_equals_concatenation_equals_merge(groups, n_rows, n, m, seed):
    a, b = rows(groups, n_rows, n, m, seed), rows(groups, n_rows + 3, n, m, seed + 1, offset=2.0)
    together = gather((torch.cat([a[0], b[0]], 1), torch.cat([a[1], b[1]], 1), torch.cat([a[2], b[2]])))
    assert_equal(gather(a, b), together)
    assert_equal(gather(a).merge(gather(b)), together)


def test_moments_are_the_weighted_covariances_of_float64():
    x, y, w = rows(2, 500, 5, 3, seed=0, offset=3.0)
    moments = gather((x, y, w))
    x, y, w = x.double(), y.double(), w.double() / w.double().sum()
    mean_x, mean_y = (w[:, None] * x).sum(1), (w[:, None] * y).sum(1)
    dx, dy = x - mean_x[:, None], y - mean_y[:, None]
    torch.testing.assert_close(moments.mean_x, mean_x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moments.sigma_xx, (w[:, None] * dx).mT @ dx, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments.sigma_xy, (w[:, None] * dx).mT @ dy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments.variance_y, (w[:, None] * dy.square()).sum(1), rtol=1e-5, atol=1e-6)


def test_weight_two_is_the_row_given_twice():
    x, y, _ = rows(1, 30, 4, 2, seed=3)
    twice = gather((torch.cat([x, x[:, :1]], 1), torch.cat([y, y[:, :1]], 1), torch.ones(31)))
    weight = torch.ones(30)
    weight[0] = 2
    assert_equal(gather((x, y, weight)), twice)


def test_no_weights_are_weights_of_one():
    x, y, _ = rows(2, 30, 4, 2, seed=4)
    assert_equal(gather((x, y, None)), gather((x, y, torch.ones(30))), rtol=0)


def test_shared_outputs_equal_repeated_outputs():
    x, y, w = rows(3, 50, 4, 2, seed=5)
    shared, repeated = gather((x, y[:1], w)), gather((x, y[:1].expand(3, -1, -1), w))
    torch.testing.assert_close(shared.sigma_xy, repeated.sigma_xy)
    torch.testing.assert_close(shared.variance_y.expand(3, -1), repeated.variance_y)


def test_inputs_far_from_zero_stay_positive_definite():
    x, y, _ = rows(1, 4000, 16, 2, seed=6)
    moments = gather((x + 1000.0, y, None), (x.flip(1) + 1000.0, y, None))
    smallest = torch.linalg.eigvalsh(moments.sigma_xx[0])[0]
    assert smallest > 0.5
    uncentred = ((x[0] + 1000).T @ (x[0] + 1000)) / 4000 - torch.outer((x[0] + 1000).mean(0), (x[0] + 1000).mean(0))
    assert torch.linalg.eigvalsh(uncentred)[0] < smallest - 0.1  # what a float32 Gram without a shift makes of it


def test_select_inputs_equals_moments_of_the_selected_inputs():
    x, y, w = rows(2, 60, 6, 2, seed=7)
    columns = torch.tensor([[0, 3, 5], [1, 2, 4]])
    picked = torch.stack([x[g][:, columns[g]] for g in range(2)])
    assert_equal(gather((x, y, w)).select_inputs(columns), gather((picked, y, w)))


def test_memory_does_not_grow_with_rows():
    x, y, w = rows(1, 100, 8, 4, seed=8)
    moments = gather(*[(x, y, w)] * 5)
    assert sum(t.numel() for t in vars(moments).values()) == 2 * (8 + 4) + 1 + 8 * 8 + 8 * 4 + 4


def test_states_that_are_not_finite_are_refused():
    x, y, w = rows(1, 10, 3, 2, seed=9)
    moments = WeightedMoments.empty_like(x, y)
    with pytest.raises(CalibrationError, match="not finite"):
        moments.update(x.index_fill(1, torch.tensor([2]), float("nan")), y, w)


def test_other_shapes_are_refused():
    x, y, w = rows(1, 10, 3, 2, seed=9)
    with pytest.raises(GeometryError, match="were given"):
        gather((x, y, w)).update(x[..., :2], y, w)
    with pytest.raises(GeometryError, match="cannot take"):
        gather((x, y, w)).merge(gather((x, y[..., :1], w)))
