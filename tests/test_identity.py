"""Digests tell models and tokenizers apart, and the same ones from the same."""

import torch
from builders import MODELS, tiny_model
from transformers import AutoTokenizer

from hf_crosscache.identity import ModelIdentity, same_tokenizer, tokenizer_digest, weights_digest


def test_one_changed_layer_changes_the_digest():
    a, b, c = tiny_model("llama"), tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        c.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    assert weights_digest(a) == weights_digest(b) != weights_digest(c)


def test_the_dtype_does_not_change_the_digest():
    half = tiny_model("llama").to(torch.bfloat16)
    assert weights_digest(half) == weights_digest(tiny_model("llama"))


def test_tokenizers_are_told_apart_by_what_they_do():
    a, b = (AutoTokenizer.from_pretrained(MODELS / name) for name in ("qwen3-small", "qwen3-large"))
    assert same_tokenizer(a, b) and not same_tokenizer(a, AutoTokenizer.from_pretrained(MODELS / "gemma3"))
    b.add_tokens(["<new>"])
    assert tokenizer_digest(a) != tokenizer_digest(b)


def test_absolute_paths_are_not_part_of_an_identity(tmp_path):
    model = tiny_model("llama")
    model.config._name_or_path = str(tmp_path / "my-model")
    assert ModelIdentity.from_model(model).name == "my-model"
    model.config._name_or_path = "org/my-model"
    assert ModelIdentity.from_model(model).name == "org/my-model"


def test_identity_survives_json():
    identity = ModelIdentity.from_model(tiny_model("qwen3"))
    again = ModelIdentity.from_dict(identity.to_dict())
    again.check_model(tiny_model("qwen3"), "source")
    assert again.tokenizer_digest is None
