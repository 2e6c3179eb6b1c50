"""A target's own keys and values of some first positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class NativeStates:
    """A target's own cache of some first positions.

    keys, values: per layer `[B or 1, H, s, D]`.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    _stacked: dict[Any, torch.Tensor] = field(init=False, repr=False, default_factory=dict)

    @property
    def length(self) -> int:
        return self.keys[0].shape[2]

    def stacked(self, layers: range, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Keys and values of some layers of one shape, `[2, N, B or 1, H, s, D]`; kept, since those of an opening serve every hand-off."""
        key = (layers, dtype, device)
        if key not in self._stacked:
            sides = (torch.stack([states[i].to(device, dtype) for i in layers]) for states in (self.keys, self.values))
            self._stacked[key] = torch.stack(tuple(sides))
        return self._stacked[key]


@dataclass(frozen=True, eq=False)
class Opening:
    """The target's own cache of the tokens that every calibration text began with, such as a BOS.

    token_ids: the tokens; keys, values: per layer `[1, H, len(token_ids), D]` as the target caches them.
    """

    token_ids: tuple[int, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    _states: dict[int, NativeStates] = field(init=False, repr=False, default_factory=dict)

    def states(self, length: int) -> NativeStates:
        """The states of the first tokens."""
        if length not in self._states:
            first = (tuple(states[:, :, :length] for states in side) for side in (self.keys, self.values))
            self._states[length] = NativeStates(*first)
        return self._states[length]
