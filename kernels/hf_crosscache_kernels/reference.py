"""Plain-torch references: the CPU path, the oracle of every faster kernel, and its documentation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROWS_AT_ONCE = 4096  # bounds the gathered inputs: 4,096 tokens x 8 blocks x 128 x 4 bytes = 16 MiB a head


def map_heads_reference(
    states: dict[int, torch.Tensor],
    blocks: Sequence[Sequence[tuple[int, int]]],
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Map blocks of source heads to target heads.

        out[:, h] = [ states[layer][:, head] for (layer, head) in blocks[h] ] @ weight[h] + bias[h]

    Args:
        states: source layer index -> `[B, H_src, T, D_src]` pre-RoPE keys, or values; any floating dtype.
        blocks: for each target head the source heads it reads, as (layer, head); one entry alone serves all target heads.
        weight: `[H_tgt, n * D_src, D_tgt]` float32, n blocks a head.
        bias: `[H_tgt, D_tgt]` float32.
        out: `[B, H_tgt, T, D_tgt]` float32, written in full.

    Returns:
        `out`. Products and sums are in float32.
    """
    length = out.shape[2]
    for start in range(0, length, _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, length))
        gathered = [torch.cat([states[layer][:, head, rows] for layer, head in heads], dim=-1).float() for heads in blocks]
        if len(gathered) == 1 and weight.shape[0] > 1:
            joined = weight.permute(1, 0, 2).flatten(1)
            mapped = (gathered[0] @ joined).unflatten(-1, (weight.shape[0], weight.shape[2])).transpose(1, 2)
        else:
            mapped = torch.stack([x @ w for x, w in zip(gathered, weight, strict=True)], dim=1)
        out[:, :, rows] = mapped + bias[:, None]
    return out


def weighted_products_reference(
    x: torch.Tensor, y: torch.Tensor, sample_weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum the products that a weighted regression of y on x needs.

        W = diag(sample_weight);   X'WX,  X'WY,  diag(Y'WY),  X'W1,  Y'W1,  1'W1

    Args:
        x: `[G, N, n]` float32 inputs of G regressions.
        y: `[G, N, m]` float32 outputs, or `[1, N, m]` shared by all regressions.
        sample_weight: `[N]` float32 weight of each row, None for ones.

    Returns:
        `[G, n, n]`, `[G, n, m]`, `[G or 1, m]`, `[G, n]`, `[G or 1, m]` and a scalar, float32. The caller sees to it that no TF32 is used.
    """
    if sample_weight is None:
        xw, yw, total = x, y, x.new_tensor(float(x.shape[1]))
    else:
        xw, yw, total = x * sample_weight[:, None], y * sample_weight[:, None], sample_weight.sum()
    xx = xw.transpose(1, 2) @ x
    shared = y.shape[0] == 1 and x.shape[0] > 1
    xy = torch.einsum("gni,nm->gim", xw, y[0]) if shared else xw.transpose(1, 2) @ y
    return xx, xy, (yw * y).sum(1), xw.sum(1), yw.sum(1), total
