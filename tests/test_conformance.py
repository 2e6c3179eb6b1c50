"""Whatever `generate` and users do with a cache: a model that reads a translation of its own states gives what it gives natively."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from builders import CONFORMING, TOKENS, a_model, generate, random_ids, tiny_model
from transformers import DynamicCache

from hf_crosscache import TranslatedCache
from hf_crosscache.compat import cache_argument, own_layers, prefill
from hf_crosscache.errors import HandOffError


@pytest.fixture(params=CONFORMING)
def family(request):
    return request.param


@pytest.fixture
def model(family):
    return a_model(family)[0]


def translator_of(model):
    return next(known for one, known in map(a_model, CONFORMING) if one is model)


def handed_over(model, ids, context=None, **changes):
    source_cache, _ = prefill(model, ids[:, :context])
    return TranslatedCache(source_cache, translator_of(model), target_model=model, input_ids=ids, **changes)


def native(model, ids, tokens):
    """A native cache as generate would have it: sliding layers keep their window."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :tokens], use_cache=True, **cache_argument(cache))
    return cache


def assert_same_states(mine, theirs):
    assert mine.get_seq_length() == theirs.get_seq_length()
    assert list(mine.is_sliding) == [layer.is_sliding for layer in own_layers(theirs)]
    for layer_idx, (one, other) in enumerate(zip(mine.layers, own_layers(theirs), strict=True)):
        assert one.get_mask_sizes(3) == other.get_mask_sizes(3)
        for role in ("keys", "values"):
            torch.testing.assert_close(
                getattr(one, role),
                getattr(other, role),
                rtol=1e-4,
                atol=1e-4,
                msg=lambda text: f"layer {layer_idx}: {text}",  # noqa: B023
            )


DECODING = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 20},
    "several_sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "returned_beams": {"num_beams": 3, "num_return_sequences": 2},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize("mode", DECODING)
def test_decoding(model, mode):
    one_row = mode in ("prompt_lookup",)
    ids = random_ids(1 if one_row else 2, 24)
    if one_row:
        ids[:, 12:] = ids[:, :12]  # something to look up
    found = generate(model, ids, handed_over(model, ids), **DECODING[mode])
    wanted = generate(model, ids, **{k: v for k, v in DECODING[mode].items() if k != "prompt_lookup_num_tokens"})
    if mode == "scores":
        torch.testing.assert_close(torch.stack(found.scores), torch.stack(wanted.scores), rtol=1e-3, atol=1e-3)
        found, wanted = found.sequences, wanted.sequences
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("assistant", ["same", "other"])
def test_assisted_decoding(model, family, assistant):
    ids = random_ids(1, 24)
    helper = model if assistant == "same" else tiny_model(family, seed=7)
    helper.generation_config.num_assistant_tokens = 2
    found = generate(model, ids, handed_over(model, ids), assistant_model=copy.deepcopy(helper))
    assert torch.equal(found, generate(model, ids))


@pytest.mark.parametrize("context,recompute_last", [(24, 1), (24, 9), (24, 23), (5, 0), (5, 2)])
def test_lengths(model, context, recompute_last):
    ids = random_ids(2, 24)
    cache = handed_over(model, ids, context, recompute_last=recompute_last)
    assert_same_states(copy.deepcopy(cache), native(model, ids, context - recompute_last))
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


def test_streaming(model):
    class Streamer:
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen.append(value.flatten())

        def end(self):
            pass

    ids = random_ids(1, 20)
    mine, theirs = Streamer(), Streamer()
    generate(model, ids, handed_over(model, ids), streamer=mine)
    generate(model, ids, streamer=theirs)
    assert torch.equal(torch.cat(mine.seen), torch.cat(theirs.seen))


def left_padded(model, length, padding):
    ids, mask = random_ids(len(padding), length), torch.ones(len(padding), length, dtype=torch.long)
    for row, pads in enumerate(padding):
        ids[row, :pads], mask[row, :pads] = model.config.pad_token_id, 0
    return ids, mask


def padded_cache(model, ids, mask, context=None, **changes):
    source_cache, _ = prefill(model, ids[:, :context], attention_mask=mask[:, :context])
    return TranslatedCache(source_cache, translator_of(model), target_model=model, input_ids=ids, attention_mask=mask, **changes)


def test_left_padding(model):
    ids, mask = left_padded(model, 24, (0, 5, 11))
    cache = padded_cache(model, ids, mask)
    assert torch.equal(generate(model, ids, cache, attention_mask=mask), generate(model, ids, attention_mask=mask))


def test_right_padded_source(model):
    lengths, longest = (16, 9, 12), 16
    rows = random_ids(3, 24)
    source_ids, source_mask = torch.zeros(3, longest, dtype=torch.long), torch.zeros(3, longest, dtype=torch.long)
    ids, mask = torch.zeros(3, 24, dtype=torch.long), torch.zeros(3, 24, dtype=torch.long)
    for row, length in enumerate(lengths):  # each row: its context, then 8 tokens more
        source_ids[row, :length], source_mask[row, :length] = rows[row, :length], 1
        ids[row, -length - 8 :], mask[row, -length - 8 :] = rows[row, : length + 8], 1
    source_cache, _ = prefill(model, source_ids, attention_mask=source_mask)
    cache = TranslatedCache(
        source_cache, translator_of(model), target_model=model, input_ids=ids, attention_mask=mask,
        source_attention_mask=source_mask, recompute_last=0,
    )  # fmt: skip
    assert cache.get_seq_length() == 16
    assert torch.equal(generate(model, ids, cache, attention_mask=mask), generate(model, ids, attention_mask=mask))


def test_turn_after_turn(model):
    ids = random_ids(1, 20)
    cache, plain = handed_over(model, ids), DynamicCache(config=model.config)
    for seed in range(3):
        mine, theirs = generate(model, ids, cache), generate(model, ids, plain)
        assert torch.equal(mine, theirs)
        ids = torch.cat([mine, random_ids(1, 5, seed=seed)], 1)
    assert_same_states(cache, plain)


def test_fork(model):
    ids = random_ids(1, 24)
    cache = handed_over(model, ids, 16, recompute_last=0)
    for state in ("pending", "translated"):
        forks = [cache.fork() for _ in range(2)]
        for seed, fork in enumerate(forks):
            longer = torch.cat([ids[:, :16], random_ids(1, 4, seed=seed)], 1)
            assert torch.equal(generate(model, longer, fork), generate(model, longer))
            assert cache.get_seq_length() == 16 and cache.is_pending == (state == "pending")
        cache.translate()
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


def test_extend(model):
    ids = random_ids(2, 30)
    for first, touch in ((12, False), (20, True)):
        cache = handed_over(model, ids, first, recompute_last=0)
        if touch:
            with torch.no_grad():
                model(ids[:, first : first + 3], attention_mask=torch.ones(2, first + 3), **cache_argument(cache))
        longer, _ = prefill(model, ids[:, :28])
        cache.extend(longer, input_ids=ids)
        assert cache.get_seq_length() == 27 and cache.is_pending
        assert_same_states(copy.deepcopy(cache), native(model, ids, 27))
        assert torch.equal(generate(model, ids, cache), generate(model, ids))


@pytest.mark.parametrize("first,touch", [(14, False), (20, True)], ids=["two_hand_offs", "read_between"])
@pytest.mark.parametrize("source_pads", ["left", "right"])
def test_extend_a_padded_batch(model, source_pads, first, touch):
    """Of 14 slots the last row has 3 tokens: the fourth, which is the target's own too, comes with the extension."""
    ids, mask = left_padded(model, 30, (0, 5, 11))
    cache, given = padded_cache(model, ids, mask, first, recompute_last=0), {"input_ids": ids, "attention_mask": mask}
    if touch:
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, first : first + 3]
        with torch.no_grad():
            model(ids[:, first : first + 3], attention_mask=mask[:, : first + 3], position_ids=positions, **cache_argument(cache))
    if source_pads == "left":
        longer, _ = prefill(model, ids[:, :28], attention_mask=mask[:, :28])
    else:
        order = torch.argsort(1 - mask[:, :28], dim=1, stable=True)
        given["source_attention_mask"] = mask[:, :28].gather(1, order)
        longer, _ = prefill(model, ids[:, :28].gather(1, order), attention_mask=given["source_attention_mask"])
    cache.extend(longer, **given)
    assert cache.get_seq_length() == 27 and cache.is_pending
    assert torch.equal(generate(model, ids, cache, attention_mask=mask), generate(model, ids, attention_mask=mask))


def test_extending_a_padded_batch_wrongly_is_refused():
    model, _ = a_model("llama")
    ids, mask = left_padded(model, 30, (0, 5, 11))
    longer, _ = prefill(model, ids, attention_mask=mask)
    cache = padded_cache(model, ids, mask, 20)
    with pytest.raises(HandOffError, match="of a padded batch: pass attention_mask="):
        cache.extend(longer, input_ids=ids)
    with pytest.raises(HandOffError, match=r"begin in the slots \[0, 5, 11\], those of attention_mask in \[11, 5, 0\]"):
        cache.extend(longer, input_ids=ids, attention_mask=mask.flip(0))
    with pytest.raises(HandOffError, match=r"in the slots \[0, 0, 0\], those of attention_mask in \[0, 5, 11\]"):
        handed_over(model, random_ids(3, 30), 20).extend(longer, input_ids=ids, attention_mask=mask)
    cache.extend(longer, input_ids=ids, attention_mask=mask)
    assert torch.equal(generate(model, ids, cache, attention_mask=mask), generate(model, ids, attention_mask=mask))


OPERATIONS = {
    "crop": lambda c: c.crop(-5),
    "crop_nothing": lambda c: c.crop(0),
    "reorder": lambda c: c.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda c: c.batch_repeat_interleave(3),
    "select": lambda c: c.batch_select_indices(torch.tensor([1])),
    "deepcopy": lambda c: copy.deepcopy(c),
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
    "record": lambda c: c.activate_past_recording(),
    "offload": lambda c: [(layer.offload(), layer.prefetch()) for layer in c.layers] and None,
    "reset": lambda c: c.reset(),
}


@pytest.mark.parametrize("translated", [False, True], ids=["pending", "translated"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(model, operation, translated):
    ids = random_ids(2, 20)
    cache, plain = handed_over(model, ids), native(model, ids, 19)
    if translated:
        cache.translate()
    slides = operation in ("crop", "crop_nothing") and any(plain.is_sliding)
    if slides and (translated or operation == "crop_nothing"):  # as transformers: what has left a window cannot come back
        for one in (cache, plain):
            with pytest.raises(RuntimeError, match="does not track past states"):
                OPERATIONS[operation](one)
        return
    mine = OPERATIONS[operation](cache) or cache
    theirs = native(model, ids, 14) if slides else OPERATIONS[operation](plain) or plain
    if operation == "reset":
        assert mine.get_seq_length() == 0 and not mine.is_initialized
        assert torch.equal(generate(model, ids, mine), generate(model, ids))
        return
    assert len(mine) == len(own_layers(theirs)) and not mine.is_compileable and mine.get_seq_length() == theirs.get_seq_length()
    if operation == "pickle":
        assert type(mine) is DynamicCache
    batch = {"repeat": 6, "select": 1}.get(operation, 2)
    step = random_ids(batch, 3, seed=4)
    mask = torch.ones(batch, mine.get_seq_length() + 3)
    with torch.no_grad():
        found = model(step, attention_mask=mask, **cache_argument(mine)).logits
        wanted = model(step, attention_mask=mask, **cache_argument(theirs)).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert_same_states(mine, theirs)


def test_iteration_and_export(model):
    ids = random_ids(2, 20)
    theirs = native(model, ids, 19)
    states = [layer for layer in theirs if layer[0] is not None]  # none of layers that read those of an earlier one
    for (k1, v1, w1), (k2, v2, w2) in zip(handed_over(model, ids), states, strict=True):
        torch.testing.assert_close((k1, v1), (k2, v2), rtol=1e-4, atol=1e-4)
        assert w1 == w2
    plain = handed_over(model, ids).to_dynamic_cache()
    assert [type(layer) for layer in plain.layers] == [type(layer) for layer in own_layers(theirs)]
    assert torch.equal(generate(model, ids, plain), generate(model, ids))
    static = handed_over(model, ids).to_static_cache(40)
    assert static.is_compileable and torch.equal(generate(model, ids, static), generate(model, ids))


SILENTLY_WRONG = {
    "suffix_without_mask": lambda m, ids, c: m.generate(ids[:, 16:], max_new_tokens=4, do_sample=False, **cache_argument(c)),
    "suffix_mask": lambda m, ids, c: generate(m, ids[:, 16:], c),
    "as_long_as_the_prompt": lambda m, ids, c: generate(m, ids[:, :16], c),
    "longer_than_the_prompt": lambda m, ids, c: generate(m, ids[:, :9], c),
    "no_cache": lambda m, ids, c: generate(m, ids, c, use_cache=False),
    "another_prompt": lambda m, ids, c: generate(m, ids + 1, c),
    "whole_prompt_in_forward": lambda m, ids, c: m(ids, **cache_argument(c)),
    "short_mask_in_forward": lambda m, ids, c: m(ids[:, 16:], attention_mask=torch.ones(1, 8), **cache_argument(c)),
}


@pytest.mark.parametrize("case", SILENTLY_WRONG)
def test_what_transformers_gets_wrong_is_refused(model, case):
    ids = random_ids(1, 24)
    cache = handed_over(model, ids, 16, recompute_last=0)
    with pytest.raises(HandOffError), torch.no_grad():
        SILENTLY_WRONG[case](model, ids, cache)


def test_suffix_ids_with_the_mask_of_the_whole(model):
    ids = random_ids(2, 24)
    cache = handed_over(model, ids, 16, recompute_last=0)
    found = generate(model, ids[:, 16:], cache, attention_mask=torch.ones_like(ids))
    assert torch.equal(found[:, 8:], generate(model, ids)[:, 24:])


def test_inputs_embeds(model):
    ids = random_ids(2, 24)
    embeds = model.get_input_embeddings()(ids)
    found = generate(model, None, handed_over(model, ids), inputs_embeds=embeds, attention_mask=torch.ones_like(ids))
    assert torch.equal(found, generate(model, None, inputs_embeds=embeds, attention_mask=torch.ones_like(ids)))


def test_chunked_prefill(model):
    """Right from transformers 5.23 on, refused before."""
    ids = random_ids(1, 24)
    cache = handed_over(model, ids, 12, recompute_last=0)
    refused = pytest.raises(HandOffError, match="prefill_chunk_size") if _chunks_are_broken() else nullcontext()
    with refused:
        assert torch.equal(generate(model, ids, cache, prefill_chunk_size=5), generate(model, ids))


def _chunks_are_broken():
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(model, attention):
    ids = random_ids(2, 24)
    before = model.config._attn_implementation
    if attention == "sdpa" and not model._supports_sdpa:
        with pytest.raises(ValueError, match="does not support"):
            model.set_attn_implementation(attention)
        return
    try:
        model.set_attn_implementation(attention)
        assert torch.equal(generate(model, ids, handed_over(model, ids)), generate(model, ids))
    finally:
        model.set_attn_implementation(before)


def test_tokens_are_counted():
    assert TOKENS > 8  # generation passes the windows of the tiny models
