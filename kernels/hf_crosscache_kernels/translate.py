"""`translate_kv`: keys and values of some target layers from those of a source's cache, written straight into place."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ._launch import ceil_div, check_outputs, interpreting, launch, name_of, power_of_2, readable, register, row_stride, shared_memory
from .reference import translate_kv_reference

_SCRATCH_BYTES = 512 << 20  # of pre-RoPE keys that are held at once
_STRIP_BLOCK = 128
_COLUMNS_A_STEP = 64  # of the states, in the kernel's loop
_NEAR = 512  # tokens that all layers translate before the next ones
_NEAR_SHARED = 1024


def weight_dtypes(states: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Tell in which dtypes the weights of keys and of values multiply states of some dtype.

    Values are multiplied as cached. Keys leave their rotation as float32 numbers and are rounded to float16, whose three more bits keep
    the error of a bfloat16 cache at that of its own rounding; beyond its range of 65,504 a flag is raised, and keys of a scale below 1e-5
    lose bits. Wider states are multiplied as float32.
    """
    return (torch.float32, torch.float32) if states.itemsize > 2 else (torch.float16, states)


def translate_kv(
    source_keys: Sequence[torch.Tensor],
    source_values: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    bias: torch.Tensor,
    source_cos: torch.Tensor,
    source_sin: torch.Tensor,
    source_tables: torch.Tensor,
    source_positions: torch.Tensor,
    target_cos: torch.Tensor,
    target_sin: torch.Tensor,
    target_tables: torch.Tensor,
    target_positions: torch.Tensor,
    out_keys: torch.Tensor,
    out_values: torch.Tensor,
    flags: torch.Tensor,
    begin: int = 0,
    key_norm: torch.Tensor | None = None,
) -> None:
    """Translate some positions for some target layers; `translate_kv_reference` says what is computed, argument by argument.

    On CUDA with triton that is two launches, whatever the number of layers: one strips the keys into at most 512 MiB of scratch, one
    gathers, maps, rotates and writes keys and values (a longer context goes in parts). Products run on the tensor cores in the dtypes of
    `weight_dtypes`, to which weights of another dtype are cast first, and are summed in float32; float32 states in three TF32 products.
    Elsewhere the reference runs.
    """
    _translate_kv(
        source_keys, source_values, blocks, key_weight, value_weight, bias, source_cos, source_sin, source_tables, source_positions,
        target_cos, target_sin, target_tables, target_positions, out_keys, out_values, flags, begin, key_norm,
    )  # fmt: skip


def _run_triton(
    source_keys: Sequence[torch.Tensor],
    source_values: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    bias: torch.Tensor,
    source_cos: torch.Tensor,
    source_sin: torch.Tensor,
    source_tables: torch.Tensor,
    source_positions: torch.Tensor,
    target_cos: torch.Tensor,
    target_sin: torch.Tensor,
    target_tables: torch.Tensor,
    target_positions: torch.Tensor,
    out_keys: torch.Tensor,
    out_values: torch.Tensor,
    flags: torch.Tensor,
    begin: int = 0,
    key_norm: torch.Tensor | None = None,
) -> None:
    kernels = _kernels()
    check_outputs(out_keys=out_keys, out_values=out_values, flags=flags)
    source_positions, target_positions = source_positions.contiguous(), target_positions.contiguous()
    source_tables, target_tables, blocks = source_tables.contiguous(), target_tables.contiguous(), blocks.contiguous()
    (keys, rotated), (values, value_addresses) = readable(source_keys), readable(source_values)
    num_layers, batch, heads, tokens, target_dim = out_keys.shape
    _, source_heads, _, source_dim = keys[0].shape
    _, _, groups, k, _ = blocks.shape
    rotary = 2 * source_cos.shape[2]
    key_dtype, value_dtype = keys[0].dtype, values[0].dtype
    key_operand, value_operand = weight_dtypes(key_dtype)
    operands = (torch.float32, torch.float32) if interpreting() else (key_operand, value_operand)  # it has no bfloat16 products
    part, scratch, mapped_dtype, key_addresses = tokens, keys[0], key_dtype, rotated
    if rotary:
        token_bytes = len(keys) * batch * source_heads * source_dim * key_operand.itemsize
        part, mapped_dtype = min(tokens, max(_STRIP_BLOCK, _SCRATCH_BYTES // token_bytes)), key_operand
        panels = keys[0].new_empty((len(keys), batch, source_heads, part, source_dim), dtype=key_operand)
        first, step = panels.data_ptr(), panels.stride(0) * key_operand.itemsize
        key_addresses, scratch = range(first, first + step * len(keys), step), panels[0]
    addresses = array("q", (*rotated, *key_addresses, *value_addresses))
    table = torch.frombuffer(addresses, dtype=torch.int64).to(out_keys.device, non_blocking=True)
    located = table.new_empty((num_layers, 2, groups, k))
    key_strides, value_strides, scratch_strides = keys[0].stride(), values[0].stride(), scratch.stride()
    maps = (
        located, key_weight.to(key_operand).contiguous(), value_weight.to(value_operand).contiguous(), bias.contiguous(),
        target_cos.contiguous(), target_sin.contiguous(), target_tables, target_positions, out_keys, out_values, flags,
        bias if key_norm is None else key_norm.contiguous(),
    )  # fmt: skip
    strips = (table, source_tables, source_cos.contiguous(), source_sin.contiguous(), source_positions, bias, scratch)
    shared = groups == 1 and heads > 1
    operand_bytes = max(key_operand.itemsize, value_operand.itemsize)
    schedule = _schedule(operand_bytes, target_dim, tokens, shared, out_keys.device)
    block_t = schedule.pop("BLOCK_T")
    for start in range(0, tokens, max(part, 1)):
        length = min(part, tokens - start)
        if rotary or start == 0:
            strip_blocks = ceil_div(length, _STRIP_BLOCK)
            stripping = len(keys) * batch * source_heads * strip_blocks if rotary else 0
            arguments = (
                *strips, start, begin + start, length, strip_blocks, batch, source_heads, *key_strides[:3], scratch.numel(),
                scratch_strides[0], scratch_strides[1], row_stride(source_positions), source_cos.shape[1] * source_cos.shape[2],
                table[len(keys) :], blocks, located, groups * k, len(keys), scratch_strides[1] * mapped_dtype.itemsize,
                value_strides[1] * value_dtype.itemsize, stripping,
            )  # fmt: skip
            launch(
                kernels.prepare_kernel, (stripping + 2 * num_layers,), arguments,
                DIM=source_dim, ROTARY=rotary, DTYPE=name_of(key_dtype), BLOCK_T=_STRIP_BLOCK, READS=power_of_2(groups * k), num_warps=8,
            )  # fmt: skip
        token_blocks = ceil_div(length, block_t)
        near = min(token_blocks, max(1, (_NEAR_SHARED if shared else _NEAR) // block_t))
        arguments = (
            *maps, start, 0 if rotary else begin + start, begin + start, length, token_blocks, batch, num_layers, heads, near,
            scratch_strides[0], scratch_strides[2], value_strides[0], value_strides[2], *out_keys.stride()[:4], *out_values.stride()[:4],
            row_stride(target_positions), target_cos.shape[1] * target_cos.shape[2],
        )  # fmt: skip
        launch(
            kernels.map_kernel, (2 * batch * ceil_div(token_blocks, near) * num_layers * near * heads,), arguments,
            GROUPS=groups, K=k, SOURCE_DIM=source_dim, TARGET_DIM=target_dim, ROTARY=2 * target_cos.shape[2],
            KEY_NORM=key_norm is not None, KEY_DTYPE=name_of(mapped_dtype), VALUE_DTYPE=name_of(value_dtype),
            KEY_OPERAND=name_of(operands[0]), VALUE_OPERAND=name_of(operands[1]), BLOCK_T=block_t,
            BLOCK_N=max(16, power_of_2(target_dim)), PRECISION="tf32x3", **schedule,
        )  # fmt: skip


_translate_kv = register(translate_kv_reference, _run_triton, ("out_keys", "out_values", "flags"))


def _schedule(operand_bytes: int, target_dim: int, tokens: int, shared: bool, device: torch.device) -> dict[str, Any]:
    """Choose the block of tokens and the launch for it: the first of those measured on an H200 that fits the device's shared memory.

    What limits a map of separate heads is what the L2 cache delivers; two programs of 128 tokens on a multiprocessor hide each other's
    beginnings and ends. Maps whose heads all read the same are limited by the products, and take the largest block that fits.
    """
    wide = 8 if target_dim > 128 else 4
    choices = [{"BLOCK_T": 64, "num_warps": wide, "num_stages": 2}, {"BLOCK_T": 64, "num_warps": wide, "num_stages": 1}]
    if operand_bytes == 2:
        if tokens <= 64 or target_dim > 128:
            choices.insert(0, {"BLOCK_T": 64, "num_warps": wide, "num_stages": 3})
        elif target_dim <= 64:
            choices.insert(0, {"BLOCK_T": 128, "num_warps": 4, "num_stages": 3})
        else:
            choices.insert(0, {"BLOCK_T": 128, "num_warps": 8, "num_stages": 3, "maxnreg": 128})
            if shared and tokens >= 2048:
                choices.insert(0, {"BLOCK_T": 256, "num_warps": 8, "num_stages": 4})
    limit = shared_memory(device)
    columns = max(16, power_of_2(target_dim))
    for choice in choices:
        if choice["num_stages"] * _COLUMNS_A_STEP * (choice["BLOCK_T"] + columns) * operand_bytes <= limit:
            break
    return dict(choice)


@cache
def _kernels() -> Any:
    """Import triton's side when the first launch needs it."""
    from . import _translate_triton

    return _translate_triton
