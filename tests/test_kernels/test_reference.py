"""The references against a float64 oracle, on uninitialised outputs, at the sizes where loops go wrong."""

from dataclasses import dataclass

import pytest
import torch
from hf_crosscache_kernels import map_heads_reference, weighted_products_reference


@dataclass(frozen=True)
class Problem:
    id: str
    batch: int
    tokens: int
    source_heads: int
    source_dim: int
    heads: int
    dim: int
    blocks: int
    shared: bool = False
    dtype: torch.dtype = torch.float32


PROBLEMS = [
    Problem("one-token", 1, 1, 2, 64, 2, 64, 4),
    Problem("odd", 2, 63, 3, 80, 1, 96, 2),
    Problem("past-a-chunk", 1, 4099, 2, 16, 3, 8, 3),
    Problem("full", 2, 100, 2, 32, 4, 16, 6, shared=True),
    Problem("bfloat16", 1, 50, 2, 64, 2, 128, 8, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.id)
def test_map_heads_is_the_affine_map_of_float64(problem):
    p, generator = problem, torch.Generator().manual_seed(0)
    states = {layer: torch.randn(p.batch, p.source_heads, p.tokens, p.source_dim, generator=generator).to(p.dtype) for layer in range(4)}
    rows = 1 if p.shared else p.heads
    blocks = [[((h + b) % 4, (h + b // 2) % p.source_heads) for b in range(p.blocks)] for h in range(rows)]
    weight = torch.randn(p.heads, p.blocks * p.source_dim, p.dim, generator=generator)
    bias = torch.randn(p.heads, p.dim, generator=generator)
    out = map_heads_reference(states, blocks, weight, bias, torch.full((p.batch, p.heads, p.tokens, p.dim), float("nan")))
    for head in range(p.heads):
        x = torch.cat([states[layer][:, g].double() for layer, g in blocks[0 if p.shared else head]], -1)
        oracle = x @ weight[head].double() + bias[head].double()
        assert (out[:, head] - oracle).norm() < 1e-5 * oracle.norm()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_products_are_those_of_float64(shared, weighted):
    x, y = torch.randn(3, 200, 7), torch.randn(1 if shared else 3, 200, 4)
    w = torch.rand(200) if weighted else None
    found = weighted_products_reference(x, y, w)
    x, y = x.double(), y.double()
    d = torch.diag(torch.ones(200) if w is None else w).double()
    oracle = (x.mT @ d @ x, x.mT @ d @ y, (y.mT @ d @ y).diagonal(dim1=1, dim2=2), (d @ x).sum(1), (d @ y).sum(1), d.sum())
    for got, want in zip(found, oracle, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
