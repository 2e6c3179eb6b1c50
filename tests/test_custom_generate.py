"""Decoding that transformers keeps outside itself: its errors leave a cache as it was, and a recipe may do with it what it likes."""

import pytest
import torch
from builders import a_model, generate, random_ids
from transformers import DynamicCache, dynamic_module_utils

from hf_crosscache import TranslatedCache
from hf_crosscache.compat import prefill

# A contrastive search of one kind: the likeliest tokens are tried in one batch, and the one least like what went before stays. What it does
# with a cache is what such recipes do: rows are repeated, read behind, and all but one of each let go.
RECIPE = """
import torch


def search(model, input_ids, logits_processor, stopping_criteria, generation_config, candidates=3, **kwargs):
    (name,) = {"cache", "past_key_values"} & kwargs.keys()
    cache, rows = kwargs[name], input_ids.shape[0]

    def read(ids):
        held = cache.get_seq_length()
        positions = torch.arange(held, held + ids.shape[1]).expand(ids.shape)
        mask = torch.ones(len(ids), held + ids.shape[1], dtype=torch.long)
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache}).logits

    seen = read(input_ids[:, cache.get_seq_length():])
    while not stopping_criteria(input_ids, None).all():
        likely = seen[:, -1].softmax(-1).topk(candidates)
        cache.batch_repeat_interleave(candidates)
        tried = read(likely.indices.view(-1, 1))
        like = torch.cosine_similarity(tried, seen.repeat_interleave(candidates, 0), dim=-1).amax(1).view(rows, -1)
        best = (0.4 * likely.values - 0.6 * like).argmax(1)
        chosen = best + candidates * torch.arange(rows)
        cache.batch_select_indices(chosen)
        seen = torch.cat([seen, tried[chosen]], 1)
        input_ids = torch.cat([input_ids, likely.indices.gather(1, best[:, None])], 1)
    return input_ids


def generate(model, *args, **kwargs):
    return type(model).generate(model, *args, custom_generate=search, **kwargs)
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "contrastive" / "custom_generate").mkdir(parents=True)
    (tmp_path / "contrastive" / "custom_generate" / "generate.py").write_text(RECIPE)
    return str(tmp_path / "contrastive")


def handed_over(model, translator, ids):
    return TranslatedCache(prefill(model, ids)[0], translator, target_model=model, input_ids=ids)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma3n"])
def test_a_recipe_of_ones_own_reads_a_translated_cache(family, recipe):
    (model, translator), ids = a_model(family), random_ids(2, 24)
    settings = {"custom_generate": recipe, "trust_remote_code": True}
    native = DynamicCache(config=model.config)
    generate(model, ids[:, :23], native, max_new_tokens=1)  # reads all but the last token
    found = generate(model, ids, handed_over(model, translator, ids), **settings)
    assert torch.equal(found, generate(model, ids, native, **settings))
    assert not torch.equal(found, generate(model, ids))  # the recipe is not greedy decoding


@pytest.mark.parametrize(
    "settings,name",
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "Contrastive Search"),
        ({"force_words_ids": [[5]], "num_beams": 2}, "Constrained Beam Search"),
    ],
)
def test_searches_that_left_transformers_say_where_they_are_and_leave_the_cache_as_it_was(settings, name):
    (model, translator), ids = a_model("llama"), random_ids(2, 24)
    cache = handed_over(model, translator, ids)
    with pytest.raises(ValueError, match=f"{name} requires `trust_remote_code=True`.*since it loads"):
        generate(model, ids, cache, **settings)
    assert cache.is_pending and torch.equal(generate(model, ids, cache), generate(model, ids))
