"""Where the layers of a target model work: models that are split over devices have their caches split likewise."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import decoder_of


def layer_devices(model: PreTrainedModel, layers: int) -> tuple[torch.device, ...] | None:
    """Tell on which device each decoder layer works, or None for a model that lies on one.

    A layer that is offloaded to the CPU or to disk works on the device that accelerate brings it to.
    """
    if getattr(model, "hf_device_map", None) is None:
        return None
    blocks: Any = getattr(decoder_of(model), "layers", None)
    if blocks is None or len(blocks) != layers:
        return None
    return tuple(_device_of(block, model.device) for block in blocks)


def _device_of(block: torch.nn.Module, otherwise: torch.device) -> torch.device:
    for module in block.modules():
        execution_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if execution_device is not None:
            return _device(execution_device)
    found = next((parameter.device for parameter in block.parameters() if parameter.device.type != "meta"), None)
    return otherwise if found is None else found


def _device(place: Any) -> torch.device:
    """accelerate names accelerators by their bare index."""
    if isinstance(place, int):
        return torch.device(f"{torch.accelerator.current_accelerator() or 'cuda'}:{place}")
    return torch.device(place)
