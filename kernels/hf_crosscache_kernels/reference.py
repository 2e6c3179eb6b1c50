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


def translate_kv_reference(
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
    """Translate some positions for N target layers, all of them or one.

        key[l, h]   = R_t(p) ( [ R_s(p')^-1 key_src(b) for b in blocks[0, l, h] ] @ key_weight[l, h] + bias[0, l, h] )
        value[l, h] = [ value_src(b) for b in blocks[1, l, h] ] @ value_weight[l, h] + bias[1, l, h]

    where R turns the pair (x[j], x[j + R/2]) by the model's cos and sin, and R^-1 divides by cos^2 + sin^2, which takes attention
    scaling off. The two rotations are never folded into one by the difference of their angles: they do not commute with the weight.

    Args:
        source_keys, source_values: per source layer `[B, H_src, T, D_src]`, keys as cached, any floating dtype.
        blocks: int32 `[2, N, G, k, 2]` the source heads (layer, head) of keys and of values; G = H, or 1 where all heads read the same.
        key_weight, value_weight: `[N, H, k * D_src, D]`.
        bias: float32 `[2, N, H, D]`.
        source_cos, source_sin: `[S, P, R_src/2]` S rotary tables over positions 0 to P - 1, attention scaling included.
        source_tables: int32 `[layers of the source]` the table of each layer.
        source_positions: integer `[B or 1, T]` where the source saw the tokens.
        target_cos, target_sin, target_tables `[N]`, target_positions: the same of the target.
        out_keys, out_values: `[N, B, H, T, D]`, any strides; written in full.
        flags: int32 `[2, N]`; set to 1 where keys (0) or values (1) of a layer are not finite in the output's dtype, else left alone.

    Precision: products and sums in float32, one cast to the dtype of the outputs.
    """
    for n in range(out_keys.shape[0]):
        for role, (source, weight, out) in enumerate(((source_keys, key_weight, out_keys), (source_values, value_weight, out_values))):
            heads = [[(layer, head) for layer, head in group] for group in blocks[role, n].tolist()]
            states = {layer: source[layer] for group in heads for layer, _ in group}
            if role == 0:
                states = {
                    layer: _turn_back(keys, *_rows(source_cos, source_sin, source_tables[layer], source_positions))
                    for layer, keys in states.items()
                }
            mapped = torch.empty(out[n].shape, dtype=torch.float32, device=out.device)
            map_heads_reference(states, heads, weight[n].float(), bias[role, n], mapped)
            if role == 0:
                mapped = _turn_on(mapped, *_rows(target_cos, target_sin, target_tables[n], target_positions))
            out[n] = mapped.to(out.dtype)
            flags[role, n] |= (~out[n].isfinite().all()).to(flags.dtype)


def _rows(cos: torch.Tensor, sin: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = positions.long()
    return cos[table][at].float()[:, None], sin[table][at].float()[:, None]  # [B, 1, T, R/2]


def _turn_back(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    norm = cos.square() + sin.square()
    return _turn_on(keys.float(), cos / norm, -sin / norm)


def _turn_on(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    a, b, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
