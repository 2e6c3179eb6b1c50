"""Which features the maps of a fit read beside source heads: chosen from a few calibration windows, kind after kind."""

from __future__ import annotations

from dataclasses import replace

import torch

from . import features, ridge
from .calibration import Calibration
from .errors import CalibrationError
from .features import NativeFeatures
from .moments import WeightedMoments
from .nonlinear_features import NonlinearFeatures
from .panels import Panels
from .source_features import SourceFeatures, inputs_of
from .states import LayerStates

_LEAST, _MOST = 16_384, 65_536  # tokens that choose features, and score single source heads; a quarter of the texts in between
_ROLES = ("keys", "values")


def choose_panels(
    calibration: Calibration,
    *,
    native_features: int | None = None,
    source_features: int | None = None,
    nonlinear_features: int | None = None,
    other_role: bool = False,
) -> Panels:
    """Choose all that lies behind the source's layers; each number is a width, and None leaves a kind out.

    Args:
        native_features: None for all of them, where the calibration has native layers.

    Returns:
        Panels on the CPU.

    Raises:
        CalibrationError: a width is none that there can be.
    """
    panels = Panels(calibration.source.geometry, other_role=other_role)
    if calibration.native_layers:
        panels = replace(panels, native=choose_features(calibration, native_features))
    if source_features is not None:
        panels = replace(panels, source=choose_source_features(calibration, source_features))
    if nonlinear_features is not None:
        panels = replace(panels, nonlinear=choose_nonlinear_features(calibration, panels, nonlinear_features))
    return panels


def choose_features(calibration: Calibration, width: int | None) -> NativeFeatures:
    """Choose the directions of the hidden state in the target's last native layer that say most of the layers to be mapped.

    Args:
        width: how many; None for all, as many as the hidden state has.
    """
    moments: WeightedMoments | None = None
    for states, split in calibration.states("native features", screening_tokens(calibration)):
        if split != "fit" or states.hidden is None:
            continue
        x, y = states.hidden.flatten(0, 1)[None].float(), _outputs(calibration, states.target)
        moments = moments or WeightedMoments.empty_like(x, y)
        moments.update(x, y)
    if moments is None:
        raise RuntimeError("No hidden states: the calibration has no native layers.")
    return NativeFeatures(calibration.native_layers, *features.project(moments, width or moments.sum_x.shape[1])).to("cpu")


def choose_source_features(calibration: Calibration, width: int) -> SourceFeatures:
    """Choose the directions of all stripped keys and values of the source that say most of the layers to be mapped.

    The inputs are many beside the rows: the ridge is the one that does best on the validation split.
    """
    moments: dict[str, WeightedMoments] = {}
    for states, split in calibration.states("source features", screening_tokens(calibration)):
        x, y = inputs_of(states.source).flatten(0, 1)[None], _outputs(calibration, states.target)
        moments.setdefault(split, WeightedMoments.empty_like(x, y)).update(x, y)
    alpha = _best_alpha(moments["fit"], moments.pop("validation"), calibration.target.geometry.layers[0].head_dim)
    named = {"what": "source_features", "of": "the width of all keys and values of the source"}
    return SourceFeatures(*features.project(moments["fit"], width, alpha, **named)).to("cpu")


def choose_nonlinear_features(calibration: Calibration, panels: Panels, width: int) -> NonlinearFeatures:
    """Draw hidden units over the features of some panels, and measure their mean and spread."""
    drawn = NonlinearFeatures.drawn(panels.width, width)
    count, total, squares = 0, torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for states, split in calibration.states("nonlinear features", screening_tokens(calibration)):
        if split == "fit":
            units = drawn.of(panels.features(states.source, states.hidden)).flatten(0, 1).double()
            count, total = count + len(units), total + units.sum(0).cpu()
            squares += units.square().sum(0).cpu()
    mean = total / count
    return drawn.standardised(mean, squares / count - mean.square())


def screening_tokens(calibration: Calibration) -> int:
    """How many tokens are enough to choose by."""
    return min(_MOST, max(_LEAST, calibration.tokens // 4))


def _outputs(calibration: Calibration, target: LayerStates) -> torch.Tensor:
    """Stripped keys and values of all layers to be mapped, `[1, rows, m]` float32."""
    outputs = []
    for role in _ROLES:
        states = target.of_role(role)
        layers = range(calibration.native_layers, len(states.layers))
        outputs += [states.stripped(i).float().transpose(1, 2).flatten(2).flatten(0, 1) for i in layers]
    return torch.cat(outputs, dim=1)[None]


def _best_alpha(fit: WeightedMoments, validation: WeightedMoments, head_dim: int) -> float:
    best = (-float("inf"), ridge.ALPHAS[-1])
    for alpha in ridge.ALPHAS:
        try:
            best = max(best, (ridge.r2(ridge.solve(fit, alpha), validation, head_dim).mean().item(), alpha))
        except CalibrationError:
            continue  # not positive definite at so small an alpha; a larger one follows
    return best[1]
