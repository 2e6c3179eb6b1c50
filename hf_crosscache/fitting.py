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
from .maps import LayerMap
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
    mapped = range(native, len(target))
    settings: dict[str, Any] = {"support": support, "k": k, "candidates": candidates, "features": panels.width, "other_role": other_role}
    plan = TranslatorFitter(source, target, target_layers=mapped, **settings)
    if layers_per_pass is None:
        layers_per_pass = _layers_that_fit(plan, device_of(calibration.target_model))
    passes = [mapped[start : start + layers_per_pass] for start in range(0, len(mapped), layers_per_pass)]
    fitted = []
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
    values = [layer_map for maps in fitted for layer_map in maps.values]
    if match_variance:
        values = [
            _at_full_variance(layer_map, r2) for layer_map, r2 in zip(values, torch.cat([m.r2["values"] for m in fitted]), strict=True)
        ]
    own = torch.ones(native, target.layers[0].num_key_value_heads)
    return CacheTranslator(
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


def _at_full_variance(layer_map: LayerMap, r2: torch.Tensor) -> LayerMap:
    """Undo what a regression shrinks, head by head; r2 `[H]` of a head that is hardly explained counts as 0.05."""
    return replace(layer_map, weight=layer_map.weight * r2.clamp(_LEAST_R2, 1).rsqrt()[:, None, None])


def _layers_that_fit(plan: TranslatorFitter, device: torch.device) -> int:
    """Target layers whose statistics fill at most half of the free memory; the solver works beside them."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 << 30
    needed, layers = max(plan.moments_bytes().values()), len(plan.target_layers)
    if needed <= free // 2:
        return layers
    return max(1, layers * (free // 2) // needed)
