"""K-means: some rows in a few clusters, by the nearest of their centroids."""

from __future__ import annotations

import torch

_ROUNDS = 25


def k_means(x: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    """Find centroids of some rows: k-means++ from a fixed seed, then Lloyd's rounds until none moves.

    Args:
        x: `[N, F]`.
        count: how many; at most N.

    Returns:
        `[count, F]` centroids, those of the most rows first. A cluster that loses all its rows keeps its centroid.

    Source: k-means++ (Arthur and Vassilvitskii, 2007).
    """
    draw = torch.Generator().manual_seed(seed)
    centroids = x[torch.randint(len(x), (1,), generator=draw).to(x.device)]
    while len(centroids) < count:
        distance = _distances(x, centroids).amin(1).double().cpu() + 1e-30
        centroids = torch.cat([centroids, x[torch.multinomial(distance, 1, generator=draw).to(x.device)]])
    for _ in range(_ROUNDS):
        member = torch.nn.functional.one_hot(_distances(x, centroids).argmin(1), count).to(x.dtype)
        rows = member.sum(0)[:, None]
        moved = torch.where(rows > 0, (member.T @ x) / rows.clamp_min(1), centroids)
        if torch.equal(moved, centroids):
            break
        centroids = moved
    rows = torch.bincount(_distances(x, centroids).argmin(1), minlength=count)
    return centroids[rows.argsort(descending=True, stable=True)]


def nearest_as_affine(centroids: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the choice of the nearest centroid of standardised rows as affine scores of the rows themselves, the highest of which counts.

        |z - c|^2 = |z|^2 - 2 (z c - |c|^2 / 2),   z = (x - mean) / std

    Args:
        centroids: `[E, F]` of standardised rows; mean, std: `[F]`.

    Returns:
        weight `[F, E]` and bias `[E]`, float32.
    """
    weight = (centroids.double() / std.double()).T
    bias = -(mean.double() @ weight) - centroids.double().square().sum(1) / 2
    return weight.float(), bias.float()


def _distances(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    return (x.square().sum(1)[:, None] - 2 * x @ centroids.T + centroids.square().sum(1)).clamp_min(0)
