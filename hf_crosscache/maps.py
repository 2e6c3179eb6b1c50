"""Affine maps between heads: as they are fitted and saved, and packed as one launch of the kernel reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from . import ops
from .errors import GeometryError


class SourceHead(NamedTuple):
    """A block that a map reads: one key-value head of one source layer."""

    layer: int
    head: int


@dataclass(frozen=True, eq=False)
class LayerMap:
    """The affine maps of one target layer and role: `y = (x - mean_x) weight + mean_y`.

    blocks: for each target head the source heads it reads, in the order of its inputs; one entry alone serves all the heads.
    weight: `[H, n, D]`, mean_x: `[len(blocks), n]`, mean_y: `[H, D]`; float32.
    """

    blocks: tuple[tuple[SourceHead, ...], ...]
    weight: torch.Tensor
    mean_x: torch.Tensor
    mean_y: torch.Tensor

    @cached_property
    def bias(self) -> torch.Tensor:
        """`mean_y - mean_x weight`, `[H, D]` float32, summed in float64: it absorbs the rounding of a bf16 weight at the mean."""
        return self.bias_for(self.weight)

    def bias_for(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the bias that goes with a rounded weight, so that the map of the mean stays exact."""
        offset = self.mean_x.double()[:, None] @ weight.double()
        return (self.mean_y.double() - offset[:, 0]).float()

    @cached_property
    def source_layers(self) -> frozenset[int]:
        """The source layers that these maps read."""
        return frozenset(block.layer for heads in self.blocks for block in heads)

    def to(self, device: torch.device | str) -> LayerMap:
        """Return the maps on a device; itself if they are there."""
        if self.weight.device == torch.device(device):
            return self
        return replace(self, **{n: getattr(self, n).to(device) for n in ("weight", "mean_x", "mean_y")})


@dataclass(frozen=True)
class FittedMaps:
    """What a fit yields for some target layers, of each role.

    keys, values: the maps.
    r2: held-out share of variance explained, `[layers, heads]`; held_out: that variance, summed over the rows by their weight, alike.
    reach: largest root mean square of a dimension of the target's states, `[layers]`.
    alpha: the ridge that did best on held-out rows.
    """

    keys: tuple[LayerMap, ...]
    values: tuple[LayerMap, ...]
    r2: dict[str, torch.Tensor]
    reach: dict[str, torch.Tensor]
    held_out: dict[str, torch.Tensor]
    alpha: dict[str, float]


@dataclass(frozen=True, eq=False)
class PackedMaps:
    """The maps of N target layers of one shape, ready for one launch.

    source_layers: the source layers that they read, in the order of the lists that go with them.
    blocks: int32 `[N, 2, G, k, 2]`, (index into source_layers, head); key_weight, value_weight `[N, H, n, D]` in the dtypes
    that the kernel multiplies; bias float32 `[N, 2, H, D]`.
    """

    source_layers: tuple[int, ...]
    blocks: torch.Tensor
    key_weight: torch.Tensor
    value_weight: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def pack(
        cls, keys: Sequence[LayerMap], values: Sequence[LayerMap], source_dim: int, dtype: torch.dtype, device: torch.device
    ) -> PackedMaps:
        """Stack the maps of keys and values of some layers for source states of a dtype.

        Maps of fewer blocks than others read their first block again, with a weight of zero.

        Raises:
            GeometryError: a weight exceeds the dtype that multiplies it.
        """
        heads = keys[0].weight.shape[0]
        shared = all(len(layer_map.blocks) == 1 for layer_map in (*keys, *values))
        k = max(len(blocks) for layer_map in (*keys, *values) for blocks in layer_map.blocks)
        rows = [[_blocks(layer_map, 1 if shared else heads, k) for layer_map in pair] for pair in zip(keys, values, strict=True)]
        blocks = torch.tensor(rows, dtype=torch.int32)
        source_layers, index = blocks[..., 0].unique(return_inverse=True)
        blocks[..., 0] = index.int()
        weights, biases = [], []
        for role, (maps, operand) in enumerate(zip((keys, values), ops.weight_dtypes(dtype), strict=True)):
            padded = torch.stack([_padded(layer_map.weight, k * source_dim).to(device=device, dtype=operand) for layer_map in maps])
            if not padded.isfinite().all():
                raise GeometryError(
                    f"The weights of the {('keys', 'values')[role]} exceed {operand}, which multiplies {dtype} states. "
                    "Prefill the source in float32."
                )
            weights.append(padded)
            rounded = (layer_map.bias_for(layer_map.weight.to(operand)) for layer_map in maps)
            biases.append(torch.stack([bias.to(device) for bias in rounded]))
        return cls(tuple(source_layers.tolist()), blocks.to(device), weights[0], weights[1], torch.stack(biases, dim=1))

    def select(self, start: int, stop: int) -> PackedMaps:
        """Return the maps of some of the layers; weights and biases are views."""
        blocks = self.blocks[start:stop].clone()
        used, index = blocks[..., 0].unique(return_inverse=True)
        blocks[..., 0] = index.int()
        return PackedMaps(
            tuple(self.source_layers[i] for i in used.tolist()),
            blocks,
            self.key_weight[start:stop],
            self.value_weight[start:stop],
            self.bias[start:stop],
        )


def _blocks(layer_map: LayerMap, groups: int, k: int) -> list[list[SourceHead]]:
    rows = [[*blocks, *[blocks[0]] * (k - len(blocks))] for blocks in layer_map.blocks]
    return rows * groups if len(rows) == 1 else rows


def _padded(weight: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(weight, (0, 0, 0, width - weight.shape[1]))
