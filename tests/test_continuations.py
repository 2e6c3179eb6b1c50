"""Scores are those of the model's own logits, whatever the padding, and of what greedy decoding gives."""

import pytest
import torch
from builders import CONFORMING, generate, random_ids, tiny_model

from hf_crosscache.cache import TranslatedCache
from hf_crosscache.compat import cache_argument
from hf_crosscache.continuations import read, score


def expected(model, row, continuation):
    ids = torch.tensor([[*row, *continuation]])
    log_p = model(ids).logits[0, len(row) - 1 : -1].log_softmax(-1)
    return log_p.gather(-1, torch.tensor(continuation)[:, None]).sum().item(), (log_p.argmax(-1) == torch.tensor(continuation)).tolist()


@pytest.mark.parametrize("family", CONFORMING)
@torch.no_grad()
def test_rows_of_any_length_are_scored_behind_a_fork(family):
    model, context = tiny_model(family), random_ids(2, 20)
    cache = read(model, context)
    tails, continuations = ([3, 4, 5], [6]), ([7, 8], [9, 10, 11, 12])
    for _ in range(2):  # the cache itself stays as it was
        likelihoods, likeliest = score(model, cache.fork(), tails, continuations)
        for row in range(2):
            likelihood, greedy = expected(model, [*context[row].tolist(), *tails[row]], continuations[row])
            assert likelihoods[row].item() == pytest.approx(likelihood, abs=1e-3) and likeliest[row].tolist() == greedy


@torch.no_grad()
def test_padding_on_the_left_of_a_context_changes_nothing():
    model, context = tiny_model("llama"), random_ids(2, 20)
    context[0, :6] = 0
    mask = torch.ones_like(context)
    mask[0, :6] = 0
    cache = TranslatedCache.empty(model)
    model(context, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), **cache_argument(cache))
    likelihoods, _ = score(model, cache, ([3, 4], [6]), ([7], [8, 9, 10]), mask)
    assert likelihoods[0].item() == pytest.approx(expected(model, [*context[0, 6:].tolist(), 3, 4], [7])[0], abs=1e-4)
    assert likelihoods[1].item() == pytest.approx(expected(model, [*context[1].tolist(), 6], [8, 9, 10])[0], abs=1e-4)


def test_greedy_decoding_gives_what_is_likeliest():
    model, ids = tiny_model("qwen2"), random_ids(1, 12)
    answer = generate(model, ids, max_new_tokens=5)[0, 12:].tolist()
    other = [*answer[:3], (answer[3] + 1) % 256, answer[4]]
    for continuation, greedy in ((answer, True), (other, False)):
        _, likeliest = score(model, read(model, ids[:, :8]), [ids[0, 8:].tolist()], [continuation])
        assert likeliest[0].all().item() is greedy
