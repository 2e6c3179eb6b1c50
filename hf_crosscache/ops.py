"""The only door to the kernels: checks shapes, picks an implementation, keeps TF32 out of float32 sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from hf_crosscache_kernels import map_heads_reference, weighted_products_reference

from .errors import GeometryError


def map_heads(
    states: dict[int, torch.Tensor],
    blocks: Sequence[Sequence[tuple[int, int]]],
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Map blocks of source heads to target heads; see `map_heads_reference` for the formula and the shapes.

    Raises:
        GeometryError: the blocks do not fill the weight's input width, or the output has another shape.
    """
    heads, width, head_dim = weight.shape
    batch, _, length, _ = next(iter(states.values())).shape
    expected = (batch, heads, length, head_dim)
    if tuple(out.shape) != expected:
        raise GeometryError(f"Mapped heads have shape {expected}; the output has {tuple(out.shape)}.")
    filled = sum(states[layer].shape[-1] for layer, _ in blocks[0])
    if filled != width:
        raise GeometryError(f"The map reads {width} inputs a head; its {len(blocks[0])} source heads give {filled}.")
    return map_heads_reference(states, blocks, weight, bias, out)


def weighted_products(
    x: torch.Tensor, y: torch.Tensor, sample_weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum the products of a weighted regression in full float32; see `weighted_products_reference`."""
    with full_float32():
        return weighted_products_reference(x, y, sample_weight)


@contextmanager
def full_float32() -> Iterator[None]:
    """Run float32 products without TF32, whatever the caller's setting: ten bits of mantissa do not carry a Gram matrix."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
