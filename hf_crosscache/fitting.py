"""The closed form, from calibration texts to a translator: screen source heads, gather moments, solve."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from . import features
from .calibration import Calibration
from .features import NativeFeatures
from .fitter import Support, TranslatorFitter
from .key_norm import inverse_key_norms
from .maps import FittedMaps, LayerMap
from .mixture_fitting import ExpertFitters, as_mixture, fit_router, mixture_r2
from .moments import WeightedMoments
from .placement import device_of
from .translator import CacheTranslator

_LEAST_SCREENING, _MOST_SCREENING = 16_384, 65_536  # tokens that score single source heads; a quarter of the texts in between
_ROLES = ("keys", "values")
_LEAST_R2 = 0.05


def fit_translator(
    calibration: Calibration,
    *,
    support: Support = "head",
    k: int = 8,
    candidates: int | None = None,
    native_features: int | None = None,
    match_variance: bool = False,
    attention_weights: bool = False,
    experts: int = 1,
    layers_per_pass: int | None = None,
) -> CacheTranslator:
    """Fit a translator from calibration texts.

    The models read the texts once to screen source heads (a few windows), once for the joint moments, and a few windows once more to
    choose native features. A pair whose moments do not fit in memory is fitted in passes over its target layers, at the cost of another
    reading a pass.

    Args:
        calibration: the texts; its native_layers say how many of its first layers the target will run itself.
        support: "head": each target head reads its k best source heads; "full": all heads of the k best source layers.
        k: how many source heads, or layers.
        candidates: blocks kept by the screening for forward selection, None for 1.5 k; k selects nothing.
        native_features: with native layers, how many directions of the hidden state every map reads; None for all of them.
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
    read = choose_features(calibration, native_features) if native else None
    width = 0 if read is None else read.width
    router = fit_router(calibration, experts, read) if experts != 1 else None
    mapped = range(native, len(target))
    plan = TranslatorFitter(source, target, support=support, k=k, candidates=candidates, target_layers=mapped, features=width)
    if layers_per_pass is None:
        layers_per_pass = _layers_that_fit(plan, device_of(calibration.target_model), experts)
    passes = [mapped[start : start + layers_per_pass] for start in range(0, len(mapped), layers_per_pass)]
    fitted, of_experts = [], []
    for number, layers in enumerate(passes, 1):
        of = f" ({number}/{len(passes)})" if len(passes) > 1 else ""
        fitter = TranslatorFitter(source, target, support=support, k=k, candidates=candidates, target_layers=layers, features=width)
        if fitter.needs_screening:
            for states, split in calibration.states(f"screen{of}", _enough(calibration), read):
                fitter.screen(states, split)
            fitter.choose_candidates()
        for states, split in calibration.states(f"fit{of}", features=read, attention_weights=attention_weights):
            fitter.update(states, split)
        fitted.append(fitter.fit())
        if router is not None:
            fitters = ExpertFitters(router, fitter, fitted[-1])
            for states, split in calibration.states(f"experts{of}", features=read, attention_weights=attention_weights):
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
        features=read,
        key_norm=inverse_key_norms(calibration.target_model, target),
        summary={
            "support": support,
            "k": k,
            "candidates": plan.candidates,
            "native_layers": native,
            "native_features": width,
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


def choose_features(calibration: Calibration, width: int | None) -> NativeFeatures:
    """Choose the directions of the hidden state in the target's last native layer that say most of the layers to be mapped.

    Args:
        width: how many; None for all, as many as the hidden state has.
    """
    moments: WeightedMoments | None = None
    layers = range(calibration.native_layers, len(calibration.target.geometry))
    for states, split in calibration.states("native features", _enough(calibration)):
        if split != "fit" or states.hidden is None:
            continue
        outputs = []
        for role in _ROLES:
            target = states.target.of_role(role)
            outputs += [target.stripped(i).float().transpose(1, 2).flatten(2).flatten(0, 1) for i in layers]
        x, y = states.hidden.flatten(0, 1)[None].float(), torch.cat(outputs, dim=1)[None]
        moments = moments or WeightedMoments.empty_like(x, y)
        moments.update(x, y)
    if moments is None:
        raise RuntimeError("No hidden states: the calibration has no native layers.")
    return NativeFeatures(calibration.native_layers, *features.project(moments, width or moments.sum_x.shape[1])).to("cpu")


def _at_full_variance(layer_map: LayerMap, r2: torch.Tensor) -> LayerMap:
    """Undo what a regression shrinks, head by head; r2 `[H]` of a head that is hardly explained counts as 0.05."""
    return replace(layer_map, weight=layer_map.weight * r2.clamp(_LEAST_R2, 1).rsqrt()[:, None, None])


def _matched(maps: FittedMaps) -> FittedMaps:
    return replace(maps, values=tuple(map(_at_full_variance, maps.values, maps.r2["values"])))


def _enough(calibration: Calibration) -> int:
    return min(_MOST_SCREENING, max(_LEAST_SCREENING, calibration.tokens // 4))


def _layers_that_fit(plan: TranslatorFitter, device: torch.device, experts: int) -> int:
    """Target layers whose statistics fill at most half of the free memory; the solver works beside them."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 << 30
    needed, layers = experts * max(plan.moments_bytes().values()), len(plan.target_layers)
    if needed <= free // 2:
        return layers
    return max(1, layers * (free // 2) // needed)
