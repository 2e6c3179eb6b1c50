"""Which implementation runs, and what every launch needs: addresses of tensors that a kernel can read."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

BACKEND = "HF_CROSSCACHE_BACKEND"
_OLDEST_TRITON = (3, 5)
_LIBRARY = torch.library.Library("hf_crosscache", "DEF")
_COMPILED: dict[tuple[Any, ...], Any] = {}
_INT32 = 2**31 - 1
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


def readable(layers: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], list[int]]:
    """Return `[B, H, T, D]` tensors of one shape that share their strides and start every row at 16 bytes, copying them if need be.

    A kernel reads all layers through one set of strides; the layers of one cache have one as a rule.

    Returns:
        the tensors, and their addresses.
    """
    first = layers[0]
    shape, dtype, strides = first.shape, first.dtype, first.stride()
    if not all([layer.shape == shape and layer.dtype == dtype for layer in layers]):
        found = sorted({(tuple(layer.shape), str(layer.dtype)) for layer in layers})
        raise ValueError(f"Layers of one shape and dtype expected, {found} found.")
    pointers = [layer.data_ptr() for layer in layers]
    alike = all([layer.is_contiguous() for layer in layers]) or all([layer.stride() == strides for layer in layers])
    starts = strides[-1] == 1 and not any([stride * dtype.itemsize % _ALIGNMENT for stride in strides[:-1]])
    if alike and starts and not any([pointer % _ALIGNMENT for pointer in pointers]):
        return layers, pointers
    copies = [layer.clone(memory_format=torch.contiguous_format) for layer in layers]
    return copies, [copy.data_ptr() for copy in copies]


def register(reference: Callable[..., None], on_triton: Callable[..., None], mutates: Sequence[str]) -> Callable[..., None]:
    """Register an operation that writes into some of its arguments with torch, as `torch.ops.hf_crosscache.<name>`, and return it.

    Args:
        reference: `<name>_reference`, which gives the name and the signature and runs where triton does not.
        on_triton: the same in triton.
        mutates: the arguments that are written to; the last of them says on which device to run.
    """
    name = reference.__name__.removesuffix("_reference")
    at = list(inspect.signature(reference).parameters).index(mutates[-1])

    def run(*arguments: Any) -> None:
        if backend_for(arguments[at].device) == "reference":
            reference(*arguments)
        else:
            with torch.cuda.device_of(arguments[at]):
                on_triton(*arguments)

    _LIBRARY.define(name + torch.library.infer_schema(reference, mutates_args=mutates))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_crosscache::{name}", lambda *args: None, lib=_LIBRARY)
    operation = getattr(torch.ops.hf_crosscache, name).default

    def call(*arguments: Any) -> None:
        """Skip torch's dispatcher, some 60 microseconds, where nothing traces."""
        plain = type(arguments[at]) is torch.Tensor and not torch.compiler.is_compiling()
        (run if plain else operation)(*arguments)

    return call


def launch(kernel: Any, grid: tuple[int], arguments: tuple[Any, ...], **meta: Any) -> None:
    """Launch a kernel, looking up what triton compiled for arguments alike: triton's own lookup costs twice the time of a small launch.

    Args:
        arguments: tensors and integers, positional, all that are not constexpr.
        meta: the constexpr ones in the order of the kernel's signature, then launch options.
    """
    if interpreting():
        kernel[grid](*arguments, **meta)
        return
    alike = [
        (a == 1, a % 16 == 0, a > _INT32) if type(a) is int else (a.dtype, a.data_ptr() % _ALIGNMENT) for a in arguments
    ]  # what triton specialises on
    key = (kernel, torch.cuda.current_device(), *meta.values(), *alike)
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[grid](*arguments, **meta)
    else:
        constants = [value for name, value in meta.items() if name.isupper()]
        compiled[grid[0], 1, 1](*arguments, *constants)


@cache
def name_of(dtype: torch.dtype) -> Any:
    """Return triton's name of a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def check_outputs(**outputs: torch.Tensor) -> None:
    """Refuse outputs that a kernel would write past: their last dimension has to be dense, and all of sums and flags."""
    for name, out in outputs.items():
        dense = out.stride(-1) == 1 if name.startswith("out") else out.is_contiguous()
        if not dense:
            raise ValueError(f"{name} of shape {tuple(out.shape)} has strides {out.stride()}: give one that is contiguous.")


def row_stride(positions: torch.Tensor) -> int:
    """Return the stride from one batch row of positions to the next, 0 where one row serves all."""
    return positions.stride(0) if positions.shape[0] > 1 else 0


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take; without bound where kernels are interpreted."""
    if device.type != "cuda":
        return 1 << 62
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 << 10)


def ceil_div(a: int, b: int) -> int:
    """Divide, rounding up; triton's own takes ten microseconds."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the next power of two, n included."""
    return 1 << (n - 1).bit_length()
