"""`translate_kv`: keys and values of some target layers from those of a source's cache, written straight into place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ._launch import backend_for, interpreting, name_of, readable, register, row_stride
from .reference import translate_kv_reference

_SCRATCH_BYTES = 512 << 20  # of pre-RoPE keys that are held at once
_STRIP_BLOCK = 128
_NEAR = 512  # tokens that all layers translate before the next ones


def weight_dtypes(states: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Tell in which dtypes the weights of keys and of values multiply states of some dtype.

    Values are multiplied as cached. Keys leave their rotation as float32 numbers and are rounded to float16, whose three more bits keep
    the error of a bfloat16 cache at that of its own rounding. float32 states are multiplied as float32.
    """
    return (torch.float32, torch.float32) if states == torch.float32 else (torch.float16, states)


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
) -> None:
    """Translate some positions for some target layers; `translate_kv_reference` says what is computed, argument by argument.

    On CUDA with triton that is two launches, whatever the number of layers: one strips the keys into at most 512 MiB of scratch, one
    maps, rotates and writes keys and values (a longer context goes in parts). Products run on the tensor cores in the dtypes of
    `weight_dtypes`, to which weights of another dtype are cast first, and are summed in float32; float32 states in three TF32 products.
    Elsewhere the reference runs.
    """
    _translate_kv(
        source_keys, source_values, blocks, key_weight, value_weight, bias, source_cos, source_sin, source_tables, source_positions,
        target_cos, target_sin, target_tables, target_positions, out_keys, out_values, flags,
    )  # fmt: skip


def _run(
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
) -> None:
    arguments = (
        source_keys, source_values, blocks, key_weight, value_weight, bias, source_cos, source_sin, source_tables, source_positions,
        target_cos, target_sin, target_tables, target_positions, out_keys, out_values, flags,
    )  # fmt: skip
    if backend_for(out_keys.device) == "reference":
        translate_kv_reference(*arguments)
    else:
        with torch.cuda.device_of(out_keys):
            _launch(*arguments)


def _launch(
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
) -> None:
    import triton

    from ._strip_triton import strip_kernel
    from ._translate_triton import map_kernel

    (keys, rotated), (values, value_addresses) = readable(source_keys), readable(source_values)
    num_layers, batch, heads, tokens, target_dim = out_keys.shape
    source_heads, source_dim = keys[0].shape[1], keys[0].shape[3]
    groups, k = blocks.shape[2:4]
    rotary = 2 * source_cos.shape[2]
    key_operand, value_operand = weight_dtypes(keys[0].dtype)
    key_dtype = key_operand
    operands = (torch.float32, torch.float32) if interpreting() else (key_operand, value_operand)  # it has no bfloat16 products
    part, key_strides = tokens, keys[0].stride()
    key_addresses = rotated
    if rotary:
        layer_elements = batch * source_heads * source_dim  # of one token
        part = min(tokens, max(_STRIP_BLOCK, _SCRATCH_BYTES // (len(keys) * layer_elements * key_dtype.itemsize)))
        scratch = keys[0].new_empty((len(keys), batch, source_heads, part, source_dim), dtype=key_dtype)
        key_strides = scratch.stride()[1:]
        step = scratch.stride(0) * key_dtype.itemsize
        key_addresses = [scratch.data_ptr() + step * layer for layer in range(len(keys))]
    else:
        key_dtype = keys[0].dtype
    reads = blocks.cpu().numpy()
    head_bytes = key_strides[1] * key_dtype.itemsize, values[0].stride(1) * values[0].element_size()
    located = np.empty(reads.shape[:-1], dtype=np.int64)
    for role, starts in enumerate((key_addresses, value_addresses)):
        located[:, role] = np.array(starts)[reads[:, role, ..., 0]] + head_bytes[role] * reads[:, role, ..., 1].astype(np.int64)
    table = torch.from_numpy(np.concatenate((rotated, located.ravel()))).to(out_keys.device, non_blocking=True)
    schedule = _schedule(values[0].dtype, target_dim, tokens, shared=groups == 1 and heads > 1)
    block_t = schedule["BLOCK_T"]
    maps = (
        table[len(keys) :], key_weight.to(key_operand).contiguous(), value_weight.to(value_operand).contiguous(), bias.contiguous(),
        target_cos.contiguous(), target_sin.contiguous(), target_tables, target_positions, out_keys, out_values, flags,
    )  # fmt: skip
    strips = (table, source_tables, source_cos.contiguous(), source_sin.contiguous(), source_positions, bias)
    for begin in range(0, tokens, part):
        length = min(part, tokens - begin)
        if rotary:
            strip_blocks = triton.cdiv(length, _STRIP_BLOCK)
            strip_kernel[(len(keys) * batch * source_heads * strip_blocks,)](
                *strips, scratch, begin, length, strip_blocks, batch, source_heads, *keys[0].stride()[:3], *scratch.stride()[:3],
                row_stride(source_positions), source_cos.shape[1] * source_cos.shape[2],
                DIM=source_dim, ROTARY=rotary, CENTRED=False, DTYPE=name_of(keys[0].dtype), BLOCK_T=_STRIP_BLOCK, num_warps=8,
            )  # fmt: skip
        token_blocks = triton.cdiv(length, block_t)
        near = min(token_blocks, max(1, _NEAR // block_t))
        map_kernel[(2 * batch * triton.cdiv(token_blocks, near) * num_layers * near * heads,)](
            *maps, begin, 0 if rotary else begin, length, token_blocks, batch, num_layers, heads, near,
            key_strides[0], key_strides[2], values[0].stride(0), values[0].stride(2), *out_keys.stride()[:4], *out_values.stride()[:4],
            row_stride(target_positions), target_cos.shape[1] * target_cos.shape[2],
            GROUPS=groups, K=k, SOURCE_DIM=source_dim, TARGET_DIM=target_dim, ROTARY=2 * target_cos.shape[2],
            KEY_DTYPE=name_of(key_dtype), VALUE_DTYPE=name_of(values[0].dtype), KEY_OPERAND=name_of(operands[0]),
            VALUE_OPERAND=name_of(operands[1]), BLOCK_N=max(16, triton.next_power_of_2(target_dim)), PRECISION="tf32x3", **schedule,
        )  # fmt: skip


_translate_kv = register("translate_kv", _run, ("out_keys", "out_values", "flags"))


def _schedule(dtype: torch.dtype, target_dim: int, tokens: int, *, shared: bool) -> dict[str, Any]:
    """Choose the block of tokens and the launch for it, as measured on an H200 (`benchmarks/README` has the sweep).

    What limits a map of separate heads is what the L2 cache delivers; two programs of 128 tokens on a multiprocessor hide each other's
    beginnings and ends. Maps whose heads all read the same are limited by the products, and take the largest block that fits.
    """
    if dtype == torch.float32:
        return {"BLOCK_T": 64, "num_warps": 4 if target_dim <= 128 else 8, "num_stages": 2}
    if tokens <= 64 or target_dim > 128:
        return {"BLOCK_T": 64, "num_warps": 4 if target_dim <= 128 else 8, "num_stages": 3}
    if target_dim <= 64:
        return {"BLOCK_T": 128, "num_warps": 4, "num_stages": 3}
    if shared and tokens >= 2048:
        return {"BLOCK_T": 256, "num_warps": 16, "num_stages": 4}
    return {"BLOCK_T": 128, "num_warps": 8, "num_stages": 3, "maxnreg": 128}
