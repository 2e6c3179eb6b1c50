"""The maps of a translator as parameters: translated states that gradients flow through, in units in which all of them learn alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from .errors import GeometryError
from .maps import LayerMap
from .mixture import Mixture
from .rope import RotaryTable, apply_rope, to_interleaved
from .states import LayerStates
from .trainable_mixture import Translated, by_expert
from .translator import CacheTranslator

_ROLES = ("keys", "values")
_DAMPING = 0.3  # of the correlation, so that directions in which the inputs hardly vary do not run away
_WIDEST = 2048  # inputs that are decorrelated together


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of the stripped states of one role, `[layers, H, D]` float32 each."""

    mean: torch.Tensor
    std: torch.Tensor

    @classmethod
    def of(cls, states: LayerStates, role: str) -> Spread:
        """Measure some states; a dimension that never changes counts as one of unit spread."""
        of_role = states.of_role(role)
        layers = [of_role.stripped(i).float() for i in range(len(of_role.layers))]
        std = torch.stack([layer.std((0, 2)) for layer in layers])
        return cls(torch.stack([layer.mean((0, 2)) for layer in layers]), torch.where(std > 1e-6, std, torch.ones_like(std)))


class TrainableMaps(torch.nn.Module):
    """The maps of the translated layers, stacked by role, as a step away from where they began; those of a mixture expert by expert.

        y = (x - mean_x) (W0 + diag(1 / std_x) (C + 0.3 I)^-1/2 U diag(std_y)) + mean_y + std_y u

    and keys are brought to the target's norm of keys after that, where it has one.
    U and u begin at zero and are float32; C is the correlation of the inputs. In these units inputs are nearly uncorrelated and, like
    outputs, of unit variance: one learning rate suits keys with large biases, small values, native features, and the differences between
    neighbouring layers that say the same but for a little.

    Args:
        translator: where to begin; on the device of the models.
        source, target: a batch of both models' states (those of the source with the native features behind), which says the units.
    """

    def __init__(self, translator: CacheTranslator, source: LayerStates, target: LayerStates) -> None:
        super().__init__()
        self.translator = translator
        self.further = torch.nn.ModuleList(TrainableMaps(expert, source, target) for expert in translator.experts[1:])
        self.mapped = range(translator.native_layers, len(translator.target.geometry))
        self.rotary: Sequence[RotaryTable] = translator.target.geometry.rotary
        self.key_norm: torch.Tensor | None
        self.register_buffer("key_norm", translator.key_norm, persistent=False)
        for role in _ROLES:
            maps = [layer_map for layer_map in getattr(translator, role) if layer_map is not None]
            if len({layer_map.weight.shape for layer_map in maps}) > 1:
                raise GeometryError("Maps of one shape for all layers expected: fit the translator before refining it.")
            reads = Spread.of(source, role)
            heads = reads.mean.shape[1]
            blocks = torch.tensor([[[b.layer * heads + b.head for b in row] for row in m.blocks] for m in maps]).to(reads.mean.device)
            writes = Spread.of(target, role).std[list(self.mapped)]
            tensors = {
                "blocks": blocks,
                "shift": reads.mean,
                "weight": torch.stack([layer_map.weight for layer_map in maps]).to(writes),
                "mean_x": torch.stack([layer_map.mean_x for layer_map in maps]).to(writes),
                "mean_y": torch.stack([layer_map.mean_y for layer_map in maps]).to(writes),
                "centre": reads.mean.flatten(0, 1)[blocks].flatten(2),
                "spread": writes,
            }
            for name, tensor in tensors.items():
                self.register_buffer(f"{role}_{name}", tensor, persistent=False)
            inputs = self._inputs(source, role, torch.float32)
            directions = torch.stack([_uncorrelated(self._rows(inputs, of_layer)) for of_layer in blocks])
            self.register_buffer(f"{role}_directions", directions, persistent=False)  # [N, G, pieces, n / pieces, n / pieces]
            self.register_parameter(f"{role}_step", torch.nn.Parameter(torch.zeros_like(tensors["weight"])))
            self.register_parameter(f"{role}_bias_step", torch.nn.Parameter(torch.zeros_like(writes)))

    def forward(self, source: LayerStates, target_position_ids: torch.Tensor, dtype: torch.dtype) -> Translated:
        """Translate a batch.

        Args:
            source: `[B, H_src, T, D_src]` of each layer, features behind.
            target_position_ids: int `[B or 1, T]`.
            dtype: of the products and of what comes out.

        Returns:
            target layer -> keys, rotated, and values, `[B, H, T, D]`.
        """
        mixture = self.translator.mixture
        if mixture is None:
            return self._translated(source, target_position_ids, dtype)
        translates = [partial(maps._translated, dtype=dtype) for maps in (self, *self._further())]
        return by_expert(translates, mixture.router.route(mixture.router.of(source)), source, target_position_ids)

    def _translated(self, source: LayerStates, target_position_ids: torch.Tensor, dtype: torch.dtype) -> Translated:
        """Translate a batch by the maps of one expert."""
        inputs = {role: self._inputs(source, role, dtype) for role in _ROLES}
        maps = {role: self._maps(role) for role in _ROLES}
        tables: dict[RotaryTable, tuple[torch.Tensor, torch.Tensor]] = {}
        translated: Translated = {}
        for at, layer_idx in enumerate(self.mapped):
            keys, values = (self._map(inputs[role], role, at, *maps[role]) for role in _ROLES)
            if self.key_norm is not None:
                keys = keys * (keys * self.key_norm[layer_idx]).square().mean(-1, keepdim=True).add(1e-12).rsqrt()
            table = self.rotary[layer_idx]
            if table not in tables:
                tables[table] = table.cos_sin(target_position_ids, dtype)
            keys = apply_rope(keys, *tables[table]).to(dtype)
            if table.interleaved:
                keys = to_interleaved(keys, table.rotary_dim)
            translated[layer_idx] = keys, values.to(dtype)
        return translated

    @torch.no_grad()
    def to_translator(self) -> CacheTranslator:
        """Return a translator with the maps as they are now, on the CPU."""
        sides = {}
        for role in _ROLES:
            before = [layer_map for layer_map in getattr(self.translator, role) if layer_map is not None]
            weight = self._weight(role).cpu()
            mean_y = (self._part(role, "mean_y") + self._part(role, "bias_step") * self._part(role, "spread")).cpu()
            mean_x = self._part(role, "mean_x").cpu()
            maps = [LayerMap(before[i].blocks, weight[i], mean_x[i], mean_y[i]) for i in range(len(before))]
            sides[role] = (*[None] * self.translator.native_layers, *maps)
        translator = replace(self.translator.to("cpu"), keys=sides["keys"], values=sides["values"])
        if translator.mixture is None:
            return translator
        further = [maps.to_translator() for maps in self._further()]
        return replace(translator, mixture=Mixture(translator.mixture.router, *zip(*((t.keys, t.values) for t in further), strict=True)))

    def _further(self) -> list[TrainableMaps]:
        """The maps of a mixture's further experts."""
        return [maps for maps in self.further if isinstance(maps, TrainableMaps)]

    def _part(self, role: str, name: str) -> torch.Tensor:
        return getattr(self, f"{role}_{name}")

    def _weight(self, role: str) -> torch.Tensor:
        directions, step = self._part(role, "directions"), self._part(role, "step") * self._part(role, "spread")[:, :, None]
        moved = directions @ step.unflatten(2, directions.shape[2:4])  # [N, H, pieces, n / pieces, D]
        return self._part(role, "weight") + moved.flatten(2, 3)

    def _maps(self, role: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights `[N, H, n, D]`, and biases `[N, H, D]` for inputs about their centre."""
        weight = self._weight(role)
        offset = (self._part(role, "centre") - self._part(role, "mean_x"))[:, :, None] @ weight  # [N, H, 1, D]
        bias = self._part(role, "mean_y") + self._part(role, "bias_step") * self._part(role, "spread") + offset[:, :, 0]
        return weight, bias

    def _inputs(self, source: LayerStates, role: str, dtype: torch.dtype) -> torch.Tensor:
        """All source heads without RoPE, about their centre: `[layers * H_src, B, T, D_src]`."""
        of_role, shift = source.of_role(role), self._part(role, "shift")
        layers = [(of_role.stripped(i).float() - shift[i][None, :, None]).to(dtype) for i in range(len(of_role.layers))]
        return torch.stack(layers).transpose(1, 2).flatten(0, 1)

    def _map(self, inputs: torch.Tensor, role: str, at: int, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        _, batch, tokens, _ = inputs.shape
        y = self._rows(inputs, self._part(role, "blocks")[at]) @ weight[at].to(inputs.dtype)  # [H, B * T, D]
        return (y.float() + bias[at][:, None]).unflatten(1, (batch, tokens)).transpose(0, 1)

    @staticmethod
    def _rows(inputs: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """What the heads of a layer read, `[G, B * T, n]`, of blocks `[G, k]`."""
        return inputs[blocks].permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)


def _uncorrelated(rows: torch.Tensor) -> torch.Tensor:
    """Return diag(1 / std) (C + 0.3 I)^-1/2 of rows `[G, T, n]` with correlation C, `[G, pieces, p, p]`.

    Wide inputs are taken in the fewest equal pieces of at most 2,048, each uncorrelated within itself.
    """
    width = rows.shape[-1]
    pieces = next(count for count in range(-(-width // _WIDEST), width + 1) if width % count == 0)
    parts = rows.unflatten(-1, (pieces, -1)).transpose(1, 2)  # [G, pieces, T, p]
    std = parts.std(2)
    std = torch.where(std > 1e-6, std, torch.ones_like(std))
    normal = (parts - parts.mean(2, keepdim=True)) / std[:, :, None]
    values, vectors = torch.linalg.eigh(normal.transpose(2, 3) @ normal / normal.shape[2])
    return (vectors * (values.clamp_min(0) + _DAMPING).rsqrt()[:, :, None]) @ vectors.transpose(2, 3) / std[..., None]
