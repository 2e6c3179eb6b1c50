"""The closed form of a mixture: a router from clusters of calibration tokens, and for each expert a regression on its own rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch

from .calibration import Calibration
from .clusters import k_means, nearest_as_affine
from .errors import CalibrationError
from .fitter import Split, TranslatorFitter
from .maps import FittedMaps
from .mixture import Mixture, Router, layers_of, router_input
from .panels import Panels
from .states import PairedStates
from .translator import CacheTranslator

MOST_EXPERTS = 4
_ROUTER_ROWS = 32_768  # tokens in whose clusters the router is found
_ROWS_AN_INPUT = 2  # of the fit split that an expert needs to be fitted by itself
_LEAST_HELD_OUT = 64  # rows that choose its ridge
_ROLES = ("keys", "values")


def fit_router(calibration: Calibration, experts: int, panels: Panels) -> Router:
    """Find clusters of the tokens, by features where the maps read such, else by keys and values of the middle source layer.

    Every dimension counts alike, in units of its spread.

    Raises:
        CalibrationError: another number of experts than 1 to 4, or fewer tokens than clusters.
    """
    if not 2 <= experts <= MOST_EXPERTS:
        raise CalibrationError(f"experts = {experts}: 1 to {MOST_EXPERTS} expected.")
    layers, roles, rows = (len(calibration.source.geometry) // 2,), _ROLES, []
    if panels.width:  # the same behind keys and values, and turned by nothing
        layers, roles = tuple(panels.feature_layers), ("values",)
    for states, split in calibration.states("router", _ROUTER_ROWS, panels):
        if split == "fit":
            rows.append(router_input(layers_of(states.source, layers), roles).flatten(0, 1))
    x = torch.cat(rows)
    if len(x) < experts:
        raise CalibrationError(f"experts = {experts} of {len(x)} tokens: give more text, or fewer experts.")
    mean, std = x.mean(0), x.std(0)
    std = torch.where(std > 1e-6, std, torch.ones_like(std))
    weight, bias = nearest_as_affine(k_means((x - mean) / std, experts), mean, std)
    return Router(layers, roles, weight.cpu(), bias.cpu())


class ExpertFitters:
    """For each expert a fitter of the inputs that were chosen for all rows, which sees the rows of that expert alone.

    Args:
        router: says whose a row is.
        fitter: has chosen the inputs; shared: what it found for all rows, which serves an expert of too few rows of its own.
    """

    def __init__(self, router: Router, fitter: TranslatorFitter, shared: FittedMaps) -> None:
        self.router, self.shared = router, shared
        self.fitters = [copy.deepcopy(fitter) for _ in range(router.experts)]
        self.rows = {split: torch.zeros(router.experts, dtype=torch.int64) for split in ("fit", "validation")}

    def update(self, states: PairedStates, split: Split) -> ExpertFitters:
        """Add rows to the moments of their experts."""
        experts = self.router.route(self.router.of(states.source))
        self.rows[split] += torch.bincount(experts.flatten(), minlength=len(self.fitters)).cpu()
        for expert, fitter in enumerate(self.fitters):
            member = (experts == expert).float()
            weight = member if states.sample_weight is None else member * states.sample_weight
            fitter.update(replace(states, sample_weight=weight), split)
        return self

    def fit(self) -> list[FittedMaps]:
        """Solve for each expert, with an alpha of its own; those of too few rows share the maps of all rows."""
        return [fitter.fit() if self._enough(expert) else self.shared for expert, fitter in enumerate(self.fitters)]

    def _enough(self, expert: int) -> bool:
        inputs = max(layer_map.weight.shape[1] for layer_map in (*self.shared.keys, *self.shared.values))
        return bool(self.rows["fit"][expert] >= _ROWS_AN_INPUT * inputs and self.rows["validation"][expert] >= _LEAST_HELD_OUT)


def as_mixture(
    translator: CacheTranslator, router: Router, passes: Sequence[Sequence[FittedMaps]], r2: dict[str, torch.Tensor]
) -> CacheTranslator:
    """Give a translator the experts of a mixture in place of its maps.

    Args:
        passes: for each pass over the target layers, what was found for each expert.
        r2: of the mixture, by role, `[mapped layers, heads]`.
    """
    native = translator.native_layers
    keys, values = (
        [(*[None] * native, *[m for maps in passes for m in getattr(maps[expert], role)]) for expert in range(router.experts)]
        for role in _ROLES
    )
    own = {role: translator.r2[role][:native] for role in _ROLES}
    mixed = {
        "experts": router.experts,
        "alpha": [[maps.alpha for maps in each] for each in passes],
        "r2": {role: r2[role].mean().item() for role in _ROLES},
    }
    return replace(
        translator.with_summary(mixed),
        keys=keys[0],
        values=values[0],
        mixture=Mixture(router, tuple(keys[1:]), tuple(values[1:])),
        r2={role: torch.cat([own[role], r2[role]]) for role in _ROLES},
    )


def mixture_r2(experts: Sequence[FittedMaps], shared: FittedMaps, role: str) -> torch.Tensor:
    """Held-out share of variance that the experts explain together, each on its own rows, `[layers, heads]`.

    Rows of experts that share the maps of all rows count with what those explain of all rows.
    """
    own = [maps for maps in experts if maps is not shared]
    missed = sum((1 - maps.r2[role]) * maps.held_out[role] for maps in own)
    if len(own) < len(experts):
        rest = shared.held_out[role] - sum(maps.held_out[role] for maps in own)
        missed = missed + (1 - shared.r2[role]) * rest
    return (1 - missed / shared.held_out[role]).float()
