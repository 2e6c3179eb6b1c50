"""A mixture of translators: further sets of maps beside a translator's own, and the router that says which of them serves a token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from . import ops
from .maps import LayerMap
from .states import LayerStates


@dataclass(frozen=True, eq=False)
class Router:
    """Names the expert of each token, the one of the highest affine score; routing is top-1, no token is served by two.

        expert = argmax_e (x weight[:, e] + bias[e]),   x = what some source layers hold of the token, role after role

    layers: the source layers that it reads, or the layers of features behind the source's own.
    roles: what it reads of them: keys without RoPE, and values.
    weight: `[F, E]`, bias: `[E]`; float32.
    """

    layers: tuple[int, ...]
    roles: tuple[str, ...]
    weight: torch.Tensor
    bias: torch.Tensor

    @property
    def experts(self) -> int:
        """E, how many experts it chooses among."""
        return len(self.bias)

    def route(self, states: LayerStates) -> torch.Tensor:
        """Return the expert of each token, int64 `[B, T]`, from the states of its layers alone, in their order."""
        x = router_input(states, self.roles)
        with ops.full_float32():
            scores = x @ self.weight.to(x.device) + self.bias.to(x.device)
        return scores.argmax(-1)

    def of(self, states: LayerStates) -> LayerStates:
        """Keep the layers that it reads, of the states of all layers."""
        return layers_of(states, self.layers)

    def to(self, device: torch.device | str) -> Router:
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))


@dataclass(frozen=True, eq=False)
class Mixture:
    """What a mixture has beside the maps of its first expert, which are the translator's own.

    keys, values: of each further expert, one `LayerMap` a target layer, None for native layers; the blocks are those of the first expert.
    """

    router: Router
    keys: tuple[tuple[LayerMap | None, ...], ...]
    values: tuple[tuple[LayerMap | None, ...], ...]

    def to(self, device: torch.device | str) -> Mixture:
        sides = [[tuple(layer_map and layer_map.to(device) for layer_map in maps) for maps in side] for side in (self.keys, self.values)]
        return Mixture(self.router.to(device), tuple(sides[0]), tuple(sides[1]))


def layers_of(states: LayerStates, layers: tuple[int, ...]) -> LayerStates:
    """Keep some layers of some states, in the order asked for."""
    rotary = None if states.rotary is None else tuple(states.rotary[i] for i in layers)
    return LayerStates([states.keys[i] for i in layers], [states.values[i] for i in layers], rotary, states.position_ids)


def router_input(states: LayerStates, roles: tuple[str, ...]) -> torch.Tensor:
    """What a router sees of each token: heads side by side, role after role, layer after layer; `[B, T, F]` float32."""
    read = []
    for role in roles:
        of_role = states.of_role(role)
        read += [of_role.stripped(i).float().transpose(1, 2).flatten(2) for i in range(len(of_role.layers))]
    return torch.cat(read, dim=-1)
