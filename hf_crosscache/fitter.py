"""From paired states to a frozen translator: match heads on held-out score, then solve one ridge regression a target head."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch

from . import ops, ridge
from .errors import CalibrationError, GeometryError
from .geometry import CacheGeometry
from .maps import FittedMaps, LayerMap
from .moments import WeightedMoments
from .panels import blocks_of
from .states import PairedStates, RoleStates

Support = Literal["head", "full"]
Split = Literal["fit", "validation"]
_SCREENING_ALPHA = 1e-4
_CHUNK_ELEMENTS = 1 << 28  # elements of the Gram matrices that are solved at once: 2 GiB


class TranslatorFitter:
    """Collects statistics of paired states and solves for the maps of some target layers.

    With support "head" every target head reads its k best source heads, from any layers; with "full" every target head of a layer reads
    all heads of its k best source layers. Keys are mapped from keys, values from values. Unless k takes in everything, the statistics
    are gathered in two rounds: `screen` scores every source block alone on held-out rows and keeps the best `candidates` of each target,
    `update` gathers their joint moments, and `fit` selects k of them by forward selection and solves.

    Attention weights of the states count in `update`: head by head with support "head"; as the mean over what one regression serves with
    "full" (a layer's heads) and where k takes in everything (all layers' heads). Held-out R2 is weighted too. `screen`, one regression
    for all targets, leaves them out.

    Memory is that of the moments (`moments_bytes`), whatever the number of rows.

    Args:
        source, target: geometries of the two models; heads of one model must have one size.
        support: "head" or "full".
        k: source heads ("head") or source layers ("full") that a target reads.
        candidates: how many blocks `screen` keeps for the forward selection; k keeps the k best single blocks and selects nothing.
        target_layers: the target layers to fit, None for all; a large pair is fitted in passes over them.
        features: how many features every target head reads beside its k; they lie in further layers of the source states.
        other_role: whether keys may also be mapped from values, and values from keys, which lie in further layers behind those.
    """

    def __init__(
        self,
        source: CacheGeometry,
        target: CacheGeometry,
        *,
        support: Support = "head",
        k: int = 8,
        candidates: int | None = None,
        target_layers: Iterable[int] | None = None,
        features: int = 0,
        other_role: bool = False,
    ) -> None:
        if support not in ("head", "full"):
            raise GeometryError(f"support is 'head' or 'full', not {support!r}.")
        _one_head_size(source, "source")
        _one_head_size(target, "target")
        self.source, self.target, self.support = source, target, support
        self.target_layers = tuple(range(len(target)) if target_layers is None else target_layers)
        self.features, self.other_role = features, other_role
        available = len(blocks_of(source, support, features, other_role)[0])
        if not 1 <= k <= available:
            unit = "heads" if support == "head" else "layers"
            raise GeometryError(f"k = {k} source {unit} asked for; the source has {available}.")
        self.k = k
        wanted = (3 * k) // 2 if candidates is None else candidates
        self.candidates = available if k == available else min(max(wanted, k), available)
        self._roles = {role: _RoleFitter(self) for role in ("keys", "values")}

    @property
    def needs_screening(self) -> bool:
        """True while `screen` has to be called before `update`."""
        return any(role.candidates is None for role in self._roles.values())

    def screen(self, states: PairedStates, split: Split) -> TranslatorFitter:
        """Add rows to the statistics that score every source block alone against every target."""
        for name, role in self._roles.items():
            role.screen(states.source.of_role(name), states.target.of_role(name), states.row_weights(), split)
        return self

    def choose_candidates(self) -> TranslatorFitter:
        """End the screening: keep the best candidates of each target, drop the screening statistics."""
        for role in self._roles.values():
            role.choose_candidates()
        return self

    def update(self, states: PairedStates, split: Split) -> TranslatorFitter:
        """Add rows to the moments: of whole documents, either all "fit" or all "validation"."""
        if self.needs_screening:
            raise CalibrationError("Call screen(...) and choose_candidates() before update(...): not all source blocks are read.")
        for name, role in self._roles.items():
            role.update(states.source.of_role(name), states.target.of_role(name), role.weights(states, name), split)
        return self

    def merge(self, other: TranslatorFitter) -> TranslatorFitter:
        """Add the moments of another fitter with the same candidates, as from another process; exact."""
        for name, role in self._roles.items():
            role.merge(other._roles[name])
        return self

    def fit(self) -> FittedMaps:
        """Choose the inputs and alpha on the validation moments, and solve on the fit moments.

        The moments are let go then, the choice of inputs stays: with further rows, `fit` solves for the same inputs.

        Raises:
            CalibrationError: a split has no rows, or too few for the number of inputs.
        """
        solved = {name: role.fit() for name, role in self._roles.items()}
        return FittedMaps(
            keys=solved["keys"].maps,
            values=solved["values"].maps,
            r2={name: role.r2 for name, role in solved.items()},
            reach={name: role.reach for name, role in solved.items()},
            held_out={name: role.held_out for name, role in solved.items()},
            alpha={name: role.alpha for name, role in solved.items()},
        )

    def moments_bytes(self) -> dict[str, int]:
        """Peak bytes of the statistics by round, from the geometry alone: {"screening": ..., "moments": ...}."""
        source_heads, source_dim = self.source.layers[0].num_key_value_heads, self.source.layers[0].head_dim
        target_heads, target_dim = self.target.layers[0].num_key_value_heads, self.target.layers[0].head_dim
        outputs = len(self.target_layers) * target_heads * target_dim
        width = source_dim if self.support == "head" else source_heads * source_dim
        units = len(self.source) * (source_heads if self.support == "head" else 1) * (1 + self.other_role)
        screening = 0 if self.candidates == units else units * width * (width + outputs)
        inputs = self.candidates * width + -(-self.features // width) * width
        if self.k == units:
            moments = inputs * (inputs + outputs)
        else:
            groups = len(self.target_layers) * (target_heads if self.support == "head" else 1)
            moments = groups * inputs * (inputs + outputs // groups)
        each = 8 * 2 * 2  # float64; fit and validation; keys and values
        return {"screening": each * screening, "moments": each * moments}


@dataclass(frozen=True)
class _SolvedRole:
    maps: tuple[LayerMap, ...]
    r2: torch.Tensor
    reach: torch.Tensor
    held_out: torch.Tensor
    alpha: float


@dataclass
class _RoleFitter:
    """The statistics of one role, keys or values: U source blocks of one width against G groups of target heads."""

    plan: TranslatorFitter
    candidates: torch.Tensor | None = None  # [G, c] block indices
    _screening: dict[str, WeightedMoments] = field(default_factory=dict)
    _moments: dict[str, WeightedMoments] = field(default_factory=dict)
    _shifts: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _tables: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        selectable, given = blocks_of(plan.source, plan.support, plan.features, plan.other_role)
        self.blocks, self.own, self.given = selectable + given, len(selectable), len(given)
        self.block_width = len(self.blocks[0]) * plan.source.layers[0].head_dim
        self.everything = plan.k == self.own
        if self.everything:  # every target reads every block: one regression with all the outputs side by side
            self.candidates = torch.arange(len(self.blocks))[None]
        elif plan.candidates == self.own:
            self.candidates = torch.arange(len(self.blocks)).expand(self._target_heads(together=False).shape[0], -1)

    def screen(self, source: RoleStates, target: RoleStates, sample_weight: torch.Tensor | None, split: Split) -> None:
        each_block = torch.arange(self.own)[:, None]
        self._accumulate(self._screening, each_block, self._target_heads(together=True), source, target, sample_weight, split)

    def choose_candidates(self) -> None:
        if self.candidates is not None:
            return
        fit, validation = _both(self._screening)
        solution = ridge.solve(fit, _SCREENING_ALPHA)
        scores = ridge.r2(solution, validation, self._group_width())  # [U, G]
        best = scores.topk(self.plan.candidates, dim=0).indices.T.sort(1).values
        always = torch.arange(self.own, self.own + self.given, device=best.device)
        self.candidates = torch.cat([best, always.expand(len(best), -1)], dim=1)
        self._screening.clear()

    def weights(self, states: PairedStates, name: str) -> torch.Tensor | None:
        """The weight of each row in each regression, `[1 or G, B * T]`, None for ones."""
        weights = states.weights(name, self.plan.target_layers)
        if weights is None:
            return None
        if self.everything:
            return weights.mean((0, 1))[None]
        return weights.flatten(0, 1) if self.plan.support == "head" else weights.mean(1)

    def update(self, source: RoleStates, target: RoleStates, sample_weight: torch.Tensor | None, split: Split) -> None:
        if self.candidates is None:
            raise CalibrationError("No candidates chosen yet.")
        outputs = self._target_heads(together=self.everything)
        self._accumulate(self._moments, self.candidates.cpu(), outputs, source, target, sample_weight, split)

    def _accumulate(
        self,
        into: dict[str, WeightedMoments],
        inputs: torch.Tensor,
        outputs: torch.Tensor,
        source: RoleStates,
        target: RoleStates,
        sample_weight: torch.Tensor | None,
        split: Split,
    ) -> None:
        """Add rows, of weights `[1 or G, B * T]`, to the moments of some target heads `[G or 1, e, 2]` on some source blocks `[G, c]`."""
        device = source.layers[0].device
        target = target.select(self.plan.target_layers)
        heads = torch.tensor(self.blocks, dtype=torch.int32)[inputs].flatten(1, 2)  # [G, c, 2]
        if split not in self._shifts:
            self._shifts[split] = source.mean(), target.mean()
        source_shift, target_shift = self._shifts[split]
        if split not in into:
            shift_x, shift_y = (
                shift[blocks[..., 0].long(), blocks[..., 1].long()] for shift, blocks in ((source_shift, heads), (target_shift, outputs))
            )
            weights = 1 if sample_weight is None else len(sample_weight)
            into[split] = WeightedMoments.about(shift_x.flatten(1), shift_y.flatten(1), weights)
        ops.accumulate_moments(
            source.layers,
            target.layers,
            heads.to(device),
            outputs.to(device),
            source_shift,
            target_shift,
            sample_weight,
            *source.tables(self._tables),
            *target.tables(self._tables),
            into[split].sums,
        )
        into[split].check_finite()

    def _target_heads(self, together: bool) -> torch.Tensor:
        """The outputs of the regressions: (layer, head) `[G, e, 2]` of each, or `[1, e, 2]` of all together."""
        layers, heads = len(self.plan.target_layers), self.plan.target.layers[0].num_key_value_heads
        pairs = torch.cartesian_prod(torch.arange(layers), torch.arange(heads)).int()
        if together:
            return pairs[None]
        return pairs[:, None] if self.plan.support == "head" else pairs.view(layers, heads, 2)

    def merge(self, other: _RoleFitter) -> None:
        mine, theirs = self.candidates, other.candidates
        if mine is None or theirs is None or not torch.equal(mine.cpu(), theirs.cpu()):
            raise CalibrationError("Fitters with different candidate heads cannot be merged: screen once, then share the choice.")
        for split, moments in other._moments.items():
            if split in self._moments:
                self._moments[split].merge(moments)
            else:
                self._moments[split], self._shifts[split] = copy.deepcopy(moments), other._shifts[split]

    def fit(self) -> _SolvedRole:
        fit, validation = _both(self._moments)
        if self.candidates is None:
            raise CalibrationError("The fitter was given no states: call update(...) first.")
        pairs, chosen = [], []
        at_once = max(1, _CHUNK_ELEMENTS // fit.sum_xx.shape[1] ** 2)
        for start in range(0, len(fit.sum_x), at_once):
            some = slice(start, start + at_once)
            fit_chunk, validation_chunk = fit.groups(some), validation.groups(some)
            candidates = self.candidates[some].to(fit.sum_x.device)
            if self.plan.k + self.given < candidates.shape[1]:
                kept = ridge.greedy_select(fit_chunk, validation_chunk, self.block_width, self.plan.k, _SCREENING_ALPHA, self.given)
                within = torch.arange(self.block_width, device=kept.device)
                columns = (kept[:, :, None] * self.block_width + within).flatten(1)
                fit_chunk, validation_chunk = fit_chunk.select_inputs(columns), validation_chunk.select_inputs(columns)
                candidates = candidates.gather(1, kept)
            pairs.append((fit_chunk, validation_chunk))
            chosen.append(candidates.cpu())
        self._moments.clear()
        self.candidates = torch.cat(chosen)
        alpha = self._select_alpha(pairs)
        solutions = [ridge.solve(fit_chunk, alpha) for fit_chunk, _ in pairs]
        mean_square = fit.mean_y.square() + fit.variance_y
        head_dim = self.plan.target.layers[0].head_dim
        scores = [ridge.r2(s, v, head_dim) for s, (_, v) in zip(solutions, pairs, strict=True)]
        heads = self.plan.target.layers[0].num_key_value_heads
        spread = (validation.variance_y * validation.total[:, None]).reshape(-1, heads, head_dim).sum(-1)
        return _SolvedRole(
            maps=self._layer_maps(solutions, self.candidates),
            r2=torch.cat([s.flatten() for s in scores]).view(-1, heads).float().cpu(),
            reach=mean_square.reshape(len(self.plan.target_layers), -1).amax(1).sqrt().float().cpu(),
            held_out=spread.cpu(),
            alpha=alpha,
        )

    def _select_alpha(self, pairs: list[tuple[WeightedMoments, WeightedMoments]]) -> float:
        head_dim = self.plan.target.layers[0].head_dim
        best = (-float("inf"), 0.0)
        for alpha in ridge.ALPHAS:
            try:
                scores = torch.cat([ridge.r2(ridge.solve(f, alpha), v, head_dim).flatten() for f, v in pairs])
            except CalibrationError:
                continue  # not positive definite at so small an alpha; a larger one follows
            best = max(best, (scores.mean().item(), alpha))
        if best[1] == 0.0:
            raise CalibrationError(f"No alpha up to {ridge.ALPHAS[-1]:g} gives a solvable ridge regression: use more calibration text.")
        return best[1]

    def _layer_maps(self, solutions: list[ridge.RidgeSolution], chosen: torch.Tensor) -> tuple[LayerMap, ...]:
        """Lay the solved regressions out by target layer: weight `[H, n, D]`, means `[H or 1, n]` and `[H, D]`."""
        heads, head_dim = self.plan.target.layers[0].num_key_value_heads, self.plan.target.layers[0].head_dim
        num_layers = len(self.plan.target_layers)
        weight = torch.cat([s.weight.float().cpu() for s in solutions])  # [G, n, m]
        mean_x = torch.cat([s.mean_x.float().cpu() for s in solutions])
        mean_y = torch.cat([s.mean_y.float().cpu() for s in solutions]).reshape(num_layers, heads, head_dim)
        width = weight.shape[1]
        by_head = weight.unflatten(-1, (-1, head_dim)).transpose(1, 2).reshape(num_layers, heads, width, head_dim)
        named = [tuple(head for block in row for head in self.blocks[block]) for row in chosen.tolist()]
        per_layer = heads if self.plan.support == "head" and not self.everything else 1
        maps = []
        for i in range(num_layers):
            rows = slice(i * per_layer, (i + 1) * per_layer) if not self.everything else slice(0, 1)
            maps.append(LayerMap(tuple(named[rows]), by_head[i].contiguous(), mean_x[rows], mean_y[i]))
        return tuple(maps)

    def _group_width(self) -> int:
        layer = self.plan.target.layers[0]
        return layer.head_dim if self.plan.support == "head" else layer.head_dim * layer.num_key_value_heads


def _both(by_split: dict) -> tuple:
    missing = [split for split in ("fit", "validation") if split not in by_split]
    if missing:
        raise CalibrationError(f"The {' and '.join(missing)} split has no rows: give more documents, so that whole ones can be held out.")
    return by_split["fit"], by_split["validation"]


def _one_head_size(geometry: CacheGeometry, side: str) -> None:
    shapes = {(layer.num_key_value_heads, layer.head_dim) for layer in geometry.layers}
    if len(shapes) > 1:
        raise GeometryError(f"The {side} has layers of several shapes (heads, head_dim) {sorted(shapes)}; one is supported.")
