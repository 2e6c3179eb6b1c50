"""What a model's cache looks like: read once from the model and its config, compared ever after."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from .compat import prefill, states_of
from .errors import GeometryError, UnsupportedModelError
from .placement import device_of
from .rope import RotaryTable, strip_rope, to_half_split
from .rotary import rotary_tables

_ATTENTION_OF_LAYER = {"DynamicLayer": "full_attention", "DynamicSlidingWindowLayer": "sliding_attention"}
_SLIDE_OTHERWISE = ("chunked_attention",)  # cached like a sliding window, seen by other tokens than those in one
_SUPPORTED = "which is not supported; layers that cache their own keys and values for full or sliding-window attention are."


@dataclass(frozen=True)
class LayerGeometry:
    """Shape of one layer's cache: keys and values are `[B, num_key_value_heads, T, head_dim]`.

    sliding_window: tokens that the layer attends to, None for full attention.
    rotary_dim: leading dimensions of each key head that RoPE turns; a layer without RoPE has that of the others.
    """

    num_key_value_heads: int
    head_dim: int
    attention: str
    sliding_window: int | None
    rotary_dim: int


@dataclass(frozen=True)
class CacheGeometry:
    """Shape of a whole model's cache, layer by layer, and the rotary table of each layer.

    Layers of the model that read the states of an earlier one (Gemma 3n and 4: the last `num_kv_shared_layers`) have no layer here.
    """

    model_type: str
    layers: tuple[LayerGeometry, ...]
    rotary: tuple[RotaryTable, ...]

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> CacheGeometry:
        """Read the cache geometry of a model.

        Raises:
            UnsupportedModelError: the model has layers, or position embeddings, that cannot be translated; it says which.
        """
        config = model.config.get_text_config(decoder=True)
        name = _name_of(model)
        layers = _attention_layers(config, name)
        heads, head_dim = _shape(config, len(layers), name)
        tables = rotary_tables(model, config, [attention for attention, _ in layers], name)
        return cls(
            model_type=config.model_type,
            layers=tuple(
                LayerGeometry(heads, head_dim, attention, window, table.rotary_dim)
                for (attention, window), table in zip(layers, tables, strict=True)
            ),
            rotary=tables,
        )

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Key-value heads of all layers together."""
        return sum(layer.num_key_value_heads for layer in self.layers)

    def difference(self, other: CacheGeometry) -> str | None:
        """Say in words how another geometry differs from this one, or None where it does not."""
        if len(self) != len(other):
            return f"{len(self)} layers expected, {len(other)} found"
        for layer_idx, (mine, theirs) in enumerate(zip(self.layers, other.layers, strict=True)):
            if mine != theirs:
                fields = [k for k, v in asdict(mine).items() if v != asdict(theirs)[k]]
                return f"layer {layer_idx}: " + ", ".join(f"{k} {getattr(mine, k)} expected, {getattr(theirs, k)} found" for k in fields)
            if not self.rotary[layer_idx].same_as(other.rotary[layer_idx]):
                return f"layer {layer_idx}: the rotary frequencies, their scaling or the order of the pairs differ"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready description; equal rotary tables are written once."""
        tables: list[RotaryTable] = []
        of_layer = []
        for table in self.rotary:
            at = next((i for i, known in enumerate(tables) if known is table or known.same_as(table)), len(tables))
            if at == len(tables):
                tables.append(table)
            of_layer.append(at)
        return {
            "model_type": self.model_type,
            "layers": [asdict(layer) for layer in self.layers],
            "rotary_of_layer": of_layer,
            "rotary": [
                {"inv_freq": table.inv_freq.tolist(), "attention_scaling": table.attention_scaling, "interleaved": table.interleaved}
                for table in tables
            ],
        }

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> CacheGeometry:
        tables = [
            RotaryTable(
                torch.tensor(table["inv_freq"], dtype=torch.float32),
                table["attention_scaling"],
                table.get("interleaved", False),  # which earlier releases did not write
            )
            for table in config["rotary"]
        ]
        return cls(
            model_type=config["model_type"],
            layers=tuple(LayerGeometry(**layer) for layer in config["layers"]),
            rotary=tuple(tables[i] for i in config["rotary_of_layer"]),
        )


@torch.no_grad()
def check_positions(model: PreTrainedModel, geometry: CacheGeometry, positions: tuple[int, ...] = (1, 7, 113)) -> None:
    """Refuse a model whose keys would be stripped wrongly.

    A token alone in its context attends to itself whatever its position, so every layer sees the same hidden state at position p as
    at position 0: its stripped keys, and its values, must agree. Partial, interleaved, missing or length-dependent rotations that
    the tables do not describe show up here, layer by layer, as do weights multiplied into keys after they were turned.

    Raises:
        UnsupportedModelError: naming the model, the layer and the size of the disagreement.
        GeometryError: the cache has other shapes than the config promised.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.linspace(0, vocabulary - 1, 8, device=device_of(model)).long()[:, None]
    at_zero = torch.zeros_like(tokens)
    reference = states_of(prefill(model, tokens, position_ids=at_zero)[0])
    if len(reference) != len(geometry):
        raise GeometryError(
            f"{_name_of(model)}: the config promises {len(geometry)} layers with keys and values of their own, the model caches "
            f"{len(reference)}. Models with other cache layouts are not supported."
        )
    tolerance = 1e-3 if model.dtype == torch.float32 else 3e-2
    for position in positions:
        moved_to = torch.full_like(tokens, position)
        moved = states_of(prefill(model, tokens, position_ids=moved_to)[0])
        for layer_idx, (layer, table) in enumerate(zip(geometry.layers, geometry.rotary, strict=True)):
            (keys_at_zero, values_at_zero), (keys, values) = reference[layer_idx], moved[layer_idx]
            shape = (len(tokens), layer.num_key_value_heads, 1, layer.head_dim)
            if tuple(keys.shape) != shape or tuple(values.shape) != shape:
                raise GeometryError(
                    f"{_name_of(model)}, layer {layer_idx}: the config promises keys and values of shape {shape}, the model caches "
                    f"{tuple(keys.shape)} and {tuple(values.shape)}. Models with other cache layouts are not supported."
                )
            if table.interleaved:
                keys_at_zero, keys = (to_half_split(states, table.rotary_dim) for states in (keys_at_zero, keys))
            rotate_back = table.cos_sin(moved_to.to(keys.device), keys.dtype)
            stay = table.cos_sin(at_zero.to(keys.device), keys.dtype)
            for role, want, got in (
                ("keys", strip_rope(keys_at_zero, *stay), strip_rope(keys, *rotate_back)),
                ("values", values_at_zero.float(), values.float()),
            ):
                error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
                if not error <= tolerance:
                    raise UnsupportedModelError(
                        f"{_name_of(model)}, layer {layer_idx}: {role} at position {position} do not agree with those at position 0 "
                        f"once the rotary embedding is stripped (relative error {error:.2g}, at most {tolerance:g} expected). Its "
                        "position embedding is of a kind that is not supported, so its cache would be translated wrongly."
                    )


def _attention_layers(config: PreTrainedConfig, name: str) -> list[tuple[str, int | None]]:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: an encoder-decoder model; only decoder-only models are supported.")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(f"{name}, layer 0: caches a latent (multi-head latent attention), {_SUPPORTED}")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModelError(f"{name}: its tokens attend to later ones, so no cache of a context is final; not supported.")
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)  # the others, at the end, read those of earlier ones
    if own == 0:
        raise UnsupportedModelError(f"{name}: all its layers read the states of another model, which is not supported.")
    found = []
    layers = DynamicCache(config=config).layers[:own]
    kinds = _layer_types(config, len(layers))
    for layer_idx, (layer, kind) in enumerate(zip(layers, kinds, strict=False)):
        cached_as = type(layer).__name__
        if cached_as not in _ATTENTION_OF_LAYER or kind in _SLIDE_OTHERWISE:
            raise UnsupportedModelError(
                f"{name}, layer {layer_idx}: a layer of {kind or 'another kind'} (cached as {cached_as}), {_SUPPORTED}"
            )
        found.append((_ATTENTION_OF_LAYER[cached_as], getattr(layer, "sliding_window", None)))
    if len(found) != own:
        raise UnsupportedModelError(f"{name}: {own} layers with keys and values of their own, but a cache of {len(found)}.")
    return found


def _shape(config: PreTrainedConfig, num_layers: int, name: str) -> tuple[int, int]:
    """Key-value heads of each layer of the cache, and their size."""
    per_layer: Any = config.per_layer_config[:num_layers] if getattr(config, "is_heterogeneous", False) else [config]
    shapes = []
    for layer_idx, layer in enumerate(per_layer):
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        shapes.append((heads, getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads))
        if getattr(layer, "skip", None):
            raise UnsupportedModelError(f"{name}, layer {layer_idx}: its config skips {layer.skip}, which is not supported.")
        if shapes[-1] != shapes[0]:
            raise UnsupportedModelError(
                f"{name}, layer {layer_idx}: its config gives layers shapes of their own (as Gemma 4 does by global_head_dim and "
                f"num_global_key_value_heads): (heads, head_dim) {shapes[0]} in layer 0, {shapes[-1]} here. One shape is supported."
            )
    return shapes[0]


def _layer_types(config: PreTrainedConfig, num_layers: int) -> list[str]:
    """What the config calls its layers; where it names none, transformers reads chunks off the config as this does."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return list(layer_types)
    chunked = getattr(config, "sliding_window", None) is None and getattr(config, "attention_chunk_size", None) is not None
    return ["chunked_attention" if chunked else ""] * num_layers


def _name_of(model: PreTrainedModel) -> str:
    return getattr(model.config, "_name_or_path", "") or type(model).__name__
