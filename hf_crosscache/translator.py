"""The frozen result of a fit: one affine map for each target head and role, and everything needed to refuse the wrong model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import ops
from .identity import ModelIdentity
from .rope import apply_rope


class SourceHead(NamedTuple):
    """A block that a map reads: one key-value head of one source layer."""

    layer: int
    head: int


@dataclass(frozen=True, eq=False)
class LayerMap:
    """The affine maps of one target layer and role: `y = (x - mean_x) weight + mean_y`.

    blocks: for each target head the source heads it reads, in the order of its inputs; one entry alone serves all the heads.
    weight: `[H, n, D]`, mean_x: `[len(blocks), n]`, mean_y: `[H, D]`; float32.
    """

    blocks: tuple[tuple[SourceHead, ...], ...]
    weight: torch.Tensor
    mean_x: torch.Tensor
    mean_y: torch.Tensor

    @cached_property
    def bias(self) -> torch.Tensor:
        """`mean_y - mean_x weight`, `[H, D]` float32, summed in float64: it absorbs the rounding of a bf16 weight at the mean."""
        offset = self.mean_x.double()[:, None] @ self.weight.double()
        return (self.mean_y.double() - offset[:, 0]).float()

    @cached_property
    def source_layers(self) -> frozenset[int]:
        """The source layers that these maps read."""
        return frozenset(block.layer for heads in self.blocks for block in heads)

    def __call__(self, states: dict[int, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """Map source states (layer -> `[B, H_src, T, D_src]`) into `out` `[B, H, T, D]` float32."""
        return ops.map_heads(states, self.blocks, self.weight, self.bias, out)

    def to(self, device: torch.device | str) -> LayerMap:
        """Return the maps on a device; itself if they are there."""
        if self.weight.device == torch.device(device):
            return self
        return replace(self, **{n: getattr(self, n).to(device) for n in ("weight", "mean_x", "mean_y")})


@dataclass(frozen=True, eq=False)
class Opening:
    """The target's own cache of the tokens that every calibration text began with, such as a BOS.

    token_ids: the tokens; keys, values: per layer `[1, H, len(token_ids), D]` as the target caches them.
    """

    token_ids: tuple[int, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class CacheTranslator:
    """Maps the pre-RoPE keys and values of a source model to those of a target model.

    keys, values: one `LayerMap` a target layer.
    sink_tokens: leading positions that the maps were not fitted on and must not serve.
    opening: the target's states of the tokens that every calibration text began with, None where they began differently.
    r2: role ("keys", "values") -> held-out share of variance explained, `[layers, heads]` of the target.
    summary: how the translator was fitted, and its held-out metrics once evaluated; JSON-ready.
    """

    source: ModelIdentity
    target: ModelIdentity
    keys: tuple[LayerMap, ...]
    values: tuple[LayerMap, ...]
    sink_tokens: int = 4
    opening: Opening | None = None
    r2: dict[str, torch.Tensor] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    def source_layers(self, layer_idx: int) -> frozenset[int]:
        """The source layers that a target layer reads, for keys or values."""
        return self.keys[layer_idx].source_layers | self.values[layer_idx].source_layers

    def translate_layer(
        self,
        layer_idx: int,
        source_keys: dict[int, torch.Tensor],
        source_values: dict[int, torch.Tensor],
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Translate some positions for one target layer.

        Args:
            layer_idx: the target layer.
            source_keys, source_values: source layer -> `[B, H_src, T, D_src]` pre-RoPE keys, and values, at the same positions.
            cos, sin: `[B or 1, T, R/2]` of the target layer's rotary table, at the positions where the target will see them.

        Returns:
            Keys, rotated to their positions, and values: `[B, H, T, D]` float32, on the device of the source states.
        """
        like = next(iter(source_values.values()))
        shape = self.target.geometry.layers[layer_idx]
        mapped = []
        for layer_map, states in ((self.keys[layer_idx], source_keys), (self.values[layer_idx], source_values)):
            out = torch.empty(
                (like.shape[0], shape.num_key_value_heads, like.shape[2], shape.head_dim),
                dtype=torch.float32,
                device=like.device,
            )
            mapped.append(layer_map.to(like.device)(states, out))
        return apply_rope(mapped[0], cos, sin), mapped[1]

    def to(self, device: torch.device | str) -> CacheTranslator:
        """Return the translator with its maps on a device, which should be that of the source cache."""
        return replace(
            self,
            keys=tuple(layer_map.to(device) for layer_map in self.keys),
            values=tuple(layer_map.to(device) for layer_map in self.values),
        )

    def check(
        self,
        *,
        source_model: PreTrainedModel | None = None,
        target_model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> CacheTranslator:
        """Refuse models and tokenizers that the translator was not fitted on.

        Raises:
            GeometryError: a model has another cache; it says in what.
            IdentityError: a model has other weights, or the tokenizer gives other ids.
        """
        for identity, model, side in ((self.source, source_model, "source"), (self.target, target_model, "target")):
            if model is not None:
                identity.check_model(model, side)
            if tokenizer is not None:
                identity.check_tokenizer(tokenizer, side)
        return self

    def with_summary(self, entries: dict[str, Any]) -> CacheTranslator:
        """Return the translator with entries added to its summary."""
        return replace(self, summary={**self.summary, **entries})

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
        """Write `translator_config.json` and `translator.safetensors`.

        Args:
            dtype: of the map weights, torch.bfloat16 or torch.float32; means are float32 always.
        """
        from .artefact import save

        return save(self, Path(folder), dtype)

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | Path,
        *,
        source_model: PreTrainedModel | None = None,
        target_model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        revision: str | None = None,
    ) -> CacheTranslator:
        """Load a translator from a folder, or from the Hub where no such folder exists.

        The models and the tokenizer, where given, are checked against those that the translator was fitted on.

        Raises:
            ArtefactError: a file is missing, truncated or not a translator.
            GeometryError, IdentityError: as `check`.
        """
        from .artefact import load

        translator = load(name_or_folder, revision)
        return translator.check(source_model=source_model, target_model=target_model, tokenizer=tokenizer)

    def push_to_hub(self, repo_id: str, *, private: bool = False, dtype: torch.dtype = torch.bfloat16) -> str:
        """Upload the artefact to a Hub repository, creating it if need be; returns the address of the commit."""
        from .artefact import push

        return push(self, repo_id, private=private, dtype=dtype)


def all_layers(maps: Sequence[Sequence[LayerMap]]) -> tuple[LayerMap, ...]:
    """Join the maps of several passes over the target layers."""
    return tuple(layer_map for some in maps for layer_map in some)
