"""Source features: what all keys and values of the source say together, in a few directions that every map reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from . import ops
from .rope import strip_rope
from .states import LayerStates

_ROWS = 8192  # positions read at once: their states without RoPE are held in float32


@dataclass(frozen=True, eq=False)
class SourceFeatures:
    """A projection of a source's stripped keys and values of all layers, `(x - mean) projection`, `x = [keys, values]`.

    mean: `[n]`, projection: `[n, r]`; float32. The n = 2 L H D inputs are keys, then values, layer after layer, head after head.
    """

    mean: torch.Tensor
    projection: torch.Tensor

    @property
    def width(self) -> int:
        """r, the number of features."""
        return self.projection.shape[1]

    def of(self, states: LayerStates) -> torch.Tensor:
        """Return the features `[B, T, r]` of a source's states `[B, H, T, D]`, in float32.

        The product is one of the states' dtype with float32 accumulation; the mean comes off before, in float32, since beside large
        biases of keys nothing would be left of the features in bfloat16.
        """
        dtype = states.values[0].dtype
        mean, projection = self.mean.to(states.values[0].device), self.projection.to(states.values[0].device, dtype)
        with ops.full_float32():
            chunks = [((x - mean).to(dtype) @ projection).float() for x in (inputs_of(part) for part in _in_chunks(states))]
        return torch.cat(chunks, dim=1)

    def to(self, device: torch.device | str) -> SourceFeatures:
        return replace(self, mean=self.mean.to(device), projection=self.projection.to(device))


def inputs_of(states: LayerStates) -> torch.Tensor:
    """Lay the stripped keys and values of all layers side by side: `[B, T, n]` float32."""
    return torch.cat([_rows(_stripped_keys(states)), _rows([layer.float() for layer in states.values])], dim=-1)


def _stripped_keys(states: LayerStates) -> list[torch.Tensor]:
    """Keys of each layer without RoPE, float32; those that one table turned are stripped together."""
    turned = states.of_role("keys")
    if turned.rotary is None or turned.position_ids is None or len(set(turned.rotary)) > 1 or len({k.shape for k in turned.layers}) > 1:
        return [turned.stripped(i).float() for i in range(len(turned.layers))]
    layers = len(turned.layers)
    tables = (table.repeat(layers, 1, 1) if len(table) > 1 else table for table in turned.rotary[0].cos_sin(
        turned.position_ids, turned.layers[0].dtype
    ))  # fmt: skip
    return list(strip_rope(torch.cat(turned.layers), *tables).chunk(layers))


def _rows(layers: list[torch.Tensor]) -> torch.Tensor:
    """`[B, H, T, D]` of each layer -> `[B, T, L H D]`."""
    return torch.cat([layer.transpose(1, 2).flatten(2) for layer in layers], dim=-1)


def _in_chunks(states: LayerStates) -> list[LayerStates]:
    length = states.values[0].shape[2]
    return [states.rows(slice(start, start + _ROWS)) for start in range(0, length, _ROWS)]
