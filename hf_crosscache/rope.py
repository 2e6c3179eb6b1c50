"""Take rotary position embeddings off keys and put them on, with the tables of the model that made them.

A cached key is `k_rot = R(p) k`, where `R(p)` turns the pair `(k[j], k[j + R/2])` by the angle `p * inv_freq[j]` and scales it by the
model's attention scaling. A translator maps *pre-RoPE* keys, so the rotation of the source comes off first and that of the target goes
on last. The two must not be folded into one rotation by the difference of the angles: `R_t W R_s^-1` is such a rotation only for W = 1.

Some models turn the neighbours `(k[2j], k[2j + 1])` instead. Keys are reordered as they leave such a model's cache (`to_half_split`) and
as they enter it (`to_interleaved`); in between, pre-RoPE keys of every model are in half-split order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Rotary frequencies of one kind of layer, as read from a model's own rotary module.

    inv_freq: `[R/2]` float32, radians per position; R is the number of rotated dimensions, the first R of a head.
        All zeros for a layer without RoPE.
    attention_scaling: factor that the model multiplies into cos and sin (YaRN and its kin; 1 elsewhere).
    interleaved: the model turns pairs of neighbours `(2j, 2j + 1)` instead of `(j, j + R/2)`.
    """

    inv_freq: torch.Tensor
    attention_scaling: float
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        return 2 * self.inv_freq.numel()

    def cos_sin(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Tabulate cos and sin at some positions, rounded as a model of some dtype rounds them.

        Args:
            position_ids: `[B, T]` integer positions.
            dtype: of the model that rotates, which is that of its cache.

        Returns:
            Two float32 tensors `[B, T, R/2]`, attention scaling included.
        """
        angles = position_ids[..., None].float() * self.inv_freq.to(position_ids.device)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(dtype).float(), sin.to(dtype).float()

    def same_as(self, other: RotaryTable) -> bool:
        """Tell whether two tables rotate alike."""
        return (
            self.inv_freq.shape == other.inv_freq.shape
            and torch.allclose(self.inv_freq.cpu(), other.inv_freq.cpu(), rtol=1e-6, atol=0)
            and abs(self.attention_scaling - other.attention_scaling) < 1e-6
            and self.interleaved == other.interleaved
        )


class RotaryStack:
    """The rotary tables of a model's layers as a kernel reads them: cos and sin over all positions, equal tables once.

    Args:
        tables: of each layer, all with one rotary_dim; empty for states that carry no RoPE.

    Raises:
        ValueError: the tables differ in rotary_dim.
    """

    def __init__(self, tables: Sequence[RotaryTable]) -> None:
        if len({table.rotary_dim for table in tables}) > 1:
            raise ValueError(f"Tables of one rotary_dim expected, {sorted({table.rotary_dim for table in tables})} found.")
        self._tables, self._distinct = tables, list(dict.fromkeys(tables))
        self._known: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def cos_sin(self, positions: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Tabulate positions 0 to `positions` - 1 at least, once for each dtype and device that asks.

        Returns:
            cos and sin, `[tables, P, R/2]`, rounded as a model of that dtype rounds them.
        """
        known = self._known.get((dtype, device))
        if known is None or known[0].shape[1] < positions:
            position_ids = torch.arange(1 << max(positions - 1, 1023).bit_length(), device=device)[None]
            if self._distinct:
                pairs = [table.cos_sin(position_ids, dtype) for table in self._distinct]
                cos, sin = (torch.cat([pair[i] for pair in pairs]).to(dtype) for i in range(2))
            else:
                cos = sin = torch.empty((1, position_ids.shape[1], 0), dtype=dtype, device=device)
            known = self._known[dtype, device] = (cos, sin)
        return known

    def index(self, layers: Iterable[int], device: torch.device) -> torch.Tensor:
        """Which table each of some layers has, int32 `[layers]`."""
        rows = [self._distinct.index(self._tables[layer]) if self._distinct else 0 for layer in layers]
        return torch.tensor(rows, dtype=torch.int32, device=device)


NO_ROTATION = RotaryStack(())


def strip_rope(key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate cached keys back to position zero.

        a' = (a cos + b sin) / (cos^2 + sin^2),    b' = (b cos - a sin) / (cos^2 + sin^2)

    The division removes the attention scaling, and with it the rounding that leaves cos and sin of a bf16 model off the unit circle.

    Args:
        key_states: `[B, H, T, D]` keys as cached, any floating dtype; of an interleaved model, after `to_half_split`.
        cos, sin: `[B, T, R/2]` float32 with R <= D, from `RotaryTable.cos_sin` at the positions of the keys.

    Returns:
        Pre-RoPE keys `[B, H, T, D]` in float32.
    """
    cos, sin = cos[:, None], sin[:, None]
    norm = cos.square() + sin.square()
    return _turn(key_states.float(), cos / norm, -sin / norm)


def apply_rope(key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pre-RoPE keys to their positions, as the model's attention does before it caches them.

        a' = a cos - b sin,    b' = b cos + a sin

    Args:
        key_states: `[B, H, T, D]` pre-RoPE keys, any floating dtype.
        cos, sin: `[B, T, R/2]` float32 with R <= D, from `RotaryTable.cos_sin` at the positions to rotate to.

    Returns:
        Keys `[B, H, T, D]` in float32, ready for one cast to the cache's dtype; for an interleaved model, before `to_interleaved`.
    """
    return _turn(key_states.float(), cos[:, None], sin[:, None])


def to_half_split(key_states: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Reorder keys of an interleaved model, `(x0, y0, x1, y1, ..)`, to halves, `(x0, x1, .., y0, y1, ..)`.

    Args:
        key_states: `[..., D]`, any dtype.
        rotary_dim: leading dimensions to reorder; the rest stays as it is.

    Returns:
        A new tensor `[..., D]`.
    """
    turned, rest = key_states[..., :rotary_dim], key_states[..., rotary_dim:]
    return torch.cat((turned[..., 0::2], turned[..., 1::2], rest), dim=-1)


def to_interleaved(key_states: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Reorder keys in halves to the neighbours of an interleaved model: the inverse of `to_half_split`."""
    half = rotary_dim // 2
    first, second, rest = key_states[..., :half], key_states[..., half:rotary_dim], key_states[..., rotary_dim:]
    return torch.cat((torch.stack((first, second), dim=-1).flatten(-2), rest), dim=-1)


def _turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
