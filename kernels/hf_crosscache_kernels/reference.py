"""Plain-torch references: the CPU path, the oracle of every faster kernel, and its documentation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROWS_AT_ONCE = 4096  # bounds the gathered inputs of a map: 4,096 tokens x 8 blocks x 128 x 4 bytes = 16 MiB a head
_ELEMENTS_AT_ONCE = 1 << 26  # and those of the moments: 256 MiB


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
    begin: int = 0,
    key_norm: torch.Tensor | None = None,
) -> None:
    """Translate some positions for N target layers, all of them or one.

        key[l, h]   = R_t(p) ( [ R_s(p')^-1 key_src(b) for b in blocks[l, 0, h] ] @ key_weight[l, h] + bias[l, 0, h] )
        value[l, h] = [ value_src(b) for b in blocks[l, 1, h] ] @ value_weight[l, h] + bias[l, 1, h]

    where R turns the pair (x[j], x[j + R/2]) by the model's cos and sin, and R^-1 divides by cos^2 + sin^2, which takes attention
    scaling off. With key_norm a mapped key k is scaled to k / rms(k * key_norm[l]) before it is turned. The two rotations are never
    folded into one by the difference of their angles: they do not commute with the weight.

    Args:
        source_keys, source_values: per source layer `[B, H_src, >= begin + T, D_src]`, keys as cached, any floating dtype. In triton
            all layers have one shape.
        blocks: int32 `[N, 2, G, k, 2]` the source heads (layer, head) of keys and of values; G = H, or 1 where all heads read the same.
        key_weight, value_weight: `[N, H, k * D_src, D]`.
        bias: float32 `[N, 2, H, D]`.
        source_cos, source_sin: `[S, P, R_src/2]` S rotary tables over positions 0 to P - 1, attention scaling included; R_src = 0 says
            that the keys come without RoPE.
        source_tables: int32 `[layers of the source]` the table of each layer.
        source_positions: int32 `[B or 1, T]` where the source saw the tokens.
        target_cos, target_sin, target_tables `[N]`, target_positions: the same of the target.
        out_keys, out_values: `[N, B, H, T, D]`, any strides but the last; written in full.
        flags: int32 `[N, 2]`; set to 1 where keys (0) or values (1) of a layer are not finite in the output's dtype, else left alone.
        begin: the row of the source states of the first of the T positions.
        key_norm: float32 `[N, D]` the inverse weights of a model's norm of keys, whose every key has a root mean square of 1 under them;
            None where it has none.

    Precision: products and sums in float32, one cast to the dtype of the outputs.
    """
    turned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in set(blocks[:, 0, ..., 0].flatten().tolist()):
        turned[layer] = _cos_sin(source_cos, source_sin, source_tables[layer], source_positions)
    for n, layer_blocks in enumerate(blocks.tolist()):
        cos, sin = _cos_sin(target_cos, target_sin, target_tables[n], target_positions)
        for start in range(0, out_keys.shape[3], _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, out_keys.shape[3]))
            read = slice(begin + rows.start, begin + rows.stop)
            keys = [
                torch.cat([_turn_back(source_keys[i][:, h, read], *(t[:, rows] for t in turned[i])) for i, h in group], dim=-1)
                for group in layer_blocks[0]
            ]
            values = [torch.cat([source_values[i][:, h, read].float() for i, h in group], dim=-1) for group in layer_blocks[1]]
            mapped = _map_heads(keys, key_weight[n], bias[n, 0])
            if key_norm is not None:
                mapped = mapped * (mapped * key_norm[n]).square().mean(-1, keepdim=True).add(1e-12).rsqrt()
            out_keys[n, :, :, rows] = _turn(mapped, cos[:, None, rows], sin[:, None, rows]).to(out_keys.dtype)
            out_values[n, :, :, rows] = _map_heads(values, value_weight[n], bias[n, 1]).to(out_values.dtype)
        for role, out in enumerate((out_keys, out_values)):
            flags[n, role] |= (~out[n].isfinite().all()).to(flags.dtype)


def accumulate_moments_reference(
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
    """Add some rows to the moments of G weighted regressions of target heads on source heads.

        X = [ R_s(p)^-1 x(b) - shift(b) for b in source_blocks[g] ],  Y = [ R_t(p)^-1 y(b) - shift(b) for b in target_blocks[g] ]
        sum_xx += X'WX,  sum_xy += X'WY,  sum_yy += diag(Y'WY),  sum_x += X'W1,  sum_y += Y'W1,  total += 1'W1

    Args:
        source, target: per layer `[B, H, T, D]` states as cached, row (b, t) of one beside row (b, t) of the other; any floating dtype.
        source_blocks: int32 `[G, c, 2]` the source heads (layer, head) of each regression's n = c D_src inputs.
        target_blocks: int32 `[G or 1, e, 2]` the target heads of its m = e D_tgt outputs; one entry serves all regressions.
        source_shift, target_shift: float32 `[layers, H, D]`, near the mean of the states: keys with biases lie far from zero beside
            their spread, and an uncentred Gram in float32 is not even positive definite then.
        sample_weight: `[1, B * T]` non-negative weight of each row, or `[G, B * T]` for each regression (its own outputs, then);
            None for ones.
        source_cos, ..., target_positions: as `translate_kv_reference` takes them; R = 0 for values, and for keys without RoPE.
        total `[1 or G]`, sum_x `[G, n]`, sum_y and sum_yy `[G or 1, m]`, sum_xx `[G, n, n]`, sum_xy `[G, n, m]`: float64, added to. Of
            sum_xx the lower triangle counts.

    Precision: products and sums of the rows given in float32, without TF32 where the caller sees to that; float64 across calls.
    """
    x = _panel(source, source_shift, source_cos, source_sin, source_tables, source_positions)
    y = _panel(target, target_shift, target_cos, target_sin, target_tables, target_positions)
    x_blocks = (source_blocks[..., 0] * source[0].shape[1] + source_blocks[..., 1]).long()
    y_blocks = (target_blocks[..., 0] * target[0].shape[1] + target_blocks[..., 1]).long()
    groups, n, _ = sum_xy.shape
    shared = len(y_blocks) == 1
    at_once = max(1, _ELEMENTS_AT_ONCE // (x.shape[1] * n))
    for start in range(0, groups, at_once):
        some = slice(start, start + at_once)
        inputs = x[x_blocks[some]].transpose(1, 2).flatten(2)  # [g, N, n]
        if not shared or start == 0:
            outputs = y[y_blocks if shared else y_blocks[some]].transpose(1, 2).flatten(2)
        weight = None
        if sample_weight is not None:
            weight = (sample_weight if len(sample_weight) == 1 else sample_weight[some]).float()
        xx, xy, yy, x_sum, y_sum, _ = weighted_products_reference(inputs, outputs, weight)
        for sums, more in ((sum_xx, xx), (sum_xy, xy), (sum_x, x_sum)):
            sums[some] += more
        if not shared or start == 0:
            sum_yy[slice(None) if shared else some] += yy
            sum_y[slice(None) if shared else some] += y_sum
    total += x.shape[1] if sample_weight is None else sample_weight.double().sum(1)


def weighted_products_reference(
    x: torch.Tensor, y: torch.Tensor, sample_weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum the products that a weighted regression of y on x needs.

        W = diag(sample_weight);   X'WX,  X'WY,  diag(Y'WY),  X'W1,  Y'W1,  1'W1

    Args:
        x: `[G, N, n]` float32 inputs of G regressions.
        y: `[G, N, m]` float32 outputs, or `[1, N, m]` shared by all regressions.
        sample_weight: `[1, N]` float32 weight of each row, `[G, N]` for each regression, None for ones.

    Returns:
        `[G, n, n]`, `[G, n, m]`, `[G or 1, m]`, `[G, n]`, `[G or 1, m]` and `[1 or G]`, float32. The caller sees that no TF32 is used.
    """
    if sample_weight is None:
        xw, yw, total = x, y, x.new_full((1,), float(x.shape[1]))
    else:
        xw, yw, total = x * sample_weight[:, :, None], y * sample_weight[:, :, None], sample_weight.sum(1)
    xx = xw.transpose(1, 2) @ x
    shared = y.shape[0] == 1 and x.shape[0] > 1
    xy = torch.einsum("gni,nm->gim", xw, y[0]) if shared else xw.transpose(1, 2) @ y
    return xx, xy, (yw * y).sum(1), xw.sum(1), yw.sum(1), total


def _map_heads(gathered: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Map gathered heads, H of `[B, T, n]` or one for all, to `[B, H, T, D]` float32."""
    weight = weight.float()
    if len(gathered) == 1 and weight.shape[0] > 1:
        joined = weight.permute(1, 0, 2).flatten(1)
        mapped = (gathered[0] @ joined).unflatten(-1, (weight.shape[0], weight.shape[2])).transpose(1, 2)
    else:
        mapped = torch.stack([x @ w for x, w in zip(gathered, weight, strict=True)], dim=1)
    return mapped + bias[:, None]


def _panel(
    layers: Sequence[torch.Tensor],
    shift: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Strip and centre states: `[layers * H, B * T, D]` float32."""
    panel = []
    for layer, states in enumerate(layers):
        stripped = _turn_back(states, *(t[:, None] for t in _cos_sin(cos, sin, tables[layer], positions)))
        panel.append((stripped - shift[layer][:, None]).transpose(0, 1).flatten(1, 2))
    return torch.cat(panel)


def _cos_sin(cos: torch.Tensor, sin: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Look some positions up: two float32 `[B or 1, T, R/2]`."""
    at = positions.long()
    return cos[table][at].float(), sin[table][at].float()


def _turn_back(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    if not cos.shape[-1]:
        return states.float()
    norm = cos.square() + sin.square()
    return _turn(states.float(), cos / norm, -sin / norm)


def _turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    a, b, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
