"""The Triton kernel behind `translate_kv`: gather source heads, map them, rotate the keys and write, all in one launch."""

import triton
import triton.language as tl

from ._strip_triton import columns_at_once, strip_kernel

# Counts that change from call to call and align nothing: a kernel compiled for one serves all.
_LOOSE = [
    "first_position", "begin", "key_begin", "value_begin", "tokens", "token_blocks", "batch", "num_layers", "heads", "near", "strips",
    "reads", "source_layers", "position_stride",
]  # fmt: skip


@triton.jit(do_not_specialize=_LOOSE)
def prepare_kernel(
    rotated,  # int64 [source layers]: addresses of the keys as cached, and what else strip_kernel takes
    source_tables,
    cos_table,
    sin_table,
    positions,
    no_shift,
    scratch,
    first_position,
    begin,
    tokens,
    token_blocks,
    batch,
    heads,
    stride_b,
    stride_h,
    stride_t,
    scratch_stride_layer,
    scratch_stride_b,
    scratch_stride_h,
    position_stride,
    table_size,
    layers,  # int64 [2, source layers]: addresses of pre-RoPE keys, and of values
    blocks,  # int32 [N, 2, reads, 2]: (layer, head) of every source head that is read
    located,  # int64 [N, 2, reads]: their addresses
    reads,
    source_layers,
    key_head_bytes,
    value_head_bytes,
    strips,  # how many programs strip; the others locate
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    READS: tl.constexpr,
):
    """Strip the keys, and find the address of every source head once, since every program of `map_kernel` would wait for the same loads."""
    row = tl.program_id(0) - strips  # of a target layer and a role
    if row < 0:
        strip_kernel(
            rotated, source_tables, cos_table, sin_table, positions, no_shift, scratch, first_position, begin, tokens, token_blocks, batch,
            heads, stride_b, stride_h, stride_t, scratch_stride_layer, scratch_stride_b, scratch_stride_h, position_stride, table_size,
            DIM, ROTARY, False, DTYPE, BLOCK_T,
        )  # fmt: skip
    else:
        role = row % 2
        read = tl.arange(0, READS)
        ok = read < reads
        layer = tl.load(blocks + 2 * (row * reads + read), mask=ok, other=0)
        head = tl.load(blocks + 2 * (row * reads + read) + 1, mask=ok, other=0).to(tl.int64)
        head_bytes = key_head_bytes if role == 0 else value_head_bytes
        address = tl.load(layers + role * source_layers + layer, mask=ok, other=0) + head * head_bytes
        tl.store(located + row * reads + read, address, mask=ok)


@triton.jit(do_not_specialize=_LOOSE)
def map_kernel(
    located,  # int64 [N, 2, G, K]: address of every source head that a target head reads, of its first batch row
    key_weight,  # [N, H, K * SOURCE_DIM, TARGET_DIM]
    value_weight,
    bias,  # float32 [N, 2, H, TARGET_DIM]
    cos_table,  # [tables, positions, ROTARY / 2] of the target
    sin_table,
    tables,  # int32 [N]
    positions,  # int [B or 1, T]
    out_keys,  # [N, B, H, T, TARGET_DIM]
    out_values,
    flags,  # int32 [N, 2]: raised where a state is not finite
    key_norm,  # float32 [N, TARGET_DIM] where KEY_NORM
    begin,  # the first token to write
    key_begin,  # the row of its keys
    value_begin,  # and of its values
    tokens,  # how many
    token_blocks,
    batch,
    num_layers,
    heads,
    near,  # blocks of tokens that all layers translate before the next ones
    key_stride_b,
    key_stride_t,
    value_stride_b,
    value_stride_t,
    out_key_stride_n,
    out_key_stride_b,
    out_key_stride_h,
    out_key_stride_t,
    out_value_stride_n,
    out_value_stride_b,
    out_value_stride_h,
    out_value_stride_t,
    position_stride,
    table_size,
    GROUPS: tl.constexpr,  # G: H, or 1 where all heads read the same
    K: tl.constexpr,
    SOURCE_DIM: tl.constexpr,
    TARGET_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    KEY_NORM: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    KEY_OPERAND: tl.constexpr,  # dtype of the products
    VALUE_OPERAND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write one (role, batch row, layer, block of tokens, head).

    All heads of all layers translate a few blocks of tokens before the next ones: what they read of the source stays in the L2 cache.
    """
    program = tl.program_id(0)
    head = program % heads
    program = program // heads
    nearby = program % near
    program = program // near
    layer = (program % num_layers).to(tl.int64)
    program = program // num_layers
    far = tl.cdiv(token_blocks, near)
    token_block = (program % far) * near + nearby
    program = program // far
    row = (program % batch).to(tl.int64)
    role = program // batch
    if token_block >= token_blocks:
        return

    start = token_block * BLOCK_T
    offsets = tl.arange(0, BLOCK_T)
    in_context = start + offsets < tokens
    wide = (begin + start).to(tl.int64)
    k = tl.arange(0, triton.next_power_of_2(K))
    group = (layer * 2 + role) * GROUPS + (head if GROUPS > 1 else 0)
    pointers = tl.load(located + group * K + k, mask=k < K, other=0)
    weights = (layer * heads + head) * K * SOURCE_DIM * TARGET_DIM
    bias += ((layer * 2 + role) * heads + head) * TARGET_DIM
    if role == 0:
        first = row * key_stride_b + (key_begin + start).to(tl.int64) * key_stride_t
        columns = _paired_columns(BLOCK_N, TARGET_DIM, ROTARY)
        column_ok = tl.arange(0, BLOCK_N) % (BLOCK_N // 2) < TARGET_DIM // 2
        acc = _map(
            pointers, first, offsets * key_stride_t, in_context, key_weight + weights, columns, column_ok,
            K, SOURCE_DIM, TARGET_DIM, KEY_DTYPE, KEY_OPERAND, PRECISION,
        )  # fmt: skip
        acc += tl.load(bias + columns, mask=column_ok, other=0.0)[None, :]
        if KEY_NORM:
            unweighted = acc * tl.load(key_norm + layer * TARGET_DIM + columns, mask=column_ok, other=0.0)[None, :]
            acc *= tl.rsqrt(tl.sum(unweighted * unweighted, axis=1) / TARGET_DIM + 1e-12)[:, None]
        _flag(acc, flags + 2 * layer)
        out = out_keys + layer * out_key_stride_n + row * out_key_stride_b + head.to(tl.int64) * out_key_stride_h + wide * out_key_stride_t
        if ROTARY == 0:
            _flag_overflow(acc, flags + 2 * layer, out_keys.dtype.element_ty)
            ok = in_context[:, None] & column_ok[None, :]
            tl.store(out + (offsets * out_key_stride_t)[:, None] + columns[None, :], acc.to(out.dtype.element_ty), mask=ok)
        else:
            table = tl.load(tables + layer) * table_size
            cos_table += table
            sin_table += table
            positions += row * position_stride + begin + start
            left = tokens - start
            if BLOCK_T > 128:  # in two halves: the registers of a whole one would spill
                HALF_T: tl.constexpr = BLOCK_T // 2
                top, bottom = tl.split(tl.permute(tl.reshape(acc, (2, HALF_T, BLOCK_N)), (1, 2, 0)))
                _store_rotated(top, out, out_key_stride_t, 0, left, cos_table, sin_table, positions, flags + 2 * layer, TARGET_DIM, ROTARY)
                _store_rotated(
                    bottom, out, out_key_stride_t, HALF_T, left, cos_table, sin_table, positions, flags + 2 * layer, TARGET_DIM, ROTARY
                )
            else:
                _store_rotated(acc, out, out_key_stride_t, 0, left, cos_table, sin_table, positions, flags + 2 * layer, TARGET_DIM, ROTARY)
    else:
        first = row * value_stride_b + (value_begin + start).to(tl.int64) * value_stride_t
        columns = tl.arange(0, BLOCK_N)
        column_ok = columns < TARGET_DIM
        acc = _map(
            pointers, first, offsets * value_stride_t, in_context, value_weight + weights, columns, column_ok,
            K, SOURCE_DIM, TARGET_DIM, VALUE_DTYPE, VALUE_OPERAND, PRECISION,
        )  # fmt: skip
        acc += tl.load(bias + columns, mask=column_ok, other=0.0)[None, :]
        _flag(acc, flags + 2 * layer + 1)
        _flag_overflow(acc, flags + 2 * layer + 1, out_values.dtype.element_ty)
        out = out_values + layer * out_value_stride_n + row * out_value_stride_b + head.to(tl.int64) * out_value_stride_h
        out += wide * out_value_stride_t
        ok = in_context[:, None] & column_ok[None, :]
        tl.store(out + (offsets * out_value_stride_t)[:, None] + columns[None, :], acc.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _map(
    pointers, first, row_offsets, in_context, weight, columns, column_ok,
    K: tl.constexpr, SOURCE_DIM: tl.constexpr, TARGET_DIM: tl.constexpr,
    DTYPE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the products of every gathered head with its rows of the weight, `[BLOCK_T, BLOCK_N]` float32."""
    CHUNK: tl.constexpr = columns_at_once(SOURCE_DIM)
    CHUNKS: tl.constexpr = (SOURCE_DIM + CHUNK - 1) // CHUNK
    acc = tl.zeros((row_offsets.shape[0], columns.shape[0]), dtype=tl.float32)
    within = tl.arange(0, CHUNK)
    tile = row_offsets[:, None] + within[None, :]
    weight_tile = (within * TARGET_DIM)[:, None] + columns[None, :]
    for i in range(K * CHUNKS):
        block, begin = i // CHUNKS, (i % CHUNKS) * CHUNK
        # picked from registers: an address loaded in here would keep the states' own loads from running ahead
        address = tl.sum(tl.where(tl.arange(0, pointers.shape[0]) == block, pointers, 0), axis=0)
        states = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + (first + begin)
        rows = weight + (block * SOURCE_DIM + begin) * TARGET_DIM
        if SOURCE_DIM % CHUNK == 0:
            x = tl.load(states + tile, mask=in_context[:, None], other=0.0)
        else:
            x = tl.load(states + tile, mask=in_context[:, None] & (begin + within < SOURCE_DIM)[None, :], other=0.0)
        if SOURCE_DIM % CHUNK == 0 and columns.shape[0] == TARGET_DIM:
            w = tl.load(rows + weight_tile)
        else:
            w = tl.load(rows + weight_tile, mask=(begin + within < SOURCE_DIM)[:, None] & column_ok[None, :], other=0.0)
        acc = tl.dot(x.to(OPERAND), w.to(OPERAND), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _flag(acc, flag):
    """Raise the flag if a row is not finite. A sum a row is the cheapest test, and no flag is touched while all is well."""
    rows = tl.sum(acc, axis=1)
    bad = (tl.abs(rows) <= 3.0e38) == 0
    tl.atomic_max(flag + tl.zeros_like(rows).to(tl.int32), tl.full(rows.shape, 1, tl.int32), mask=bad)


@triton.jit
def _flag_overflow(states, flag, DTYPE: tl.constexpr):
    """Raise the flag if a float16 output overflows: beside the sum, since its range ends where keys may still go."""
    if DTYPE == tl.float16:
        rows = tl.max(tl.abs(states), axis=1)
        tl.atomic_max(flag + tl.zeros_like(rows).to(tl.int32), tl.full(rows.shape, 1, tl.int32), mask=rows >= 65520.0)


@triton.jit
def _store_rotated(acc, out, stride, skip, left, cos_rows, sin_rows, positions, flag, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Rotate the two halves of every row against each other and write them.

    acc: `[BLOCK_T, BLOCK_N]` mapped keys of the rows from `skip` on; left: rows of the context from row 0 of `out` on.
    """
    BLOCK_T: tl.constexpr = acc.shape[0]
    HALF_N: tl.constexpr = acc.shape[1] // 2
    HALF: tl.constexpr = ROTARY // 2
    row = skip + tl.arange(0, BLOCK_T)
    in_context = row < left
    at = tl.load(positions + row, mask=in_context, other=0).to(tl.int64) * HALF
    a, b = tl.split(tl.permute(tl.reshape(acc, (BLOCK_T, 2, HALF_N)), (0, 2, 1)))
    pair = tl.arange(0, HALF_N)
    if HALF == HALF_N:
        turns = in_context[:, None]
    else:
        turns = in_context[:, None] & (pair < HALF)[None, :]
    cos = tl.load(cos_rows + at[:, None] + pair[None, :], mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_rows + at[:, None] + pair[None, :], mask=turns, other=0.0).to(tl.float32)
    if DIM == ROTARY:
        first, second = pair, pair + HALF
    else:
        first, second = tl.where(pair < HALF, pair, pair + HALF), pair + tl.where(pair < HALF, HALF, DIM // 2)
    if DIM == 2 * HALF_N:
        ok = in_context[:, None]
    else:
        ok = in_context[:, None] & (pair < DIM // 2)[None, :]
    rows = out + (row * stride)[:, None]
    turned = a * cos - b * sin
    _flag_overflow(turned, flag, out.dtype.element_ty)
    tl.store(rows + first[None, :], turned.to(out.dtype.element_ty), mask=ok)
    turned = b * cos + a * sin
    _flag_overflow(turned, flag, out.dtype.element_ty)
    tl.store(rows + second[None, :], turned.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _paired_columns(BLOCK_N: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Order the output columns so that the two that rotate together lie half a block apart."""
    n = tl.arange(0, BLOCK_N)
    pair, second = n % (BLOCK_N // 2), n // (BLOCK_N // 2)
    if ROTARY == DIM or ROTARY == 0:
        return pair + second * (DIM // 2)
    return tl.where(pair < ROTARY // 2, pair + second * (ROTARY // 2), pair + tl.where(second == 0, ROTARY // 2, DIM // 2))
