"""A mixture as it is served: tokens told apart once, each expert's own brought together, translated and put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .mixture import Mixture
from .rope import to_half_split
from .states import LayerStates, StatesByLayer
from .translator import CacheTranslator


@dataclass(frozen=True, eq=False)
class Routed:
    """The tokens of one expert, in a batch of `[B, T]`: of each its row and its place in it, int64 `[n]`."""

    rows: torch.Tensor
    tokens: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, states: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """Bring the tokens of `[B or 1, H, >= begin + T, D]` states together as one sequence, `[1, H, n, D]`."""
        rows = self.rows if states.shape[0] > 1 else torch.zeros_like(self.rows)
        return states[rows, :, self.tokens + begin].transpose(0, 1)[None]

    def of_ids(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Those of the tokens among ids `[B or 1, T]`, as `[1, n]`."""
        rows = self.rows if position_ids.shape[0] > 1 else torch.zeros_like(self.rows)
        return position_ids[rows, self.tokens][None]

    def put(self, states: torch.Tensor, out: torch.Tensor) -> None:
        """Write states `[N, 1, H, n, D]` of the tokens to their places in `[N, B, H, T, D]`."""
        out[:, self.rows, :, self.tokens] = states[:, 0].permute(2, 0, 1, 3)


def routed(experts: torch.Tensor, count: int) -> tuple[Routed, ...]:
    """Sort tokens by their expert, given that of each, int64 `[B, T]`; an expert may have none."""
    return tuple(Routed(*(experts == expert).nonzero(as_tuple=True)) for expert in range(count))


@dataclass(frozen=True, eq=False)
class Experts:
    """The expert of each slot of a hand-off from `start` on, int64 `[B, T]`, of `count`."""

    experts: torch.Tensor
    count: int
    start: int
    _sorted: dict[tuple[int, int, torch.device], tuple[Routed, ...]] = field(init=False, repr=False, default_factory=dict)

    @classmethod
    def of(
        cls, translator: CacheTranslator, mixture: Mixture, source: StatesByLayer, position_ids: torch.Tensor, begin: int, start: int
    ) -> Experts:
        """Route each token.

        Args:
            source: the layers that the router reads: keys and values `[B, H, >= begin + T, D]` as cached.
            position_ids: int32 `[B or 1, T]`.
            begin: the row of the source states of slot `start`.
        """
        router, rotary, turned = mixture.router, translator.source.geometry.rotary, None
        rows = slice(begin, begin + position_ids.shape[1])
        keys, values = ([source[layer][side][:, :, rows] for layer in router.layers] for side in (0, 1))
        if "keys" in router.roles:
            turned = tuple(rotary[layer] for layer in router.layers)
            keys = [to_half_split(k, table.rotary_dim) if table.interleaved else k for k, table in zip(keys, turned, strict=True)]
        return cls(router.route(LayerStates(keys, values, turned, position_ids)), router.experts, start)

    def tokens(self, begin: int, end: int, device: torch.device) -> tuple[Routed, ...]:
        """The tokens of each expert among the slots from begin to end, on a device; kept, since every group of layers asks."""
        key = (begin, end, device)
        if key not in self._sorted:
            self._sorted[key] = routed(self.experts[:, begin - self.start : end - self.start].to(device), self.count)
        return self._sorted[key]


def translate_routed(
    translator: CacheTranslator,
    tokens: Sequence[Routed],
    layers: range,
    source: dict[int, tuple[torch.Tensor, torch.Tensor]],
    source_position_ids: torch.Tensor,
    target_position_ids: torch.Tensor,
    positions: int,
    out_keys: torch.Tensor,
    out_values: torch.Tensor,
    begin: int,
    among: range,
) -> torch.Tensor:
    """Translate some positions for some target layers, every token by its expert; else as `CacheTranslator.translate`.

    The products are those of one translator, since a token is mapped once; what is added is memory traffic.

    Args:
        tokens: of each expert, among the T positions.
        source: exactly the layers that the maps read.
    """
    flags = torch.zeros((len(layers), 2), dtype=torch.int32, device=out_keys.device)
    for expert, own in zip(translator.experts, tokens, strict=True):
        if not len(own):
            continue
        gathered = {layer: (own.of(keys, begin), own.of(values, begin)) for layer, (keys, values) in source.items()}
        at, to = own.of_ids(source_position_ids), own.of_ids(target_position_ids)
        size = (2, len(layers), 1, out_keys.shape[2], len(own), out_keys.shape[4])
        mapped = torch.empty(size, dtype=out_keys.dtype, device=out_keys.device)
        flags |= expert.translate(layers, gathered, at, to, positions, mapped[0], mapped[1], 0, among)
        own.put(mapped[0], out_keys)
        own.put(mapped[1], out_values)
    return flags
