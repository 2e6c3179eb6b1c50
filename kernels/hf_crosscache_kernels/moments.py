"""`accumulate_moments`: the sums that many weighted regressions between heads need, from states as two models cached them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ._launch import ceil_div, check_outputs, interpreting, launch, name_of, readable, register, row_stride
from .reference import accumulate_moments_reference

_ROWS_AT_ONCE = 4096  # of the panels, and of one float32 sum: what follows is added in float64
_TILE = 128
_ROWS_A_STEP = 64
_OPTIONS = {"num_warps": 8, "num_stages": 3, "maxnreg": 128}


def accumulate_moments(
    source: Sequence[torch.Tensor],
    target: Sequence[torch.Tensor],
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    source_shift: torch.Tensor,
    target_shift: torch.Tensor,
    sample_weight: torch.Tensor | None,
    source_cos: torch.Tensor,
    source_sin: torch.Tensor,
    source_tables: torch.Tensor,
    source_positions: torch.Tensor,
    target_cos: torch.Tensor,
    target_sin: torch.Tensor,
    target_tables: torch.Tensor,
    target_positions: torch.Tensor,
    total: torch.Tensor,
    sum_x: torch.Tensor,
    sum_y: torch.Tensor,
    sum_xx: torch.Tensor,
    sum_xy: torch.Tensor,
    sum_yy: torch.Tensor,
) -> None:
    """Add some rows to the moments of G regressions; `accumulate_moments_reference` says what is computed, argument by argument.

    On CUDA with triton the states of 4,096 rows at a time are stripped, centred and rounded once a head, to float16 (eleven bits, as
    TF32 has, at twice its speed); every product of two heads is a tile that one program sums in float32 on the tensor cores and adds to
    float64 in place. No regression's inputs are ever gathered. float32 states stay float32, in three TF32 products. Of `sum_xx` the
    lower triangle is written. Elsewhere the reference runs.
    """
    if sample_weight is not None and len(sample_weight) > 1 and len(target_blocks) != len(sample_weight):
        raise ValueError(
            f"{len(sample_weight)} regressions with weights of their own need outputs of their own; {len(target_blocks)} given."
        )
    _accumulate_moments(
        source, target, source_blocks, target_blocks, source_shift, target_shift, sample_weight, source_cos, source_sin, source_tables,
        source_positions, target_cos, target_sin, target_tables, target_positions, total, sum_x, sum_y, sum_xx, sum_xy, sum_yy,
    )  # fmt: skip


def _run_triton(
    source: Sequence[torch.Tensor],
    target: Sequence[torch.Tensor],
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    source_shift: torch.Tensor,
    target_shift: torch.Tensor,
    sample_weight: torch.Tensor | None,
    source_cos: torch.Tensor,
    source_sin: torch.Tensor,
    source_tables: torch.Tensor,
    source_positions: torch.Tensor,
    target_cos: torch.Tensor,
    target_sin: torch.Tensor,
    target_tables: torch.Tensor,
    target_positions: torch.Tensor,
    total: torch.Tensor,
    sum_x: torch.Tensor,
    sum_y: torch.Tensor,
    sum_xx: torch.Tensor,
    sum_xy: torch.Tensor,
    sum_yy: torch.Tensor,
) -> None:
    kernels = _kernels()
    check_outputs(total=total, sum_x=sum_x, sum_y=sum_y, sum_xx=sum_xx, sum_xy=sum_xy, sum_yy=sum_yy)
    batch, source_heads, tokens, x_dim = source[0].shape
    target_heads, y_dim = target[0].shape[1], target[0].shape[3]
    groups, n, m = sum_xy.shape
    x_blocks = (source_blocks[..., 0] * source_heads + source_blocks[..., 1]).int().contiguous()
    y_blocks = (target_blocks[..., 0] * target_heads + target_blocks[..., 1]).int().contiguous()
    half = source[0].dtype != torch.float32 and target[0].dtype != torch.float32
    panel_dtype = torch.float16 if half else torch.float32
    weights, scale = _scaled(sample_weight, batch, tokens, sum_x.device)
    weighted = sample_weight is not None
    weight_groups = weights.shape[0]
    tiles = _tiles(n, m, sum_x.device)
    part = min(tokens, _ROWS_AT_ONCE)
    sequences = min(batch, max(1, _ROWS_AT_ONCE // part))
    capacity = sequences * part
    x = sum_x.new_empty((len(source) * source_heads, capacity, x_dim), dtype=panel_dtype)
    y = sum_x.new_empty((len(target) * target_heads, capacity, y_dim), dtype=panel_dtype)
    options = _OPTIONS if half else {"num_warps": 8, "num_stages": 2}
    operand = name_of(torch.float32 if interpreting() else panel_dtype)
    for first in range(0, batch, sequences):
        for begin in range(0, tokens, part):
            rows = slice(first, min(first + sequences, batch)), slice(begin, min(begin + part, tokens))
            count = (rows[0].stop - first) * (rows[1].stop - begin)
            _fill(x, source, rows, source_shift, source_cos, source_sin, source_tables, source_positions)
            _fill(y, target, rows, target_shift, target_cos, target_sin, target_tables, target_positions)
            weight = weights[:, rows[0], rows[1]].reshape(weight_groups, -1).contiguous() if weighted else weights
            stride, scale_stride = (count, 1) if weight_groups > 1 else (0, 0)
            arguments = (
                x, y, x_blocks, y_blocks, weight, scale, tiles, sum_xx, sum_xy, count, capacity, len(tiles), n, m, x_blocks.shape[1],
                y_blocks.shape[1], y_blocks.shape[1] if len(y_blocks) > 1 else 0, stride,
                scale_stride,
            )  # fmt: skip
            launch(
                kernels.products_kernel, (groups * len(tiles),), arguments,
                X_DIM=x_dim, Y_DIM=y_dim, WEIGHTED=weighted, OPERAND=operand, BLOCK=_TILE, BLOCK_R=_ROWS_A_STEP,
                PRECISION="tf32x3", **options,
            )  # fmt: skip
            for states, blocks, sums, squares, dim in ((x, x_blocks, sum_x, None, x_dim), (y, y_blocks, sum_y, sum_yy, y_dim)):
                width, columns = sums.shape[1], ceil_div(sums.shape[1], _TILE)
                arguments = (
                    states, blocks, weight, scale, sums, sums if squares is None else squares, count, capacity, columns, width,
                    blocks.shape[1], stride, scale_stride,
                )  # fmt: skip
                launch(
                    kernels.sums_kernel, (columns * len(sums),), arguments,
                    DIM=dim, WEIGHTED=weighted, SQUARED=squares is not None, BLOCK=_TILE, BLOCK_R=_ROWS_A_STEP,
                )  # fmt: skip
    total += weights.double().sum((1, 2)) * scale if weighted else batch * tokens


_accumulate_moments = register(accumulate_moments_reference, _run_triton, ("total", "sum_x", "sum_y", "sum_xx", "sum_xy", "sum_yy"))


def _scaled(sample_weight: torch.Tensor | None, batch: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights `[G or 1, B, T]` of at most 1, so that a product with them fits float16, and what each row was divided by."""
    if sample_weight is None:
        one = torch.ones(1, device=device)
        return one, one
    weights = sample_weight.to(device=device, dtype=torch.float32).view(-1, batch, tokens)
    scale = weights.amax((1, 2)).clamp_min(torch.finfo(torch.float32).tiny)
    return weights / scale[:, None, None], scale


def _tiles(n: int, m: int, device: torch.device) -> torch.Tensor:
    """List the tiles of one regression: those of the lower triangle of X'X, then those of X'Y."""
    x_tiles, y_tiles = -(-n // _TILE), -(-m // _TILE)
    pairs = [(i, j) for i in range(x_tiles) for j in range(i + 1)] + [(i, x_tiles + j) for i in range(x_tiles) for j in range(y_tiles)]
    return torch.tensor(pairs, dtype=torch.int32).to(device)


def _fill(
    panel: torch.Tensor,
    layers: Sequence[torch.Tensor],
    rows: tuple[slice, slice],
    shift: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write the stripped, centred states of some rows into a panel, `[layers * heads, sequences * tokens, D]`."""
    states, pointers = readable([layer[rows[0]] for layer in layers])
    batch, heads, _, dim = states[0].shape
    begin, length = rows[1].start, rows[1].stop - rows[1].start
    per_head = panel.stride(0)
    blocks = ceil_div(length, 128)
    own = (positions[rows[0]] if positions.shape[0] > 1 else positions).contiguous()
    arguments = (
        torch.tensor(pointers).to(panel.device), tables.contiguous(), cos.contiguous(), sin.contiguous(), own, shift.contiguous(), panel,
        begin, begin, length, blocks, batch, heads, *states[0].stride()[:3], heads * per_head, length * dim, per_head, row_stride(own),
        cos.shape[1] * cos.shape[2],
    )  # fmt: skip
    launch(
        _kernels().strip_kernel, (len(states) * batch * heads * blocks,), arguments,
        DIM=dim, ROTARY=2 * cos.shape[2], CENTRED=True, DTYPE=name_of(states[0].dtype), BLOCK_T=128, num_warps=8,
    )  # fmt: skip


@cache
def _kernels() -> Any:
    """Import triton's side when the first launch needs it."""
    from . import _moments_triton

    return _moments_triton
