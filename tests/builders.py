"""Small models, exact translators and planted twins that the tests share."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from hf_crosscache.compat import cache_argument
from hf_crosscache.features import NativeFeatures, heads_of
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
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
_UNTIED = {"head_dim": 16, "tie_word_embeddings": False}  # a tied random model repeats the last token, whatever came before
_GEMMA = {**_MIXED, **_UNTIED, "query_pre_attn_scalar": 16}
# Two of five layers read the states of an earlier one of their kind.
_SHARING = {
    **_UNTIED,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
}
MORE_FAMILIES = {
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, _GEMMA),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, _GEMMA),
    "ministral": (MinistralForCausalLM, MinistralConfig, {**_MIXED, "head_dim": 16}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {**_MIXED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 131072},
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": False}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "glm4": (
        Glm4ForCausalLM,
        Glm4Config,
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma3n": (
        Gemma3nForCausalLM,
        Gemma3nTextConfig,
        {
            **_SHARING,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {**_SHARING, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    ),
    "gemma4_tied": (  # values are the keys before their norm and rotation
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {**_SHARING, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True},
    ),
    "cohere2": (Cohere2ForCausalLM, Cohere2Config, {**_MIXED, "tie_word_embeddings": False}),
}


def tiny_model(family: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A model with random weights, large enough that its greedy tokens depend on the context."""
    model_class, config_class, extra = {**FAMILIES, **MORE_FAMILIES}[family]
    torch.manual_seed(seed)
    return _with_random_weights(model_class(config_class(**{**_SHAPE, **extra, **changes})))


def tiny_model_that_sees() -> PreTrainedModel:
    """A Gemma 3 with a vision tower, whose image token is VOCABULARY - 1."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text = Gemma3TextConfig(**{**_SHAPE, **MORE_FAMILIES["gemma3"][2]})
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=VOCABULARY - 1)
    model = _with_random_weights(Gemma3ForConditionalGeneration(config))
    model.generation_config.eos_token_id = None
    return model


def _with_random_weights(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or name.endswith(("bias", "correct_output_scale")):
                parameter.normal_(std=0.15)
    return model.eval()


# One of each kind: dense, biased, QK-norm, soft-capped, alternating windows, layers that read the states of earlier ones, windows
# everywhere, attention sinks, NoPE layers, norms after, fused projections, partial and interleaved RoPE.
CONFORMING = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3n", "gemma4", "mistral_sliding", "ministral", "gpt_oss", "smollm3", "olmo2",
    "phi3", "glm4", "cohere2",
)  # fmt: skip
TOKENS = 12


def generate(model, ids, cache=None, **settings):
    """Generate greedily, given a cache in the spelling of the installed transformers."""
    torch.manual_seed(0)
    given = {} if cache is None else cache_argument(cache)
    settings = {
        "do_sample": False,
        "max_new_tokens": TOKENS,
        **({} if ids is None else {"attention_mask": torch.ones_like(ids)}),
        **settings,
    }
    return model.generate(ids, **settings, **given)


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


def native_translator(model, native_layers, width=24):
    """The exact translator whose maps also read features, with no weight; what the native layers would read is not to be used."""
    exact = identity_translator(model)
    layers = exact.source.geometry.layers
    shape, hidden = layers[0], model.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    features = NativeFeatures(native_layers, torch.zeros(hidden), torch.randn(hidden, width, generator=generator))
    extra = [divmod(i, shape.num_key_value_heads) for i in range(heads_of(width, shape))]
    extra = [SourceHead(len(layers) + layer, head) for layer, head in extra]

    def widened(layer_map):
        blocks = tuple((*row, *extra) for row in layer_map.blocks)
        weight = torch.nn.functional.pad(layer_map.weight, (0, 0, 0, len(extra) * shape.head_dim))
        mean_x = torch.nn.functional.pad(layer_map.mean_x, (0, len(extra) * shape.head_dim))
        return LayerMap(blocks, weight, mean_x, layer_map.mean_y)

    sides = {}
    for role in ("keys", "values"):
        sides[role] = (*[None] * native_layers, *[widened(m) for m in getattr(exact, role)[native_layers:]])
    return CacheTranslator(exact.source, exact.target, **sides, features=features)


@functools.cache
def a_model(family: str) -> tuple[PreTrainedModel, CacheTranslator]:
    """A tiny model and its exact translator to itself, shared by the tests that change neither."""
    model = tiny_model(family)
    return model, identity_translator(model)


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
