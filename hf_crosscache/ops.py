"""The only door to the kernels: checks shapes, keeps TF32 out of float32 sums. The kernels pick Triton or their reference by the device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hf_crosscache_kernels as kernels
import torch

from .errors import GeometryError

weight_dtypes = kernels.weight_dtypes
backend_for = kernels.backend_for
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # cos, sin and each layer's table, from a RotaryStack


def translate_kv(
    source_keys: Sequence[torch.Tensor],
    source_values: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    bias: torch.Tensor,
    source_tables: Tables,
    source_positions: torch.Tensor,
    target_tables: Tables,
    target_positions: torch.Tensor,
    out_keys: torch.Tensor,
    out_values: torch.Tensor,
    begin: int = 0,
    key_norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Translate some positions for some target layers; see `translate_kv_reference` for the formula and the shapes.

    Returns:
        int32 `[N, 2]`: 1 where keys (0) or values (1) of a layer are not finite.

    Raises:
        GeometryError: the blocks do not fill the weights' input width, or the outputs have other shapes.
    """
    layers, heads, width, head_dim = key_weight.shape
    expected = (layers, source_keys[0].shape[0], heads, target_positions.shape[1], head_dim)
    for out in (out_keys, out_values):
        if tuple(out.shape) != expected:
            raise GeometryError(f"Translated states have shape {expected}; the output has {tuple(out.shape)}.")
    filled = blocks.shape[3] * source_keys[0].shape[3]
    if filled != width or value_weight.shape != key_weight.shape:
        raise GeometryError(f"The map reads {width} inputs a head; its {blocks.shape[3]} source heads give {filled}.")
    flags = torch.zeros((layers, 2), dtype=torch.int32, device=out_keys.device)
    with full_float32():
        kernels.translate_kv(
            source_keys, source_values, blocks, key_weight, value_weight, bias, *source_tables, source_positions,
            *target_tables, target_positions, out_keys, out_values, flags, begin, key_norm,
        )  # fmt: skip
    return flags


def accumulate_moments(
    source: Sequence[torch.Tensor],
    target: Sequence[torch.Tensor],
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    source_shift: torch.Tensor,
    target_shift: torch.Tensor,
    sample_weight: torch.Tensor | None,
    source_tables: Tables,
    source_positions: torch.Tensor,
    target_tables: Tables,
    target_positions: torch.Tensor,
    sums: Sequence[torch.Tensor],
) -> None:
    """Add the products of many weighted regressions between heads to `sums`; see `accumulate_moments_reference`."""
    with full_float32():
        kernels.accumulate_moments(
            source, target, source_blocks, target_blocks, source_shift, target_shift, sample_weight, *source_tables, source_positions,
            *target_tables, target_positions, *sums,
        )  # fmt: skip


def weighted_products(
    x: torch.Tensor, y: torch.Tensor, sample_weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum the products of a weighted regression in full float32; see `weighted_products_reference`."""
    with full_float32():
        return kernels.weighted_products_reference(x, y, sample_weight)


@contextmanager
def forced_backend(name: str | None) -> Iterator[None]:
    """Run the kernels by one implementation, "reference" or "triton", for a while; None leaves the choice to the device."""
    if name is None:
        yield
        return
    before = os.environ.get(kernels.BACKEND)
    os.environ[kernels.BACKEND] = name
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(kernels.BACKEND, None)
        else:
            os.environ[kernels.BACKEND] = before


@contextmanager
def full_float32() -> Iterator[None]:
    """Run float32 products without TF32, whatever the caller's setting: ten bits of mantissa do not carry a Gram matrix."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
