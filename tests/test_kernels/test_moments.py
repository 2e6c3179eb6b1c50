"""`accumulate_moments`, by every implementation that runs here, against float64 sums."""

import os

import pytest
import torch
from hf_crosscache_kernels import accumulate_moments, accumulate_moments_reference, weighted_products_reference
from problems import MOMENTS, Moments, moments_oracle, relative_error

CUDA = torch.cuda.is_available()
SUMS = ("sum_x", "sum_y", "sum_xx", "sum_xy", "sum_yy")
# float16 operands: eleven bits, rounded to nearest, so errors of rows cancel; what is left of 150 rows stays under this
HALF = 2e-3


def check(a, tolerance):
    oracle = moments_oracle(a)
    torch.testing.assert_close(a["total"], oracle["total"], rtol=1e-6, atol=0)
    for name in SUMS:
        found = a[name].tril() if name == "sum_xx" else a[name]
        assert relative_error(found, oracle[name]) < tolerance, name


@pytest.mark.parametrize("problem", MOMENTS, ids=lambda p: p.id)
def test_the_reference_is_the_oracle(problem):
    a = problem.arguments()
    accumulate_moments_reference(**a)
    check(a, 1e-5)


@pytest.mark.parametrize("problem", MOMENTS, ids=lambda p: p.id)
def test_the_kernel_is_the_oracle(problem, triton_here):
    a = problem.arguments(triton_here)
    accumulate_moments(**a)
    check(a, 1e-5 if problem.dtype == torch.float32 else HALF)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_parts_add_up(implementation, triton_here, monkeypatch):
    monkeypatch.setattr("hf_crosscache_kernels.moments._ROWS_AT_ONCE", 32)
    monkeypatch.setattr("hf_crosscache_kernels.reference._ELEMENTS_AT_ONCE", 1)
    problem = Moments("parts", weight="rows", rotary=(16, 16))
    a = problem.arguments(triton_here if implementation == "triton" else "cpu")
    (accumulate_moments if implementation == "triton" else accumulate_moments_reference)(**a)
    check(a, 1e-5)
    once = {name: a[name].clone() for name in SUMS}
    (accumulate_moments if implementation == "triton" else accumulate_moments_reference)(**a)
    for name in SUMS:
        torch.testing.assert_close(a[name], 2 * once[name])


def test_states_far_from_zero_stay_positive_definite(triton_here):
    """Keys with biases: in float16 products about a shift, the smallest eigenvalue is that of float64."""
    problem = Moments("biased", source=(2, 2, 32), batch=4, tokens=400, dtype=torch.float16)
    a = problem.arguments(triton_here)
    for states in a["source"]:
        states += 60.0
    a["source_shift"] = torch.stack([s.float().mean((0, 2)) for s in a["source"]])
    accumulate_moments(**a)
    found, oracle = a["sum_xx"][0].tril(), moments_oracle(a)["sum_xx"][0]
    smallest = [torch.linalg.eigvalsh(lower + lower.tril(-1).T)[0].item() for lower in (found, oracle)]
    assert smallest[0] == pytest.approx(smallest[1], rel=0.02) and smallest[1] > 0


def test_the_same_seeds_give_the_same_bits(triton_here):
    runs = []
    for _ in range(2):
        a = MOMENTS[-1].arguments(triton_here)
        accumulate_moments(**a)
        runs.append([a[name].clone() for name in SUMS])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_regressions_keep_their_own_scale(triton_here):
    a = Moments("scales", weight="regressions", dtype=torch.bfloat16).arguments(triton_here)
    a["sample_weight"][1] *= 1e-9
    accumulate_moments(**a)
    oracle = moments_oracle(a)
    for name in ("sum_x", "sum_xy"):
        assert relative_error(a[name][1], oracle[name][1]) < HALF
    assert a["total"][1].item() == pytest.approx(oracle["total"][1].item(), rel=1e-5)


def test_sums_that_a_kernel_would_write_past_are_refused(triton_here):
    a = Moments("sums").arguments(triton_here)
    a["sum_xy"] = a["sum_xy"].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="sum_xy of shape"):
        accumulate_moments(**a)


def test_weights_of_each_regression_need_outputs_of_each():
    a = Moments("shared", together=True, weight="regressions").arguments()
    with pytest.raises(ValueError, match="need outputs of their own; 1 given"):
        accumulate_moments(**a)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_products_are_those_of_float64(shared, weighted):
    x, y = torch.randn(3, 200, 7), torch.randn(1 if shared else 3, 200, 4)
    w = torch.rand(1, 200) if weighted else None
    found = weighted_products_reference(x, y, w)
    x, y = x.double(), y.double()
    d = torch.diag(torch.ones(200) if w is None else w[0]).double()
    oracle = (x.mT @ d @ x, x.mT @ d @ y, (y.mT @ d @ y).diagonal(dim1=1, dim2=2), (d @ x).sum(1), (d @ y).sum(1), d.sum()[None])
    for got, want in zip(found, oracle, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter cannot be traced")
def test_it_is_a_torch_operation():
    a = Moments("op", tokens=5, batch=2).arguments("cuda" if CUDA else "cpu")
    torch.library.opcheck(torch.ops.hf_crosscache.accumulate_moments.default, tuple(a.values()))
