"""Triton kernels behind `accumulate_moments`: tiles of X'WX and X'WY, and weighted sums, added to float64 in place."""

import triton
import triton.language as tl

from ._strip_triton import strip_kernel

# Counts that change from call to call and align nothing: a kernel compiled for one serves all.
_LOOSE = ["rows", "capacity", "num_tiles", "c", "e", "y_block_stride", "weight_stride", "scale_stride", "column_blocks"]
__all__ = ["products_kernel", "strip_kernel", "sums_kernel"]


@triton.jit(do_not_specialize=_LOOSE)
def products_kernel(
    x,  # [U, capacity, X_DIM] centred states of the source heads
    y,  # [V, capacity, Y_DIM] of the target heads
    x_blocks,  # int32 [G, c]
    y_blocks,  # int32 [G or 1, e]
    sample_weight,  # float32 [G or 1, rows], at most 1
    scale,  # float32 [G or 1]: what the weights were divided by
    tiles,  # int32 [tiles, 2]: row of tiles, and column of tiles, those of Y after those of X
    sum_xx,  # float64 [G, n, n], lower triangle
    sum_xy,  # float64 [G, n, m]
    rows,
    capacity,
    num_tiles,
    n,
    m,
    c,
    e,
    y_block_stride,
    weight_stride,
    scale_stride,
    X_DIM: tl.constexpr,
    Y_DIM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of one regression: X_i' W X_j where j <= i, or X_i' W Y_j. The program owns its tile, so that no sum is atomic."""
    program = tl.program_id(0)
    group = (program // num_tiles).to(tl.int64)
    tile = program % num_tiles
    i, j = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    x_tiles = tl.cdiv(n, BLOCK)
    left = i * BLOCK + tl.arange(0, BLOCK)
    at_left = _columns(x_blocks + group * c, left, n, capacity, X_DIM)
    sample_weight += group * weight_stride
    if j < x_tiles:
        right = j * BLOCK + tl.arange(0, BLOCK)
        at_right = _columns(x_blocks + group * c, right, n, capacity, X_DIM)
        acc = _product(
            x, x, at_left, at_right, left < n, right < n, sample_weight, rows,
            X_DIM, X_DIM, WEIGHTED, OPERAND, BLOCK, BLOCK_R, PRECISION,
        )  # fmt: skip
        to, width = sum_xx + group * n * n, n
    else:
        right = (j - x_tiles) * BLOCK + tl.arange(0, BLOCK)
        at_right = _columns(y_blocks + group * y_block_stride, right, m, capacity, Y_DIM)
        acc = _product(
            x, y, at_left, at_right, left < n, right < m, sample_weight, rows,
            X_DIM, Y_DIM, WEIGHTED, OPERAND, BLOCK, BLOCK_R, PRECISION,
        )  # fmt: skip
        to, width = sum_xy + group * n * m, m
    if WEIGHTED:
        acc *= tl.load(scale + group * scale_stride)
    right = (j - (0 if j < x_tiles else x_tiles)) * BLOCK + tl.arange(0, BLOCK)
    to += left.to(tl.int64)[:, None] * width + right[None, :]
    ok = (left < n)[:, None] & (right < width)[None, :]
    tl.store(to, tl.load(to, mask=ok, other=0.0) + acc.to(tl.float64), mask=ok)


@triton.jit
def _columns(blocks, column, width, capacity, DIM: tl.constexpr):
    """Offsets of some columns of a regression's inputs: each lies in the panel of the head that its block names."""
    head = tl.load(blocks + column // DIM, mask=column < width, other=0).to(tl.int64)
    at = head * capacity * DIM + column % DIM
    if DIM % 8 == 0:
        at = tl.max_contiguous(tl.multiple_of(at, 8), 8)
    return at


@triton.jit
def _product(
    x, z, at_left, at_right, left_ok, right_ok, sample_weight, rows,
    X_DIM: tl.constexpr, Z_DIM: tl.constexpr, WEIGHTED: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        ok = row < rows
        a = tl.load(x + (row * X_DIM)[:, None] + at_left[None, :], mask=ok[:, None] & left_ok[None, :], other=0.0)
        b = tl.load(z + (row * Z_DIM)[:, None] + at_right[None, :], mask=ok[:, None] & right_ok[None, :], other=0.0)
        if WEIGHTED:
            b = b * tl.load(sample_weight + row, mask=ok, other=0.0)[:, None]
        acc = tl.dot(tl.trans(a.to(OPERAND)), b.to(OPERAND), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=_LOOSE)
def sums_kernel(
    states,  # [heads, capacity, DIM] centred
    blocks,  # int32 [G, c]
    sample_weight,
    scale,
    sums,  # float64 [G, width]
    squares,  # float64 [G, width] where SQUARED
    rows,
    capacity,
    column_blocks,
    width,
    c,
    weight_stride,
    scale_stride,
    DIM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SQUARED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add the weighted sums, and sums of squares, of one block of one regression's columns."""
    program = tl.program_id(0)
    group = (program // column_blocks).to(tl.int64)
    column = (program % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    at = _columns(blocks + group * c, column, width, capacity, DIM)
    sample_weight += group * weight_stride
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    total_square = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        ok = (row < rows)[:, None] & (column < width)[None, :]
        z = tl.load(states + (row * DIM)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        weighted = z
        if WEIGHTED:
            weighted = z * tl.load(sample_weight + row, mask=row < rows, other=0.0)[:, None]
        total += tl.sum(weighted, axis=0)
        if SQUARED:
            total_square += tl.sum(weighted * z, axis=0)
    if WEIGHTED:
        factor = tl.load(scale + group * scale_stride)
        total *= factor
        total_square *= factor
    to = group * width + column
    tl.store(sums + to, tl.load(sums + to, mask=column < width, other=0.0) + total.to(tl.float64), mask=column < width)
    if SQUARED:
        to = squares + to
        tl.store(to, tl.load(to, mask=column < width, other=0.0) + total_square.to(tl.float64), mask=column < width)
