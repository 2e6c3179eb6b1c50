"""What a model's cache looks like: read once from the model and its config, compared ever after."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from .compat import decoder_of, prefill, states_of
from .errors import GeometryError, UnsupportedModelError
from .rope import RotaryTable, strip_rope

_ATTENTION_OF_LAYER = {"DynamicLayer": "full_attention", "DynamicSlidingWindowLayer": "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class LayerGeometry:
    """Shape of one layer's cache: keys and values are `[B, num_key_value_heads, T, head_dim]`.

    sliding_window: tokens that the layer attends to, None for full attention.
    rotary_dim: leading dimensions of each key head that RoPE turns.
    """

    num_key_value_heads: int
    head_dim: int
    attention: str
    sliding_window: int | None
    rotary_dim: int


@dataclass(frozen=True)
class CacheGeometry:
    """Shape of a whole model's cache, layer by layer, and the rotary table of each layer."""

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
        tables = _rotary_tables(model, config, len(layers), name)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
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
                return f"layer {layer_idx}: the rotary frequencies or their scaling differ"
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
            "rotary": [{"inv_freq": table.inv_freq.tolist(), "attention_scaling": table.attention_scaling} for table in tables],
        }

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> CacheGeometry:
        tables = [
            RotaryTable(torch.tensor(table["inv_freq"], dtype=torch.float32), table["attention_scaling"]) for table in config["rotary"]
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
    the tables do not describe show up here, layer by layer.

    Raises:
        UnsupportedModelError: naming the model, the layer and the size of the disagreement.
        GeometryError: the cache has other shapes than the config promised.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.linspace(0, vocabulary - 1, 8, device=model.device).long()[:, None]
    at_zero = torch.zeros_like(tokens)
    reference = states_of(prefill(model, tokens, position_ids=at_zero)[0])
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
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(f"{name}: caches a latent (multi-head latent attention), which is not supported.")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{name}: some layers share the cache of others, which is not supported.")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: an encoder-decoder model; only decoder-only models are supported.")
    found = []
    for layer_idx, layer in enumerate(DynamicCache(config=config).layers):
        kind = type(layer).__name__
        if kind not in _ATTENTION_OF_LAYER:
            raise UnsupportedModelError(
                f"{name}, layer {layer_idx}: a cache layer of type {kind} is not supported; layers of full or sliding-window attention are."
            )
        found.append((_ATTENTION_OF_LAYER[kind], getattr(layer, "sliding_window", None)))
    if len(found) != config.num_hidden_layers:
        raise UnsupportedModelError(f"{name}: {config.num_hidden_layers} layers, but a cache of {len(found)}.")
    return found


def _rotary_tables(model: PreTrainedModel, config: PreTrainedConfig, num_layers: int, name: str) -> tuple[RotaryTable, ...]:
    rotary: Any = getattr(decoder_of(model), "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModelError(f"{name}: no rotary embedding found; learned and ALiBi positions are not supported.")
    per_layer_type = "layer_type" in inspect.signature(rotary.forward).parameters
    layer_types = config.layer_types if per_layer_type else [""] * num_layers
    tables = {layer_type: _rotary_table(model, rotary, layer_type, name) for layer_type in set(layer_types)}
    return tuple(tables[layer_type] for layer_type in layer_types)


def _rotary_table(model: PreTrainedModel, rotary: Any, layer_type: str, name: str) -> RotaryTable:
    prefix = f"{layer_type}_" if layer_type else ""
    rope_type = rotary.rope_type
    if isinstance(rope_type, dict):
        rope_type = rope_type[layer_type]
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModelError(
            f"{name}: rotary embedding of type {rope_type!r} changes its frequencies with the length of the context, "
            "which is not supported."
        )
    inv_freq = getattr(rotary, f"{prefix}inv_freq").detach().float().cpu()
    table = RotaryTable(inv_freq, float(getattr(rotary, f"{prefix}attention_scaling")))
    positions = torch.tensor([[0, 1, 2, 17, 1023]], device=model.device)
    like = torch.empty(1, dtype=model.dtype, device=model.device)
    cos, sin = rotary(like, positions, layer_type) if layer_type else rotary(like, positions)
    mine = table.cos_sin(positions, model.dtype)
    half = inv_freq.numel()
    for theirs, ours in zip((cos, sin), mine, strict=True):
        if not torch.allclose(theirs[..., :half].float(), ours, atol=1e-2 if model.dtype != torch.float32 else 1e-4):
            raise UnsupportedModelError(f"{name}: its rotary module does not follow its own frequencies; not supported.")
    return table


def _name_of(model: PreTrainedModel) -> str:
    return getattr(model.config, "_name_or_path", "") or type(model).__name__
