"""`translate_kv`: keys and values of some target layers from those of a source's cache, written straight into place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._launch import addresses, backend_for, interpreting, readable, row_stride
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


@torch.library.custom_op("hf_crosscache::translate_kv", mutates_args=("out_keys", "out_values", "flags"))
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
    if backend_for(out_keys.device) == "reference":
        translate_kv_reference(
            source_keys, source_values, blocks, key_weight, value_weight, bias, source_cos, source_sin, source_tables, source_positions,
            target_cos, target_sin, target_tables, target_positions, out_keys, out_values, flags,
        )  # fmt: skip
        return
    import triton

    from ._translate_triton import map_kernel, strip_kernel

    keys, values = readable(source_keys), readable(source_values)
    num_layers, batch, heads, tokens, target_dim = out_keys.shape
    source_heads, source_dim = keys[0].shape[1], keys[0].shape[3]
    groups, k = blocks.shape[2:4]
    rotary = 2 * source_cos.shape[2]
    key_dtype, value_dtype = weight_dtypes(keys[0].dtype)
    operands = (torch.float32, torch.float32) if interpreting() else (key_dtype, value_dtype)  # the interpreter has no bfloat16 products
    part = tokens
    if rotary:
        token_bytes = len(keys) * batch * source_heads * source_dim * key_dtype.itemsize
        part = min(tokens, max(128, _SCRATCH_BYTES // token_bytes))
        scratch = list(keys[0].new_empty((len(keys), batch, source_heads, part, source_dim), dtype=key_dtype))
    else:
        scratch = keys
    pointers = addresses(keys, scratch, values)
    schedule = _schedule(values[0].dtype, target_dim, tokens, shared=groups == 1 and heads > 1)
    block_t = schedule["BLOCK_T"]
    maps = (
        blocks.contiguous(), key_weight.to(key_dtype).contiguous(), value_weight.to(value_dtype).contiguous(), bias.contiguous(),
        target_cos.contiguous(), target_sin.contiguous(), target_tables, target_positions, out_keys, out_values, flags,
    )  # fmt: skip
    source_cos, source_sin = source_cos.contiguous(), source_sin.contiguous()
    for begin in range(0, tokens, part):
        length = min(part, tokens - begin)
        if rotary:
            strip_blocks = triton.cdiv(length, _STRIP_BLOCK)
            strip_kernel[(len(keys) * batch * source_heads * strip_blocks,)](
                pointers[0], source_tables, source_cos, source_sin, source_positions, scratch[0], begin, length, part, strip_blocks,
                batch, source_heads, *keys[0].stride()[:3], row_stride(source_positions), source_cos.shape[1] * source_cos.shape[2],
                DIM=source_dim, ROTARY=rotary, DTYPE=_name(keys[0].dtype), BLOCK_T=_STRIP_BLOCK, num_warps=8,
            )  # fmt: skip
        token_blocks = triton.cdiv(length, block_t)
        near = min(token_blocks, max(1, _NEAR // block_t))
        map_kernel[(2 * batch * triton.cdiv(token_blocks, near) * num_layers * near * heads,)](
            pointers[1:], *maps, begin, 0 if rotary else begin, length, token_blocks, batch, num_layers, len(keys), heads, near,
            *scratch[0].stride()[:3], *values[0].stride()[:3], *out_keys.stride()[:4], *out_values.stride()[:4],
            row_stride(target_positions), target_cos.shape[1] * target_cos.shape[2],
            GROUPS=groups, K=k, SOURCE_DIM=source_dim, TARGET_DIM=target_dim, ROTARY=2 * target_cos.shape[2],
            KEY_DTYPE=_name(scratch[0].dtype), VALUE_DTYPE=_name(values[0].dtype), KEY_OPERAND=_name(operands[0]),
            VALUE_OPERAND=_name(operands[1]), BLOCK_N=max(16, triton.next_power_of_2(target_dim)), PRECISION="tf32x3", **schedule,
        )  # fmt: skip


@translate_kv.register_fake
def _(*args: torch.Tensor) -> None:
    return None


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


def _name(dtype: torch.dtype) -> Any:
    """Return triton's name of a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
