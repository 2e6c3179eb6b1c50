"""Which implementation runs, and what every launch needs: addresses of tensors that a kernel can read."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cache

import torch

BACKEND = "HF_CROSSCACHE_BACKEND"
_OLDEST_TRITON = (3, 5)
_ALIGNMENT = 16  # bytes: what the kernels assume of every row that they read


def backend_for(device: torch.device) -> str:
    """Name the implementation that runs on a device: "triton" on CUDA where triton is installed, else "reference".

    The environment variable `HF_CROSSCACHE_BACKEND` forces one of them; "triton" off CUDA needs triton's interpreter.

    Raises:
        RuntimeError: the variable holds another word, or asks for a triton that is missing, too old, or cannot run here.
    """
    forced = os.environ.get(BACKEND, "")
    if forced not in ("", "reference", "triton"):
        raise RuntimeError(f"{BACKEND} is 'reference', 'triton' or unset, not {forced!r}.")
    if forced != "triton":
        return "triton" if not forced and device.type == "cuda" and has_triton() else "reference"
    if not has_triton():
        raise RuntimeError(f"{BACKEND}=triton, but no triton {'.'.join(map(str, _OLDEST_TRITON))} or later is installed. Unset it.")
    if device.type != "cuda" and not interpreting():
        raise RuntimeError(f"{BACKEND}=triton for tensors on {device.type}: set TRITON_INTERPRET=1 before Python starts, or unset it.")
    return "triton"


@cache
def has_triton() -> bool:
    """Tell whether a triton that these kernels run on is installed."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    found = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return found >= _OLDEST_TRITON


def interpreting() -> bool:
    """Tell whether triton interprets kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def readable(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `[B, H, T, D]` tensors that share their strides and start every row at 16 bytes, copying only those that do not.

    A kernel reads all layers through one set of strides; the layers of one cache have one as a rule.
    """
    strides = layers[0].stride()
    aligned = strides[-1] == 1 and all(stride * layers[0].element_size() % _ALIGNMENT == 0 for stride in strides[:-1])
    if aligned and all(layer.stride() == strides and layer.data_ptr() % _ALIGNMENT == 0 for layer in layers):
        return list(layers)
    copies = [layer.contiguous() for layer in layers]
    return [copy.clone() if copy.data_ptr() % _ALIGNMENT else copy for copy in copies]


def addresses(*rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the addresses of some lists of tensors, one row a list, as int64 on their device."""
    table = torch.tensor([[layer.data_ptr() for layer in row] for row in rows], dtype=torch.int64)
    return table.to(rows[0][0].device, non_blocking=True)


def row_stride(positions: torch.Tensor) -> int:
    """Return the stride from one batch row of positions to the next, 0 where one row serves all."""
    return positions.stride(0) if positions.shape[0] > 1 else 0
