"""Small models, exact translators and planted twins that the tests share."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_crosscache.identity import ModelIdentity
from hf_crosscache.maps import LayerMap, SourceHead
from hf_crosscache.translator import CacheTranslator

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODELS, TEXTS = EXAMPLES / "models", EXAMPLES / "text" / "documents.jsonl.xz"
VOCABULARY = 256
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_yarn": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama3": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama_linear": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral_sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
}


def tiny_model(family: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A model with random weights, large enough that its greedy tokens depend on the context."""
    model_class, config_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_SHAPE, **extra, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 or name.endswith("bias"):
                parameter.normal_(std=0.15)
    return model


def pocket_model(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def identity_translator(model: PreTrainedModel, **changes) -> CacheTranslator:
    """The exact translator of a model to itself: every head reads itself through the identity."""
    identity = ModelIdentity.from_model(model)
    maps = []
    for layer_idx, layer in enumerate(identity.geometry.layers):
        heads, dim = layer.num_key_value_heads, layer.head_dim
        blocks = tuple((SourceHead(layer_idx, head),) for head in range(heads))
        zeros = torch.zeros(heads, dim)
        maps.append(LayerMap(blocks, torch.eye(dim).repeat(heads, 1, 1), zeros, zeros))
    return CacheTranslator(identity, identity, tuple(maps), tuple(maps), **changes)


def planted_twin(model: LlamaForCausalLM, seed: int = 0) -> tuple[LlamaForCausalLM, list[list[int]]]:
    """A model of the same function whose key-value heads are permuted and turned by invertible maps.

    Keys of a head may be multiplied by any map that commutes with RoPE (a complex number for each frequency), queries by its inverse
    transpose; values by any invertible matrix, undone in the output projection. Returns the twin and, for each layer, which head of the
    model stands at each head of the twin.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    heads, groups = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    dim = config.hidden_size // config.num_attention_heads
    twin = copy.deepcopy(model)
    twin.config._name_or_path = "twin"
    permutations = []
    for layer in twin.model.layers:
        attention = layer.self_attn
        order = torch.randperm(heads, generator=generator)
        permutations.append(order.tolist())
        query_order = (order[:, None] * groups + torch.arange(groups)).flatten()
        q = attention.q_proj.weight.data.view(heads * groups, dim, -1)[query_order].double()
        k = attention.k_proj.weight.data.view(heads, dim, -1)[order].double()
        v = attention.v_proj.weight.data.view(heads, dim, -1)[order].double()
        o = attention.o_proj.weight.data.view(-1, heads * groups, dim)[:, query_order].double()
        for head in range(heads):
            of_head = slice(head * groups, (head + 1) * groups)
            turn = _commutes_with_rope(dim, generator)
            k[head] = turn @ k[head]
            q[of_head] = torch.linalg.inv(turn).T @ q[of_head]
            mix = torch.eye(dim, dtype=torch.float64) + 0.3 * torch.randn(dim, dim, dtype=torch.float64, generator=generator)
            v[head] = mix @ v[head]
            o[:, of_head] = o[:, of_head] @ torch.linalg.inv(mix)
        attention.q_proj.weight.data = q.reshape(heads * groups * dim, -1).float()
        attention.k_proj.weight.data = k.reshape(heads * dim, -1).float()
        attention.v_proj.weight.data = v.reshape(heads * dim, -1).float()
        attention.o_proj.weight.data = o.reshape(-1, heads * groups * dim).float()
    return twin, permutations


def _commutes_with_rope(dim: int, generator: torch.Generator) -> torch.Tensor:
    angle = 6.28 * torch.rand(dim // 2, dtype=torch.float64, generator=generator)
    size = 0.5 + torch.rand(dim // 2, dtype=torch.float64, generator=generator)
    cos, sin = torch.diag(size * angle.cos()), torch.diag(size * angle.sin())
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def apply_map(layer_map: LayerMap, states: list[torch.Tensor]) -> torch.Tensor:
    """The affine maps of one layer and role, by their formula: source layers `[B, H_src, T, D_src]` -> `[B, H, T, D]` float64."""
    mapped = []
    for head, (weight, mean_y) in enumerate(zip(layer_map.weight.double(), layer_map.mean_y.double(), strict=True)):
        row = head if len(layer_map.blocks) > 1 else 0
        x = torch.cat([states[layer][:, source].double() for layer, source in layer_map.blocks[row]], -1)
        mapped.append((x - layer_map.mean_x[row].double()) @ weight + mean_y)
    return torch.stack(mapped, 1)
