"""A Triton kernel that turns cached keys back to position zero, and centres states on the way to their moments."""

import triton
import triton.language as tl


@triton.constexpr_function
def columns_at_once(width):
    """Columns handled at once: a power of two from 16 to 64 that divides the width, else the next power of two, masked."""
    for chunk in (64, 32, 16):
        if width % chunk == 0:
            return chunk
    return min(64, max(16, triton.next_power_of_2(width)))


@triton.jit
def strip_kernel(
    layers,  # int64 [layers]: address of each layer's keys as cached, [B, H, T, DIM]
    tables,  # int32 [layers]: rotary table of each layer
    cos_table,  # [tables, positions, ROTARY / 2]
    sin_table,
    positions,  # int [B or 1, T]
    shift,  # float32 [layers, H, DIM], subtracted where CENTRED
    out,  # [layers, B, H, tokens, DIM], rows contiguous
    first_position,  # the row of `positions` of the first token to read
    begin,  # its row in the states
    tokens,  # how many
    token_blocks,
    batch,
    heads,
    stride_b,
    stride_h,
    stride_t,
    out_stride_layer,
    out_stride_b,
    out_stride_h,
    position_stride,
    table_size,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    CENTRED: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Strip one (layer, batch row, head, block of tokens) in float32: a' = (a cos + b sin) / (cos^2 + sin^2), b' = (b cos - a sin) / ..."""
    program = tl.program_id(0)
    start = (program % token_blocks) * BLOCK_T
    unit = (program // token_blocks).to(tl.int64)
    head, row, layer = unit % heads, unit // heads % batch, unit // heads // batch
    offsets = tl.arange(0, BLOCK_T)
    in_context = start + offsets < tokens
    states = tl.multiple_of(tl.load(layers + layer).to(tl.pointer_type(DTYPE)), 16)
    states += row * stride_b + head * stride_h + (begin + start).to(tl.int64) * stride_t
    out += layer * out_stride_layer + row * out_stride_b + head * out_stride_h + start.to(tl.int64) * DIM
    shift += (layer * heads + head) * DIM
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        CHUNK: tl.constexpr = columns_at_once(HALF)
        at = tl.load(positions + row * position_stride + first_position + start + offsets, mask=in_context, other=0).to(tl.int64) * HALF
        at += tl.load(tables + layer) * table_size
        for first in tl.static_range(0, HALF, CHUNK):
            column = first + tl.arange(0, CHUNK)
            ok = in_context[:, None] & (column < HALF)[None, :]
            cos = tl.load(cos_table + at[:, None] + column[None, :], mask=ok, other=1.0).to(tl.float32)
            sin = tl.load(sin_table + at[:, None] + column[None, :], mask=ok, other=0.0).to(tl.float32)
            norm = 1.0 / (cos * cos + sin * sin)
            read = states + (offsets * stride_t)[:, None] + column[None, :]
            a = tl.load(read, mask=ok, other=0.0).to(tl.float32)
            b = tl.load(read + HALF, mask=ok, other=0.0).to(tl.float32)
            _store_centred((a * cos + b * sin) * norm, shift, out, offsets * DIM, column, ok, CENTRED)
            _store_centred((b * cos - a * sin) * norm, shift, out, offsets * DIM, HALF + column, ok, CENTRED)
    if ROTARY < DIM:
        REST: tl.constexpr = DIM - ROTARY
        for first in tl.static_range(0, REST, columns_at_once(REST)):
            column = first + tl.arange(0, columns_at_once(REST))
            ok = in_context[:, None] & (column < REST)[None, :]
            x = tl.load(states + ROTARY + (offsets * stride_t)[:, None] + column[None, :], mask=ok, other=0.0).to(tl.float32)
            _store_centred(x, shift, out, offsets * DIM, ROTARY + column, ok, CENTRED)


@triton.jit
def _store_centred(x, shift, out, row_offsets, column, ok, CENTRED: tl.constexpr):
    if CENTRED:
        x -= tl.load(shift + column)[None, :]
    tl.store(out + row_offsets[:, None] + column[None, :], x.to(out.dtype.element_ty), mask=ok)
