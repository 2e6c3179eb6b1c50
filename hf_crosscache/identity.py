"""Who a model is: geometry, tokenizer and weights, digested, so that a translator can refuse a stranger."""

from __future__ import annotations

import hashlib
import json
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .errors import GeometryError, IdentityError
from .geometry import CacheGeometry
from .placement import device_of, stored_parameters

# Read once a model object: a model whose weights are changed in place is still taken for what it was.
_DIGESTS: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()
_GEOMETRIES: weakref.WeakKeyDictionary[PreTrainedModel, CacheGeometry] = weakref.WeakKeyDictionary()
_PROBE = "The 3 quick brown foxes, naïve as ever, jumped: 12,345 times!\n\n\tdef f(x): return x  # 你好"


@dataclass(frozen=True)
class ModelIdentity:
    """One side of a translator: which model, with which tokenizer, and what its cache looks like."""

    name: str
    geometry: CacheGeometry
    weights_digest: str
    tokenizer_digest: str | None

    @classmethod
    def from_model(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> ModelIdentity:
        """Read a model's identity; raises what `CacheGeometry.from_model` raises."""
        return cls(
            name=_portable_name(model),
            geometry=_geometry(model),
            weights_digest=weights_digest(model),
            tokenizer_digest=None if tokenizer is None else tokenizer_digest(tokenizer),
        )

    def check_model(self, model: PreTrainedModel, side: str) -> None:
        """Raise GeometryError or IdentityError unless this is the model that the translator was fitted on."""
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        difference = self.geometry.difference(_geometry(model))
        if difference:
            raise GeometryError(
                f"The translator's {side} is {self.name!r}; {name!r} has another cache: {difference}. "
                f"Pass the {side} model that the translator was fitted on, or fit one for this pair."
            )
        if weights_digest(model) != self.weights_digest:
            raise IdentityError(
                f"The translator's {side} is {self.name!r}; {name!r} has the same cache geometry but other weights "
                f"(digest {weights_digest(model)[:12]}, expected {self.weights_digest[:12]}). Fit a translator for this model."
            )

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, side: str) -> None:
        """Raise IdentityError unless the tokenizer gives the ids that the translator was fitted on."""
        if self.tokenizer_digest is not None and tokenizer_digest(tokenizer) != self.tokenizer_digest:
            raise IdentityError(
                f"The translator's {side} is {self.name!r} with another tokenizer (digest {tokenizer_digest(tokenizer)[:12]}, "
                f"expected {self.tokenizer_digest[:12]}). Pass the tokenizer that the translator was fitted with, and source_tokenizer= "
                "where the source has one of its own."
            )

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "weights_digest": self.weights_digest,
            "tokenizer_digest": self.tokenizer_digest,
            "geometry": self.geometry.to_dict(),
        }

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelIdentity:
        return cls(
            config["name"],
            CacheGeometry.from_dict(config["geometry"]),
            config["weights_digest"],
            config["tokenizer_digest"],
        )


def _portable_name(model: PreTrainedModel) -> str:
    """The name that the model was loaded by, without the folders of this machine that an absolute path would tell of."""
    path = Path(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return path.name if path.is_absolute() else str(path)


def _geometry(model: PreTrainedModel) -> CacheGeometry:
    if model not in _GEOMETRIES:
        _GEOMETRIES[model] = CacheGeometry.from_model(model)
    return _GEOMETRIES[model]


@torch.no_grad()
def weights_digest(model: PreTrainedModel) -> str:
    """Digest a model's weights: names, shapes, and 32 evenly spread values of each parameter rounded to bfloat16.

    The rounding makes a model loaded in float32 and in bfloat16 the same model; the sampling makes it a matter of milliseconds.
    """
    known = _DIGESTS.get(model)
    if known is not None:
        return known
    digest = hashlib.sha256()
    samples = []
    device = device_of(model)
    for name, parameter in sorted(stored_parameters(model).items()):
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        flat = parameter.flatten()
        at = torch.linspace(0, flat.numel() - 1, 32, dtype=torch.float64, device="cpu").long()
        samples.append(flat[at.to(flat.device)].to(torch.bfloat16).float().to(device))
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    _DIGESTS[model] = digest.hexdigest()
    return _DIGESTS[model]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest a tokenizer: its vocabulary, its special tokens and what it makes of a probe text."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    probe = tokenizer(_PROBE)["input_ids"]
    return hashlib.sha256(json.dumps([vocabulary, probe], ensure_ascii=False).encode()).hexdigest()


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Tell whether two tokenizers give the same ids."""
    return tokenizer_digest(one) == tokenizer_digest(other)
