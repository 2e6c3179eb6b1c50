"""The closed form, from calibration texts to a translator: screen source heads, gather moments, solve."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from .calibration import Calibration
from .feature_choice import choose_panels, screening_tokens
from .fitter import Support, TranslatorFitter
from .key_norm import inverse_key_norms
from .maps import FittedMaps, LayerMap
from .mixture_fitting import ExpertFitters, as_mixture, fit_router, mixture_r2
from .placement import device_of
from .translator import CacheTranslator

_ROLES = ("keys", "values")
_LEAST_R2 = 0.05


def fit_translator(
    calibration: Calibration,
    *,
    support: Support = "head",
    k: int = 8,
    candidates: int | None = None,
    native_features: int | None = None,
    source_features: int | None = None,
    nonlinear_features: int | None = None,
    other_role: bool = False,
    match_variance: bool = False,
    attention_weights: bool = False,
    experts: int = 1,
    layers_per_pass: int | None = None,
) -> CacheTranslator:
    """Fit a translator from calibration texts.

    The models read the texts once to screen source heads (a few windows), once for the joint moments, and a few windows once more to
    choose each kind of features. A pair whose moments do not fit in memory is fitted in passes over its target layers, at the cost of
    another reading a pass.

    Args:
        calibration: the texts; its native_layers say how many of its first layers the target will run itself.
        support: "head": each target head reads its k best source heads; "full": all heads of the k best source layers.
        k: how many source heads, or layers.
        candidates: blocks kept by the screening for forward selection, None for 1.5 k; k selects nothing.
        native_features: with native layers, how many directions of the hidden state every map reads; None for all of them.
        source_features: how many directions of all keys and values of the source, taken together, every map reads; None for none.
        nonlinear_features: how many hidden units over these native and source features every map reads; None for none.
        other_role: whether target heads may also read, among their k, source values for keys and source keys for values.
        match_variance: scale the maps of values so that what a head writes varies as much as the target's own values, which a regression
            shrinks by the square root of its R2. For a translator that is not going to be refined.
        attention_weights: whether rows count by the attention that they receive from the target's later queries (`received` in
            attention_weights.py), head by head, keys and values apart; held-out R2 is weighted likewise.
        experts: how many sets of maps, up to 4, of which a router chooses one for each token, by the cluster it lies in: a mixture, whose
            serving takes no more products than one set. Its experts read the same heads; one of too few rows shares the maps of all rows.
            That takes another reading of the texts.
        layers_per_pass: target layers fitted in one pass, None for as many as the free memory of the target's device holds.

    Returns:
        A translator on the CPU, with held-out R2 and a summary of the fit.
    """
    started = time.perf_counter()
    source, target, native = calibration.source.geometry, calibration.target.geometry, calibration.native_layers
    panels = choose_panels(
        calibration,
        native_features=native_features,
        source_features=source_features,
        nonlinear_features=nonlinear_features,
        other_role=other_role,
    )
    router = fit_router(calibration, experts, panels) if experts != 1 else None
    mapped = range(native, len(target))
    settings: dict[str, Any] = {"support": support, "k": k, "candidates": candidates, "features": panels.width, "other_role": other_role}
    plan = TranslatorFitter(source, target, target_layers=mapped, **settings)
    if layers_per_pass is None:
        layers_per_pass = _layers_that_fit(plan, device_of(calibration.target_model), experts)
    passes = [mapped[start : start + layers_per_pass] for start in range(0, len(mapped), layers_per_pass)]
    fitted, of_experts = [], []
    for number, layers in enumerate(passes, 1):
        of = f" ({number}/{len(passes)})" if len(passes) > 1 else ""
        fitter = TranslatorFitter(source, target, target_layers=layers, **settings)
        if fitter.needs_screening:
            for states, split in calibration.states(f"screen{of}", screening_tokens(calibration), panels):
                fitter.screen(states, split)
            fitter.choose_candidates()
        for states, split in calibration.states(f"fit{of}", panels=panels, attention_weights=attention_weights):
            fitter.update(states, split)
        fitted.append(fitter.fit())
        if router is not None:
            fitters = ExpertFitters(router, fitter, fitted[-1])
            for states, split in calibration.states(f"experts{of}", panels=panels, attention_weights=attention_weights):
                fitters.update(states, split)
            of_experts.append(fitters.fit())
    values = [layer_map for maps in fitted for layer_map in maps.values]
    if match_variance:
        values = [
            _at_full_variance(layer_map, r2) for layer_map, r2 in zip(values, torch.cat([m.r2["values"] for m in fitted]), strict=True)
        ]
    own = torch.ones(native, target.layers[0].num_key_value_heads)
    translator = CacheTranslator(
        source=calibration.source,
        target=calibration.target,
        keys=(*[None] * native, *[layer_map for maps in fitted for layer_map in maps.keys]),
        values=(*[None] * native, *values),
        sink_tokens=calibration.sink_tokens,
        opening=calibration.opening(),
        r2={role: torch.cat([own, *[maps.r2[role] for maps in fitted]]) for role in _ROLES},
        reach={role: torch.cat([torch.zeros(native), *[maps.reach[role] for maps in fitted]]) for role in _ROLES},
        features=panels.native,
        source_features=panels.source,
        nonlinear_features=panels.nonlinear,
        other_role=other_role,
        key_norm=inverse_key_norms(calibration.target_model, target),
        summary={
            "support": support,
            "k": k,
            "candidates": plan.candidates,
            "native_layers": native,
            "native_features": 0 if panels.native is None else panels.native.width,
            "source_features": source_features or 0,
            "nonlinear_features": nonlinear_features or 0,
            "other_role": other_role,
            "match_variance": match_variance,
            "attention_weights": attention_weights,
            "alpha": [maps.alpha for maps in fitted],
            "tokens": calibration.tokens,
            "window": calibration.window,
            "windows": {split: len(windows) for split, windows in calibration.windows.items()},
            "documents": calibration.documents,
            "r2": {role: torch.cat([maps.r2[role] for maps in fitted]).mean().item() for role in _ROLES},
            "fit_seconds": round(time.perf_counter() - started, 1),
            "device": torch.cuda.get_device_name() if calibration.target_model.device.type == "cuda" else "cpu",
        },
    )
    if router is None:
        return translator
    r2 = {role: torch.cat([mixture_r2(maps, shared, role) for maps, shared in zip(of_experts, fitted, strict=True)]) for role in _ROLES}
    if match_variance:
        of_experts = [[_matched(maps) for maps in each] for each in of_experts]
    return as_mixture(translator, router, of_experts, r2)


def _at_full_variance(layer_map: LayerMap, r2: torch.Tensor) -> LayerMap:
    """Undo what a regression shrinks, head by head; r2 `[H]` of a head that is hardly explained counts as 0.05."""
    return replace(layer_map, weight=layer_map.weight * r2.clamp(_LEAST_R2, 1).rsqrt()[:, None, None])


def _matched(maps: FittedMaps) -> FittedMaps:
    return replace(maps, values=tuple(map(_at_full_variance, maps.values, maps.r2["values"])))


def _layers_that_fit(plan: TranslatorFitter, device: torch.device, experts: int) -> int:
    """Target layers whose statistics fill at most half of the free memory; the solver works beside them."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 << 30
    needed, layers = experts * max(plan.moments_bytes().values()), len(plan.target_layers)
    if needed <= free // 2:
        return layers
    return max(1, layers * (free // 2) // needed)
