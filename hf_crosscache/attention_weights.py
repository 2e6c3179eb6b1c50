"""How much later tokens read each token of a context: row weights under which the closed form fits what attention will make of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import decoder_of
from .errors import UnsupportedModelError
from .geometry import CacheGeometry
from .states import AttentionWeights

BOUNDARIES, FIRST_BOUNDARY = 32, 12
LEAST_EFFECTIVE = 0.1


@contextmanager
def received_attention(
    model: PreTrainedModel, geometry: CacheGeometry, *, skip: int = 0, least_effective: float = LEAST_EFFECTIVE
) -> Iterator[ReceivedAttention]:
    """Listen while a model reads windows from position 0 on; `weights()` of what is yielded says how much each position was read.

    Queries, keys and values are taken where every layer hands them to transformers' attention interface, whatever implementation is
    set (eager, SDPA, Flash Attention), which then runs as ever. Memory is that of some 32 rows of one layer's attention at a time.

    Args:
        skip: leading positions that get no weight, because they are never translated.
        least_effective: as in `with_effective_size`.

    Raises:
        UnsupportedModelError: the model's attention does not go through that interface.
    """
    received = ReceivedAttention(type(model).__name__, geometry, _layers_read(model, geometry), skip, least_effective)
    modules: list[Any] = [module for module in decoder_of(model).modules() if isinstance(getattr(module, "layer_idx", None), int)]
    layers = {module: int(module.layer_idx) for module in modules}
    files = {type(module).__module__: module.config for module in modules if hasattr(module, "config")}
    with ExitStack() as stack:
        for name, config in files.items():
            stack.enter_context(_beside_attention(sys.modules[name], config._attn_implementation, layers, received.hear))
        yield received


@dataclass(eq=False)
class ReceivedAttention:
    """What has been heard of a model's attention: for each layer of its cache, the weights by each layer that reads it.

    read_by: for each layer of the model, the layer of the cache whose keys and values it reads.
    """

    name: str
    geometry: CacheGeometry
    read_by: list[int]
    skip: int
    least_effective: float
    _heard: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def hear(self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: dict[str, Any]) -> None:
        """Take note of one layer's attention over a whole window."""
        if settings.get("position_bias") is not None:
            raise UnsupportedModelError(
                f"{self.name}, layer {layer_idx}: a position bias is added to its attention scores, which attention weights do not know. "
                "Fit with attention_weights=False."
            )
        read = self.read_by[layer_idx]
        scaling = settings.get("scaling")
        by_keys, by_values = received(
            query, key, value,
            boundaries(key.shape[2], self.skip).to(key.device),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=self.geometry.layers[read].sliding_window,
            softcap=settings.get("softcap"),
            sinks=settings.get("s_aux"),
        )  # fmt: skip
        self._heard.setdefault(read, []).append((normalised(by_keys, self.skip), normalised(by_values, self.skip)))

    def weights(self) -> AttentionWeights:
        """The weights of each position but the first `skip`.

        Raises:
            UnsupportedModelError: a layer was not heard.
        """
        sides = []
        for role in (0, 1):
            layers = []
            for layer_idx in range(len(self.geometry)):
                if layer_idx not in self._heard:
                    raise UnsupportedModelError(
                        f"{self.name}, layer {layer_idx}: its queries do not pass transformers' attention interface, where attention "
                        "weights are taken. Fit with attention_weights=False."
                    )
                readers = torch.stack([heard[role] for heard in self._heard[layer_idx]])
                layers.append(with_effective_size(readers.mean(0), self.least_effective))
            sides.append(layers)
        return AttentionWeights(*sides)


def boundaries(length: int, skip: int = 0) -> torch.Tensor:
    """Positions whose queries are asked, int64, rising: log-spaced up to the last, so that short contexts count as much as long ones."""
    first = min(max(FIRST_BOUNDARY, skip + 1), length - 1)
    return torch.logspace(0, 1, BOUNDARIES, base=(length - 1) / max(first, 1)).mul(first).round().long().unique()


def received(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    asked: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Say how far an error in each earlier key and value would move what the queries at some positions read.

        s_i = scaling q'k_i,  z_i = softcap tanh(s_i / softcap),  a = softmax(z),  o = sum_i a_i v_i

        value_i = sum over the query heads of a KV head of  a_i^2
        key_i   = sum over the query heads of a KV head of  a_i^2 |v_i - o|^2 |scaling q|^2 (dz_i / ds_i)^2

    These are the squared norms of do/dv_i (by head_dim) and of do/dk_i: to first order, the expected squared error of the attention
    output is the sum over i of key_i |error of k_i|^2 / D and value_i |error of v_i|^2, for errors independent of each other.

    Args:
        query: `[B, H_q, T, D]`, key, value: `[B, H, T, D]`, as attention sees them: with RoPE, any floating dtype.
        asked: int64 `[C]` the positions whose queries are asked.
        sliding_window: how many of the last tokens, its own included, a query sees; None for all.
        softcap: bound of the scores; None for no bound.
        sinks: `[H_q]` a logit of each query head that takes attention and gives no value; None for none.

    Returns:
        of the keys and of the values, each float32 `[B, H, C, T]`; 0 at the asked position itself and behind it.

    Source: Attn-Repair of CacheBridge (arXiv:2609.00891).
    """
    heads = key.shape[1]
    q = scaling * query[:, :, asked].float().unflatten(1, (heads, -1))  # [B, H, u, C, D]
    k, v = key.float(), value.float()
    scores, slope = torch.einsum("bhucd,bhtd->bhuct", q, k), 1.0
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent.square()
    slots, at = torch.arange(key.shape[2], device=key.device), asked[:, None]
    seen = slots <= at if sliding_window is None else (slots <= at) & (slots > at - sliding_window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(heads, -1, 1, 1).expand(len(key), -1, -1, len(asked), 1)
        scores = torch.cat([scores, sink], dim=-1)
    attention = scores.softmax(-1)[..., : key.shape[2]]
    output = torch.einsum("bhuct,bhtd->bhucd", attention, v)
    apart = v.square().sum(-1)[:, :, None, None] - 2 * torch.einsum("bhucd,bhtd->bhuct", output, v) + output.square().sum(-1, keepdim=True)
    by_values = attention.square() * (slots < at)
    by_keys = by_values * apart.clamp_min(0) * q.square().sum(-1, keepdim=True) * slope**2
    return by_keys.sum(2), by_values.sum(2)


def normalised(by_boundary: torch.Tensor, skip: int = 0) -> torch.Tensor:
    """Let every boundary hand out the same mass: `[B, H, C, T]` -> `[B, H, T - skip]` of mean 1 in every window and head."""
    kept = by_boundary[..., skip:]
    mass = kept.sum(-1, keepdim=True)
    shares = torch.where(mass > 0, kept / mass, 0.0).sum(2)
    mean = shares.mean(-1, keepdim=True)
    return torch.where(mean > 0, shares / mean, 1.0)


def with_effective_size(weights: torch.Tensor, least: float) -> torch.Tensor:
    """Mix weights of mean 1 with ones, as little as needed for enough rows to count.

        w = 1 + a (weights - 1),  a = the largest up to 1 with  (sum w)^2 / sum w^2 >= least * n

    Args:
        weights: `[..., n]`, of mean 1.
        least: effective share of the n rows (Kish), above 0 and up to 1; 1 gives all rows the weight 1.
    """
    spread = (weights - 1).square().mean(-1, keepdim=True)
    a = ((1 / least - 1) / spread.clamp_min(1e-12)).sqrt().clamp_max(1)
    return 1 + a * (weights - 1)


@contextmanager
def _beside_attention(file: Any, implementation: str, layers: dict[Any, int], hear: Callable[..., None]) -> Iterator[None]:
    """Let `hear` see what the layers of one of transformers' modeling files hand to their attention function, for a while."""
    interface, eager = getattr(file, "ALL_ATTENTION_FUNCTIONS", None), getattr(file, "eager_attention_forward", None)
    if interface is None or eager is None:  # such as a cross-attention of another make; a layer that is not heard is named later
        yield
        return
    own = interface.get(implementation)
    function = interface.get_interface(implementation, eager)

    def listening(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if module in layers:
            hear(layers[module], query, key, value, kwargs)
        return function(module, query, key, value, *args, **kwargs)

    interface[implementation] = listening
    try:
        yield
    finally:
        del interface[implementation]
        if own is not None and interface.get(implementation) is not own:  # it was set for this file alone
            interface[implementation] = own


def _layers_read(model: PreTrainedModel, geometry: CacheGeometry) -> list[int]:
    """For each layer of a model, the layer of its cache that it reads: its own, or, for the last ones of some, the last of its kind."""
    config, own = model.config.get_text_config(decoder=True), len(geometry)
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    return [i if i < own else max(j for j in range(own) if kinds[j] == kinds[i]) for i in range(config.num_hidden_layers)]
