"""Real shapes with random weights: the cache geometry of published models, and what one of their decoder layers takes to read a context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from hf_crosscache import CacheGeometry
from hf_crosscache.benchmark import Side, percentiles
from hf_crosscache.compat import prefill

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Shape:
    """A published model's shape. dims: layers, hidden size, intermediate size, heads, key-value heads, head size."""

    name: str
    config: type[PreTrainedConfig]
    dims: tuple[int, int, int, int, int, int]
    rope_theta: float

    def build(self, layers: int, **changes: int) -> PreTrainedConfig:
        _, hidden, intermediate, heads, kv_heads, head_dim = self.dims
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        extra = {} if self.config is Qwen2Config else {"head_dim": head_dim}
        return self.config(
            **sizes, **extra, rope_parameters=rope, num_hidden_layers=layers, vocab_size=1024, max_position_embeddings=131072,
            bos_token_id=1, eos_token_id=None, pad_token_id=0, **changes,
        )  # fmt: skip


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("Qwen3-14B", Qwen3Config, (40, 5120, 17408, 40, 8, 128), 1e6),
        Shape("Qwen3-32B", Qwen3Config, (64, 5120, 25600, 64, 8, 128), 1e6),
        Shape("Qwen2.5-7B", Qwen2Config, (28, 3584, 18944, 28, 4, 128), 1e6),
        Shape("Qwen2.5-1.5B", Qwen2Config, (28, 1536, 8960, 12, 2, 128), 1e6),
        Shape("Llama-3.1-70B", LlamaConfig, (80, 8192, 28672, 64, 8, 128), 5e5),
        Shape("Gemma-2-2B", Gemma2Config, (26, 2304, 9216, 8, 4, 256), 1e4),
    )
}
PAIRS = (
    ("Qwen3-14B", "Qwen3-32B"),
    ("Qwen3-32B", "Qwen3-14B"),
    ("Qwen2.5-7B", "Qwen2.5-1.5B"),
    ("Llama-3.1-70B", "Qwen2.5-7B"),
    ("Qwen2.5-1.5B", "Gemma-2-2B"),
)


class LayerPrefill:
    """The prefill of a whole model, from one decoder layer with random weights: its time, by SDPA, times the number of layers."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        with device:
            self.model = AutoModelForCausalLM.from_config(shape.build(1), dtype=dtype).eval()
        self.layers, self.device = shape.dims[0], device
        self._known: dict[tuple[int, int], float] = {}

    def __call__(self, batch: int, tokens: int) -> float:
        """Milliseconds for `batch` contexts of `tokens` tokens, without embedding and language-model head being counted `layers` times."""
        if (batch, tokens) not in self._known:
            ids = torch.randint(2, 1000, (batch, tokens), device=self.device)
            self._known[batch, tokens] = self.layers * percentiles(lambda: prefill(self.model, ids), self.device, 60)[1]
        return self._known[batch, tokens]


def side(name: str, device: torch.device, *, timed: bool) -> Side:
    """Return one side of a pair: the geometry of the whole model, and its prefill where it is to be timed."""
    shape = SHAPES[name]
    read = LayerPrefill(shape, device)
    layer = CacheGeometry.from_model(read.model)
    layers = shape.dims[0]
    whole = replace(layer, layers=layer.layers * layers, rotary=layer.rotary * layers)
    return Side(name, whole, read if timed else None)
