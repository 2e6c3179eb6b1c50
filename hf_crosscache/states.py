"""What two models cache for the same tokens: the raw material of a fit, as cached, with what is needed to take the RoPE off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from . import ops
from .rope import NO_ROTATION, RotaryStack, RotaryTable, strip_rope


class StatesByLayer(Protocol):
    """A source's states: a dict will do."""

    def __getitem__(self, layer_idx: int, /) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class LayerStates:
    """What one model caches for some rows, layer by layer, each `[B, H, T, D]`.

    keys: in half-split order, whatever the order of the model's own.
    rotary: the tables that turned the keys, at position_ids (int32 `[B or 1, T]`); None where the keys come without RoPE.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    rotary: tuple[RotaryTable, ...] | None = None
    position_ids: torch.Tensor | None = None

    def rows(self, rows: slice) -> LayerStates:
        """Keep some rows, as views."""
        keys, values = ([states[:, :, rows] for states in side] for side in (self.keys, self.values))
        return LayerStates(keys, values, self.rotary, None if self.position_ids is None else self.position_ids[:, rows])

    def of_role(self, role: str) -> RoleStates:
        """The states of one role, with what turned them."""
        if role == "values" or self.rotary is None or self.position_ids is None:
            return RoleStates(getattr(self, role), None, None)
        turned = RoleStates(self.keys, self.rotary, self.position_ids)
        if len({table.rotary_dim for table in self.rotary}) == 1:
            return turned
        # layers that rotate different numbers of dimensions cannot go through one launch
        return RoleStates([turned.stripped(i) for i in range(len(self.keys))], None, None)


class RoleStates(NamedTuple):
    """Keys, or values, of some layers, and the rotary tables and positions that turned them, None where none did."""

    layers: list[torch.Tensor]
    rotary: tuple[RotaryTable, ...] | None
    position_ids: torch.Tensor | None

    def select(self, layers: Iterable[int]) -> RoleStates:
        """Keep some layers."""
        layers = list(layers)
        rotary = None if self.rotary is None else tuple(self.rotary[i] for i in layers)
        return RoleStates([self.layers[i] for i in layers], rotary, self.position_ids)

    def stripped(self, i: int) -> torch.Tensor:
        """The states of one layer without RoPE: keys in float32, values as cached."""
        if self.rotary is None or self.position_ids is None:
            return self.layers[i]
        return strip_rope(self.layers[i], *self.rotary[i].cos_sin(self.position_ids, self.layers[i].dtype))

    def mean(self) -> torch.Tensor:
        """Mean of every head's stripped states, `[layers, H, D]` float32."""
        return torch.stack([self.stripped(i).float().mean((0, 2)) for i in range(len(self.layers))])

    def tables(self, known: dict) -> tuple[ops.Tables, torch.Tensor]:
        """What a kernel reads of the rotation: the stacked tables, kept in `known`, and the positions."""
        states = self.layers[0]
        position_ids = self.position_ids
        if position_ids is None:
            position_ids = torch.zeros((1, states.shape[2]), dtype=torch.int32, device=states.device)
        stack = known.setdefault(self.rotary, NO_ROTATION if self.rotary is None else RotaryStack(self.rotary))
        end = 1 if self.rotary is None else int(position_ids.max()) + 1
        cos_sin = stack.cos_sin(end, states.dtype, states.device)
        return (*cos_sin, stack.index(range(len(self.layers)), states.device)), position_ids


@dataclass(frozen=True)
class AttentionWeights:
    """How much each row matters to what later tokens read of the target: per layer `[B, H, T]` float32, of mean 1 in every head."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def to(self, device: torch.device | str) -> AttentionWeights:
        """Move all layers to one device."""
        return AttentionWeights([keys.to(device) for keys in self.keys], [values.to(device) for values in self.values])


@dataclass(frozen=True)
class PairedStates:
    """The states of both models on the same tokens; row (b, t) of one belongs to row (b, t) of the other.

    sample_weight: `[B, T]` weight of each row, None for ones.
    attention_weights: further weights of each row, by the target's layers, heads and roles; None for ones.
    hidden: `[B, T, F]` what the attention of the target's last native layer read, where there is one.
    """

    source: LayerStates
    target: LayerStates
    sample_weight: torch.Tensor | None = None
    attention_weights: AttentionWeights | None = None
    hidden: torch.Tensor | None = None

    def row_weights(self) -> torch.Tensor | None:
        """The weight of each row, whatever it is used for: `[1, B * T]` float32, None for ones."""
        return None if self.sample_weight is None else self.sample_weight.reshape(1, -1).float()

    def weights(self, role: str, layers: Iterable[int]) -> torch.Tensor | None:
        """The weight of each row for the heads of some target layers: `[layers or 1, H or 1, B * T]` float32, None for ones."""
        of_rows = self.row_weights()
        if self.attention_weights is None:
            return None if of_rows is None else of_rows[None]
        of_layers = getattr(self.attention_weights, role)
        weights = torch.stack([of_layers[i] for i in layers]).transpose(1, 2).flatten(2)
        return weights if of_rows is None else weights * of_rows
