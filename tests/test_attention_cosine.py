"""Attention over exact states is exact; what one layer gets wrong shows where it should, and nowhere else."""

from dataclasses import replace

import pytest
import torch
from builders import CONFORMING, a_model, random_ids, tiny_model

from hf_crosscache.attention_cosine import attention_cosine
from hf_crosscache.errors import UnsupportedModelError
from hf_crosscache.guard import guard
from hf_crosscache.texts import read_documents, token_windows


@pytest.mark.parametrize("family", CONFORMING)
def test_self_translation_is_exact_in_every_head(family):
    model, exact = a_model(family)
    found = attention_cosine(exact, model, model, random_ids(4, 24), 16, batch_size=2)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads  # those that share their states too
    assert found.n == 4 and found.same_queries.shape == found.as_served.shape == (layers, heads)
    for cosine in (found.same_queries, found.as_served):
        torch.testing.assert_close(cosine, torch.ones(layers, heads), atol=1e-5, rtol=0)
    assert found.wrong_document.mean() < 0.9


def test_one_layer_translated_badly():
    model, exact = a_model("llama")
    values = list(exact.values)
    weight = values[1].weight.clone()
    weight[1] = torch.randn(weight[1].shape, generator=torch.Generator().manual_seed(0))
    values[1] = replace(values[1], weight=weight)
    found = attention_cosine(replace(exact, values=tuple(values)), model, model, random_ids(4, 24), 16)
    queries = model.config.num_attention_heads // 2  # that read KV head 1
    bad = torch.zeros_like(found.same_queries, dtype=torch.bool)
    bad[1, queries:] = True
    assert (found.same_queries[bad] < 0.9).all() and (found.same_queries[~bad] > 1 - 1e-5).all()
    assert (found.as_served[0] > 1 - 1e-5).all() and (found.as_served[2] < 1 - 1e-3).all()


def test_real_pair_lies_between_the_control_and_one(translator, small, large, tokenizer, texts):
    ids = token_windows(read_documents(texts), tokenizer, split="test", length=192, count=8)
    found = attention_cosine(translator, small, large, ids, 160)
    assert found.wrong_document.mean() < found.as_served.mean() <= found.same_queries.mean() < 1
    assert (found.same_queries - found.wrong_document > -0.05).all()


def test_it_leaves_no_hook_behind():
    model, exact = a_model("qwen3")
    guard(model)  # which stays, as after any hand-off
    hooks = [list(module._forward_pre_hooks) for module in model.modules()]
    attention_cosine(exact, model, model, random_ids(2, 12), 8)
    assert [list(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_a_target_without_output_projections_is_refused():
    model, exact = tiny_model("llama"), a_model("llama")[1]
    attention = model.model.layers[1].self_attn
    attention.dense = attention.o_proj
    del attention.o_proj
    with pytest.raises(UnsupportedModelError, match=r"Target, layer 1: `self_attn.o_proj` expected"):
        attention_cosine(exact, model, model, random_ids(2, 12), 8)
