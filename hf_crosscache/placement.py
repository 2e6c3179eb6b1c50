"""Where a model works and where its weights lie: accelerate may split it over devices, and offload it to the CPU or to disk."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import decoder_of
from .errors import UnsupportedModelError


def device_of(model: PreTrainedModel) -> torch.device:
    """Tell where a model expects its inputs; of an offloaded one, where accelerate brings its weights to."""
    if model.device.type != "meta":
        return model.device
    return _execution_device(model) or model.device


def layer_devices(model: PreTrainedModel, layers: int) -> tuple[torch.device, ...] | None:
    """Tell on which device each of the first decoder layers works, those of the cache, or None for a model that lies on one.

    A layer that is offloaded to the CPU or to disk works on the device that accelerate brings it to.
    """
    if getattr(model, "hf_device_map", None) is None:
        return None
    blocks: Any = getattr(decoder_of(model), "layers", None)
    if blocks is None or len(blocks) < layers:
        return None
    return tuple(_layer_device(block, model) for block in blocks[:layers])


def stored_parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's parameters by name, read from where accelerate keeps them; of tied ones, the first.

    Raises:
        UnsupportedModelError: the model has no weights.
    """
    tied: Any = getattr(model, "all_tied_weights_keys", None) or {}
    stored = {}
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            if name in tied:  # which offloading parts
                continue
            parameter = _offloaded(model, name)
        stored[name.removeprefix("_orig_mod.")] = parameter.detach()  # which torch.compile puts before
    return stored


def stored_weight(module: torch.nn.Module) -> torch.Tensor:
    """Return the weight of a module, read from where accelerate keeps it.

    Raises:
        UnsupportedModelError: it has no values.
    """
    weight: Any = module.weight
    return _offloaded(module, "weight") if weight.device.type == "meta" else weight.detach()


def _offloaded(model: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, own_name = name.rpartition(".")
    for hook in _hooks(model.get_submodule(path)):
        weights = getattr(hook, "weights_map", None)
        if weights is not None:
            return weights[own_name]
    raise UnsupportedModelError(f"{name} has no values: the model is on the meta device. Load its weights, or offload it with accelerate.")


def _layer_device(block: torch.nn.Module, model: PreTrainedModel) -> torch.device:
    execution_device = _execution_device(block)
    if execution_device is not None:
        return execution_device
    return next((parameter.device for parameter in block.parameters() if parameter.device.type != "meta"), device_of(model))


def _execution_device(module: torch.nn.Module) -> torch.device | None:
    for part in module.modules():
        for hook in _hooks(part):
            place = getattr(hook, "execution_device", None)
            if isinstance(place, int):  # accelerate names accelerators by their bare index
                return torch.device(f"{torch.accelerator.current_accelerator() or 'cuda'}:{place}")
            if place is not None:
                return torch.device(place)
    return None


def _hooks(module: torch.nn.Module) -> tuple[Any, ...]:
    hook: Any = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))
