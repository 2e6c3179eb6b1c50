"""Where translated states must not be used: the target reads the context itself, once, and says so."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import cache_argument, decoder_of
from .errors import HandOffError, HandOffWarning
from .hand_off_report import HandOffReport
from .placement import device_of
from .prompt import Prompt
from .translation import PendingTranslation


@torch.no_grad()
def read_instead(
    cache: Any, model: PreTrainedModel | None, prompt: Prompt, hand_off: PendingTranslation, report: HandOffReport, reason: str
) -> None:
    """Let a target read what its cache waits for.

    Args:
        cache: a `TranslatedCache` whose layers wait for `hand_off`; they are left with what they had before, and the target appends.
        reason: what was found of the translated states; the warning and the report name it.

    Raises:
        HandOffError: there is no model, or the prompt's ids are not known.
    """
    if model is None:
        raise HandOffError(f"{reason} The target cannot read the context itself without target_model= and input_ids=.")
    warnings.warn(f"The target prefills the context itself. {reason}", HandOffWarning, stacklevel=3)
    for layer in cache.layers:
        layer.abandon()
    device = device_of(model)
    inputs = prompt.inputs(hand_off.start, hand_off.context, device)
    with report.native_work.on(device):
        decoder_of(model)(**inputs, use_cache=True, **cache_argument(cache))
    report.fall_back(hand_off, reason)
