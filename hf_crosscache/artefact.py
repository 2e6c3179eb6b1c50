"""The translator on disk: `translator_config.json` for people and checks, `translator.safetensors` for tensors."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import ArtefactError
from .features import NativeFeatures
from .identity import ModelIdentity
from .maps import LayerMap, SourceHead
from .mixture import Mixture, Router
from .native_states import Opening
from .nonlinear_features import NonlinearFeatures
from .source_features import SourceFeatures
from .translator import CacheTranslator

CONFIG, TENSORS = "translator_config.json", "translator.safetensors"
_FORMAT, _MIXTURE_FORMAT = 1, 2  # releases that know no mixtures would serve the first expert alone
_ROLES = ("keys", "values")
_FEATURES = {
    "features": (NativeFeatures, ("mean", "projection")),
    "source_features": (SourceFeatures, ("mean", "projection")),
    "nonlinear_features": (NonlinearFeatures, ("weight", "bias", "mean", "scale")),
}


def save(translator: CacheTranslator, folder: Path, dtype: torch.dtype) -> Path:
    """Write a translator; see `CacheTranslator.save_pretrained`."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ArtefactError(f"A translator is saved in torch.bfloat16 or torch.float32, not {dtype}.")
    folder.mkdir(parents=True, exist_ok=True)
    mixture = translator.mixture
    config = {
        "format": _FORMAT if mixture is None else _MIXTURE_FORMAT,
        "source": translator.source.to_dict(),
        "target": translator.target.to_dict(),
        "sink_tokens": translator.sink_tokens,
        "opening_ids": None if translator.opening is None else list(translator.opening.token_ids),
        "native_layers": translator.native_layers,
        "other_role": translator.other_role,
        "blocks": {role: [None if maps is None else maps.blocks for maps in getattr(translator, role)] for role in _ROLES},
        "summary": translator.summary,
    }
    if mixture is not None:
        router = mixture.router
        config["mixture"] = {"experts": router.experts, "layers": router.layers, "roles": router.roles}
    save_file(
        {k: v.detach().cpu().clone().contiguous() for k, v in tensors_of(translator, dtype).items()}, folder / TENSORS, {"format": "pt"}
    )
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder


def tensors_of(translator: CacheTranslator, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a translator by the names that they are saved under, the weights of its maps in one dtype."""
    tensors: dict[str, torch.Tensor] = {}
    for role in _ROLES:
        tensors |= _map_tensors(role, getattr(translator, role), dtype)
        for name in ("r2", "reach"):
            if role in getattr(translator, name):
                tensors[f"{name}.{role}"] = getattr(translator, name)[role]
    if translator.opening is not None:
        for layer_idx, pair in enumerate(zip(translator.opening.keys, translator.opening.values, strict=True)):
            for role, states in zip(_ROLES, pair, strict=True):
                tensors[f"opening.{layer_idx}.{role}"] = states
    if translator.key_norm is not None:
        tensors["key_norm"] = translator.key_norm
    for name, (_, parts) in _FEATURES.items():
        if (kind := getattr(translator, name)) is not None:
            tensors |= {f"{name}.{part}": getattr(kind, part) for part in parts}
    if translator.mixture is not None:
        router = translator.mixture.router
        tensors["router.weight"], tensors["router.bias"] = router.weight, router.bias
        for role in _ROLES:
            for expert, maps in enumerate(getattr(translator.mixture, role), 1):
                tensors |= _map_tensors(role, maps, dtype, f"experts.{expert}.")
    return tensors


def load(name_or_folder: str | Path, revision: str | None = None) -> CacheTranslator:
    """Read a translator; see `CacheTranslator.from_pretrained`."""
    folder = Path(name_or_folder)
    if not folder.is_dir():
        if isinstance(name_or_folder, Path) or name_or_folder.count("/") > 1 or name_or_folder.startswith("."):
            raise ArtefactError(f"No translator at {name_or_folder}: the folder does not exist.")
        folder = Path(snapshot_download(name_or_folder, revision=revision, allow_patterns=[CONFIG, TENSORS]))
    config, tensors = _read_config(folder / CONFIG), _read_tensors(folder / TENSORS)

    def tensor(name: str) -> torch.Tensor:
        if name not in tensors:
            raise ArtefactError(f"{folder / TENSORS} lacks the tensor {name!r}: save the translator again.")
        found = tensors[name]
        if not torch.isfinite(found).all():
            raise ArtefactError(f"{folder / TENSORS}: the tensor {name!r} is not finite. Fit and save the translator again.")
        return found

    target = ModelIdentity.from_dict(config["target"])

    def maps(role: str, of: str = "") -> tuple[LayerMap | None, ...]:
        return tuple(
            None
            if blocks is None
            else LayerMap(
                tuple(tuple(SourceHead(*block) for block in heads) for heads in blocks),
                tensor(f"{of}layers.{i}.{role}.weight").float(),
                tensor(f"{of}layers.{i}.{role}.mean_x"),
                tensor(f"{of}layers.{i}.{role}.mean_y"),
            )
            for i, blocks in enumerate(config["blocks"][role])
        )

    mixture, opening = None, None
    if "mixture" in config:
        mixed = config["mixture"]
        router = Router(tuple(mixed["layers"]), tuple(mixed["roles"]), tensor("router.weight"), tensor("router.bias"))
        further = [f"experts.{expert}." for expert in range(1, mixed["experts"])]
        mixture = Mixture(router, *(tuple(maps(role, of) for of in further) for role in _ROLES))
    given: dict[str, Any] = {}
    for name, (kind, parts) in _FEATURES.items():
        if f"{name}.{parts[0]}" in tensors:
            count = [config["native_layers"]] if kind is NativeFeatures else []
            given[name] = kind(*count, *[tensor(f"{name}.{part}") for part in parts])
    if config["opening_ids"] is not None:
        states = {role: tuple(tensor(f"opening.{i}.{role}") for i in range(len(target.geometry))) for role in _ROLES}
        opening = Opening(tuple(config["opening_ids"]), states["keys"], states["values"])
    return CacheTranslator(
        source=ModelIdentity.from_dict(config["source"]),
        target=target,
        keys=maps("keys"),
        values=maps("values"),
        sink_tokens=config["sink_tokens"],
        opening=opening,
        r2={role: tensor(f"r2.{role}") for role in _ROLES if f"r2.{role}" in tensors},
        reach={role: tensor(f"reach.{role}") for role in _ROLES if f"reach.{role}" in tensors},
        summary=config["summary"],
        other_role=config.get("other_role", False),  # which earlier releases did not write
        mixture=mixture,
        **given,
        key_norm=tensor("key_norm") if "key_norm" in tensors else None,
    )


def record(folder: Path, entries: dict[str, Any]) -> None:
    """Add entries to the summary of a saved translator; its tensors stay as they are."""
    config = _read_config(folder / CONFIG)
    config["summary"].update(entries)
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def push(translator: CacheTranslator, repo_id: str, *, private: bool, dtype: torch.dtype) -> str:
    """Upload a translator; see `CacheTranslator.push_to_hub`."""
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        save(translator, Path(folder), dtype)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload translator"))


def size_mb(folder: str | Path) -> float:
    """Size of the artefact's two files in megabytes (10^6 bytes)."""
    return sum((Path(folder) / name).stat().st_size for name in (CONFIG, TENSORS)) / 1e6


def _map_tensors(role: str, maps: Iterable[LayerMap | None], dtype: torch.dtype, of: str = "") -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for layer_idx, layer_map in enumerate(maps):
        if layer_map is not None:
            name = f"{of}layers.{layer_idx}.{role}"
            tensors[f"{name}.weight"] = layer_map.weight.to(dtype)
            tensors[f"{name}.mean_x"] = layer_map.mean_x
            tensors[f"{name}.mean_y"] = layer_map.mean_y
    return tensors


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtefactError(f"{path} does not exist: is this the folder that save_pretrained wrote?") from error
    except json.JSONDecodeError as error:
        raise ArtefactError(f"{path} is not valid JSON ({error}): save the translator again.") from error
    if config.get("format") not in (_FORMAT, _MIXTURE_FORMAT):
        raise ArtefactError(f"{path} has format {config.get('format')!r}; this release reads formats {_FORMAT} and {_MIXTURE_FORMAT}.")
    return config


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ArtefactError(f"{path} does not exist: is this the folder that save_pretrained wrote?") from error
    except SafetensorError as error:
        raise ArtefactError(f"{path} is truncated or damaged ({error}): save or download the translator again.") from error
