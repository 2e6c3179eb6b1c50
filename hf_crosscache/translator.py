"""The frozen result of a fit: one affine map for each target head and role, and everything needed to refuse the wrong model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import ops
from .errors import HandOffWarning
from .features import NativeFeatures
from .identity import ModelIdentity
from .maps import LayerMap, PackedMaps
from .mixture import Mixture
from .native_states import Opening
from .nonlinear_features import NonlinearFeatures
from .panels import Panels
from .rope import NO_ROTATION, RotaryStack, strip_rope, to_half_split, to_interleaved
from .source_features import SourceFeatures
from .states import StatesByLayer


@dataclass(frozen=True, eq=False)
class CacheTranslator:
    """Maps the pre-RoPE keys and values of a source model to those of a target model.

    keys, values: one `LayerMap` a target layer, None for the first `native_layers`, which the target runs itself.
    key_norm: `[layers, D]` inverse weights of the target's norm of keys, to which mapped keys are brought back; None where it has none.
    mixture: further sets of maps and the router that chooses among them for each token, keys and values being the first; None for one set.
    features, source_features, nonlinear_features: what every map reads beside source heads; None where there are none.
    other_role: whether some keys are mapped from values, and values from keys. sink_tokens: leading positions that maps must not serve.
    opening: the target's states of the tokens that every calibration text began with, None where they began differently.
    r2: role ("keys", "values") -> held-out share of variance explained, `[layers, heads]` of the target; 1 for native layers.
    reach: role -> largest root mean square of a dimension of the target's states in the fit, `[layers]`, 0 for native ones; or empty.
    summary: how the translator was fitted, and its held-out metrics once evaluated; JSON-ready.
    """

    source: ModelIdentity
    target: ModelIdentity
    keys: tuple[LayerMap | None, ...]
    values: tuple[LayerMap | None, ...]
    sink_tokens: int = 4
    opening: Opening | None = None
    r2: dict[str, torch.Tensor] = field(default_factory=dict)
    reach: dict[str, torch.Tensor] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    features: NativeFeatures | None = None
    key_norm: torch.Tensor | None = None
    source_features: SourceFeatures | None = None
    nonlinear_features: NonlinearFeatures | None = None
    other_role: bool = False
    mixture: Mixture | None = None
    _prepared: dict[Any, Any] = field(init=False, repr=False, default_factory=dict)  # what launches read, packed on first use

    @cached_property
    def experts(self) -> tuple[CacheTranslator, ...]:
        """A translator for each set of maps of a mixture; itself where there is one set."""
        if self.mixture is None:
            return (self,)
        sides = [(self.keys, self.values), *zip(self.mixture.keys, self.mixture.values, strict=True)]
        return tuple(replace(self, keys=keys, values=values, mixture=None) for keys, values in sides)

    @property
    def two_tokenizers(self) -> bool:
        """True where the two models have different tokenizers."""
        return self.source.tokenizer_digest != self.target.tokenizer_digest

    @property
    def native_layers(self) -> int:
        """How many of its first layers the target runs itself."""
        return 0 if self.features is None else self.features.native_layers

    @cached_property
    def panels(self) -> Panels:
        """What lies behind the layers of the source."""
        return Panels(self.source.geometry, self.features, self.source_features, self.nonlinear_features, self.other_role)

    def maps(self, layer_idx: int) -> tuple[LayerMap, LayerMap]:
        """The maps of keys and of values of a target layer that is translated."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if keys is None or values is None:
            raise IndexError(f"Target layer {layer_idx} is native: nothing is mapped to it.")
        return keys, values

    def source_layers(self, layer_idx: int) -> frozenset[int]:
        """The source layers that a target layer reads, for keys or values; panels lie behind the source's own."""
        if layer_idx < self.native_layers:
            return frozenset()
        keys, values = self.maps(layer_idx)
        return keys.source_layers | values.source_layers

    def read_by(self, layers: range) -> tuple[frozenset[int], frozenset[int]]:
        """The source layers and panels that some translated target layers read, and those that maps of values read."""
        keys, values = zip(*map(self.maps, layers), strict=True)
        by_values = frozenset[int]().union(*[layer_map.source_layers for layer_map in values])
        return by_values.union(*[layer_map.source_layers for layer_map in keys]), by_values

    @cached_property
    def map_readers(self) -> dict[int, int]:
        """Source layer -> the target layers whose maps, or router, read it, in either role, as bits: bit i is target layer i."""
        read: dict[int, int] = {}
        routed_by = () if self.mixture is None else self.mixture.router.layers
        for layer_idx in range(len(self.target.geometry)):
            for layer in self.source_layers(layer_idx).union(routed_by if layer_idx >= self.native_layers else ()):
                source = self.panels.read_through(layer)
                if source is not None:
                    read[source] = read.get(source, 0) | 1 << layer_idx
        return dict(sorted(read.items()))

    @cached_property
    def readers(self) -> dict[int, int]:
        """Source layer -> the target layers that need it, as `map_readers`; source features need all, whichever layer comes first."""
        if self.source_features is None:
            return self.map_readers
        mapped = sum(1 << layer_idx for layer_idx in range(self.native_layers, len(self.target.geometry)))
        return dict.fromkeys(range(len(self.source.geometry)), mapped)

    @cached_property
    def runs(self) -> tuple[range, ...]:
        """The target layers in runs of one shape, each of which can be translated together."""
        return self.runs_of(())

    def runs_of(self, also: tuple[Any, ...]) -> tuple[range, ...]:
        """The runs of target layers that agree in shape, and in what `also` says of each layer."""
        known = self._prepared.get(("runs", also))
        if known is None:
            shapes = [
                (layer.num_key_value_heads, layer.head_dim, layer.rotary_dim, layer_idx < self.native_layers)
                for layer_idx, layer in enumerate(self.target.geometry.layers)
            ]
            kinds = list(zip(shapes, also, strict=True)) if also else shapes
            starts = [i for i in range(len(kinds)) if i == 0 or kinds[i] != kinds[i - 1]]
            known = tuple(range(start, stop) for start, stop in zip(starts, [*starts[1:], len(kinds)], strict=True))
            self._prepared["runs", also] = known
        return known

    def translate(
        self,
        layers: range,
        source: StatesByLayer,
        source_position_ids: torch.Tensor,
        target_position_ids: torch.Tensor,
        positions: int,
        out_keys: torch.Tensor,
        out_values: torch.Tensor,
        begin: int = 0,
        among: range | None = None,
    ) -> torch.Tensor:
        """Translate some positions for some target layers of one run.

        Args:
            layers: the target layers, N of them.
            among: the layers whose maps lie beside theirs and are packed together for their device; None for the whole run.
            source: source layer, or panel -> keys and values `[B, H_src, >= begin + T, D_src]` as cached, keys with their
                RoPE, on one device.
            source_position_ids, target_position_ids: int32 `[B or 1, T]`, where each model sees the tokens; all below `positions`.
            out_keys, out_values: `[N, B, H, T, D]`, written in full: keys rotated to their positions, in the target's dtype.
            begin: the row of the source states of the first of the T positions.

        Returns:
            int32 `[N, 2]`: 1 where keys (0) or values (1) of a layer are not finite.
        """
        like = source[next(iter(self.source_layers(layers.start)))][1]
        device, dtype = like.device, like.dtype
        maps, source_index, target_index = self._launch(layers, among or self._run_of(layers), dtype, device)
        pairs = [source[layer] for layer in maps.source_layers]
        keys, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for at, layer in enumerate(maps.source_layers):
            if self.panels.rotary[layer].interleaved:
                keys[at] = to_half_split(keys[at], self.panels.rotary[layer].rotary_dim)
        rotary = self._source_rotary
        if rotary is None:  # layers that rotate different numbers of dimensions are stripped one by one
            tables = [self.panels.rotary[layer].cos_sin(source_position_ids, dtype) for layer in maps.source_layers]
            rows = slice(begin, begin + source_position_ids.shape[1])
            keys = [strip_rope(states[:, :, rows], *table) for states, table in zip(keys, tables, strict=True)]
            values = [states[:, :, rows] for states in values]
            begin = 0
            rotary = NO_ROTATION
        with ops.forced_backend("reference" if self._uneven_source else None):
            flags = ops.translate_kv(
                keys,
                values,
                maps.blocks,
                maps.key_weight,
                maps.value_weight,
                maps.bias,
                (*rotary.cos_sin(positions, dtype, device), source_index),
                source_position_ids,
                (*self._target_rotary(layers).cos_sin(positions, out_keys.dtype, device), target_index),
                target_position_ids,
                out_keys,
                out_values,
                begin,
                self._key_norm_of(layers, device),
            )
        for at, layer in enumerate(layers):
            if self.target.geometry.rotary[layer].interleaved:
                out_keys[at].copy_(to_interleaved(out_keys[at], self.target.geometry.rotary[layer].rotary_dim))
        return flags

    def position_ids(self, length: int, device: torch.device) -> torch.Tensor:
        """Positions 0 to length - 1, int32 `[1, length]`: a view of one tensor that is kept."""
        known = self._prepared.get(("positions", device))
        if known is None or known.shape[1] < length:
            known = torch.arange(1 << max(length - 1, 1023).bit_length(), dtype=torch.int32, device=device)[None]
            self._prepared["positions", device] = known
        return known[:, :length]

    def _launch(
        self, layers: range, among: range, dtype: torch.dtype, device: torch.device
    ) -> tuple[PackedMaps, torch.Tensor, torch.Tensor]:
        """Return the packed maps of some layers, and the rotary tables of the source layers that they read and of their own."""
        key = (layers, dtype, device)
        if key not in self._prepared:
            whole = self._prepared.get((among, dtype, device))
            if whole is None:
                keys, values = zip(*map(self.maps, among), strict=True)
                packed = PackedMaps.pack(keys, values, self.source.geometry.layers[0].head_dim, dtype, device)
                whole = self._prepared[among, dtype, device] = self._with_tables(packed, among, device)
            if layers != among:
                packed = whole[0].select(layers.start - among.start, layers.stop - among.start)
                self._prepared[key] = self._with_tables(packed, layers, device)
        return self._prepared[key]

    def _with_tables(self, maps: PackedMaps, layers: range, device: torch.device) -> tuple[PackedMaps, torch.Tensor, torch.Tensor]:
        run = self._run_of(layers)
        source = NO_ROTATION if self._source_rotary is None else self._source_rotary
        own = self._target_rotary(layers).index((layer_idx - run.start for layer_idx in layers), device)
        return maps, source.index(maps.source_layers, device), own

    def _key_norm_of(self, layers: range, device: torch.device) -> torch.Tensor | None:
        if self.key_norm is None:
            return None
        key = ("key norm", device)
        if key not in self._prepared:
            self._prepared[key] = self.key_norm.to(device)
        return self._prepared[key][layers.start : layers.stop]

    def _run_of(self, layers: range) -> range:
        return next(run for run in self.runs if layers.start in run)

    def _target_rotary(self, layers: range) -> RotaryStack:
        return self._target_rotaries[self.runs.index(self._run_of(layers))]

    @cached_property
    def _target_rotaries(self) -> tuple[RotaryStack, ...]:
        return tuple(RotaryStack([self.target.geometry.rotary[layer_idx] for layer_idx in run]) for run in self.runs)

    @cached_property
    def _uneven_source(self) -> bool:
        """Source layers have different numbers of heads, which the kernel does not take."""
        return len({layer.num_key_value_heads for layer in self.source.geometry.layers}) > 1

    @cached_property
    def _source_rotary(self) -> RotaryStack | None:
        return RotaryStack(self.panels.rotary) if len({table.rotary_dim for table in self.panels.rotary}) == 1 else None

    def to(self, device: torch.device | str) -> CacheTranslator:
        """Return the translator with its maps on a device, which should be that of the source cache."""
        parts = {name: getattr(self, name) for name in ("features", "source_features", "nonlinear_features", "mixture")}
        return replace(
            self,
            keys=tuple(layer_map and layer_map.to(device) for layer_map in self.keys),
            values=tuple(layer_map and layer_map.to(device) for layer_map in self.values),
            **{name: part.to(device) for name, part in parts.items() if part is not None},
            key_norm=None if self.key_norm is None else self.key_norm.to(device),
        )

    def check(
        self,
        *,
        source_model: PreTrainedModel | None = None,
        target_model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> CacheTranslator:
        """Refuse models and tokenizers that the translator was not fitted on; a source without a tokenizer of its own shares the target's.

        Raises:
            GeometryError: a model has another cache; it says in what.
            IdentityError: a model has other weights, or the tokenizer gives other ids.
        """
        sides = (self.source, source_model, source_tokenizer or tokenizer), (self.target, target_model, tokenizer)
        for side, (identity, model, own) in zip(("source", "target"), sides, strict=True):
            if model is not None:
                identity.check_model(model, side)
            if own is not None:
                identity.check_tokenizer(own, side)
        return self

    @property
    def context_recovered(self) -> float | None:
        """What the translator kept of the context on held-out documents, where its summary says (`hf-crosscache eval --record`)."""
        arms = self.summary.get("evaluation", {}).get("arms", [])
        return next((arm["context_recovered"] for arm in arms if arm["arm"] == "translated"), None)

    def warn_if_below(self, least: float) -> None:
        """Warn where the translator is known to keep less than this share of a context."""
        kept = self.context_recovered
        if kept is not None and kept < least:
            warnings.warn(
                f"The translator from {self.source.name!r} to {self.target.name!r} kept {kept:.2f} of the context of held-out documents, "
                f"less than min_context_recovered = {least}. Fit it on more text, leave more to the target (recompute_last=), or prefill.",
                HandOffWarning,
                stacklevel=3,
            )

    def with_summary(self, entries: dict[str, Any]) -> CacheTranslator:
        """Return the translator with entries added to its summary."""
        return replace(self, summary={**self.summary, **entries})

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
        """Write `translator_config.json` and `translator.safetensors`, map weights in torch.bfloat16 or torch.float32, means in float32."""
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
