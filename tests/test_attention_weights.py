"""Weights are what the gradients of attention say, come from later queries alone, and never rest on too few rows."""

import pytest
import torch
from builders import CONFORMING, a_model, random_ids, tiny_model

from hf_crosscache import CacheGeometry
from hf_crosscache.attention_weights import boundaries, normalised, received, received_attention, with_effective_size
from hf_crosscache.compat import decoder_of, prefill, states_of
from hf_crosscache.errors import UnsupportedModelError

ASKED = torch.tensor([3, 8])


def attention(query, key, value, at, scaling, sliding_window=None, softcap=None, sinks=None):
    """The output of one query head at one position, by its formula in float64."""
    scores = scaling * key @ query[at]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    slots = torch.arange(len(key))
    hidden = slots > at if sliding_window is None else (slots > at) | (slots <= at - sliding_window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None]])
    return scores.softmax(-1)[: len(key)] @ value


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 4}, {"softcap": 1.5}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_weights_are_the_squared_gradients_of_the_attention_output(settings):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 9, 6), torch.randn(1, 2, 9, 6), torch.randn(1, 2, 9, 6)
    by_keys, by_values = received(query, key, value, ASKED, scaling=0.7, **settings)
    assert by_keys.shape == by_values.shape == (1, 2, 2, 9)
    for head in range(2):
        for row, at in enumerate(ASKED.tolist()):
            want_keys, want_values = torch.zeros(9).double(), torch.zeros(9).double()
            for u in (2 * head, 2 * head + 1):
                own = {**settings, "sinks": settings["sinks"][u].double()} if "sinks" in settings else settings
                output = lambda k, v, u=u, at=at, own=own: attention(query[0, u].double(), k, v, at, 0.7, **own)  # noqa: E731
                of_k, of_v = torch.autograd.functional.jacobian(output, (key[0, head].double(), value[0, head].double()))
                want_keys += of_k.square().sum((0, 2))
                want_values += of_v.square().sum((0, 2)) / 6
            torch.testing.assert_close(by_keys[0, head, row, :at].double(), want_keys[:at], rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(by_values[0, head, row, :at].double(), want_values[:at], rtol=1e-4, atol=1e-7)
            assert not by_keys[0, head, row, at:].any() and not by_values[0, head, row, at:].any()


@pytest.mark.parametrize("family", CONFORMING)
def test_weights_are_those_of_the_models_own_attention(family):
    """Against the probabilities that eager attention gives out, in every family; a layer that reads another's states counts there."""
    model, geometry, ids = tiny_model(family), CacheGeometry.from_model(a_model(family)[0]), random_ids(2, 24)
    model.set_attn_implementation("eager")
    with received_attention(model, geometry, skip=2, least_effective=1e-6) as heard:
        prefill(model, ids)
    weights = heard.weights()
    with torch.no_grad():
        probabilities = decoder_of(model)(input_ids=ids, output_attentions=True, use_cache=False).attentions
    assert len(weights.keys) == len(weights.values) == len(geometry)
    for layer_idx, layer in enumerate(geometry.layers):
        readers = [p for p, read in zip(probabilities, heard.read_by, strict=True) if read == layer_idx]
        want = 0
        for p in readers:
            a = p[:, :, boundaries(24, 2)].float().unflatten(1, (layer.num_key_value_heads, -1)).square()  # [B, H, u, C, T]
            before = torch.arange(24) < boundaries(24, 2)[:, None]
            want = want + normalised((a * before).sum(2), 2) / len(readers)
        torch.testing.assert_close(weights.values[layer_idx], want, rtol=1e-3, atol=1e-4)
        for role in (weights.keys, weights.values):
            assert role[layer_idx].shape == (2, layer.num_key_value_heads, 22) and (role[layer_idx] >= 0).all()
            torch.testing.assert_close(role[layer_idx].mean(-1), torch.ones(2, layer.num_key_value_heads))


@pytest.mark.parametrize("family", [family for family in CONFORMING if family not in ("gemma2", "gpt_oss")])  # these two are eager alone
def test_weights_do_not_depend_on_the_implementation_of_attention(family):
    model, ids = tiny_model(family), random_ids(2, 24)
    geometry, found = CacheGeometry.from_model(model), []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with received_attention(model, geometry) as heard:
            prefill(model, ids)
        found.append(heard.weights())
    for role in ("keys", "values"):
        for one, another in zip(*(getattr(weights, role) for weights in found), strict=True):
            torch.testing.assert_close(one, another, rtol=1e-3, atol=1e-4)


def test_no_position_is_weighted_by_queries_before_it():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 30, 4), torch.randn(1, 2, 30, 4), torch.randn(1, 2, 30, 4)
    asked = boundaries(30)
    changed = query.clone()
    changed[:, :, :20] = 9.0
    for one, another in zip(
        received(query, key, value, asked, scaling=1.0), received(changed, key, value, asked, scaling=1.0), strict=True
    ):
        late = asked >= 20
        assert torch.equal(one[:, :, late], another[:, :, late])
        assert not torch.equal(one[:, :, ~late], another[:, :, ~late])
        for row, at in enumerate(asked.tolist()):
            assert not one[:, :, row, at:].any() and one[:, :, row, :at].any()


@pytest.mark.parametrize("length,skip", [(1024, 0), (512, 4), (24, 4), (13, 0), (6, 4), (5, 4), (1, 0)])
def test_boundaries_rise_to_the_last_position(length, skip):
    asked = boundaries(length, skip)
    assert asked[-1] == length - 1 and (asked.diff() > 0).all() and asked[0] == min(max(12, skip + 1), length - 1)
    assert len(asked) <= 32 and (length < 512 or len(asked) == 32)


def test_every_boundary_hands_out_the_same_mass():
    by_boundary = torch.tensor([[[[1.0, 3.0, 0.0, 0.0], [200.0, 0.0, 200.0, 0.0]]]])
    torch.testing.assert_close(normalised(by_boundary), torch.tensor([[[1.5, 1.5, 1.0, 0.0]]]))
    torch.testing.assert_close(normalised(torch.zeros(1, 1, 2, 4)), torch.ones(1, 1, 4))
    torch.testing.assert_close(normalised(by_boundary, 1), torch.tensor([[[1.5, 1.5, 0.0]]]))


@pytest.mark.parametrize("least", [0.05, 0.3, 1.0])
def test_enough_rows_count(least):
    weights = torch.rand(3, 2, 200, generator=torch.Generator().manual_seed(0)) ** torch.tensor([1.0, 8.0, 60.0])[:, None, None]
    weights = weights / weights.mean(-1, keepdim=True)
    mixed = with_effective_size(weights, least)
    effective = mixed.sum(-1).square() / mixed.square().sum(-1) / 200
    before = weights.sum(-1).square() / weights.square().sum(-1) / 200
    torch.testing.assert_close(effective, before.clamp_min(least), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed.mean(-1), torch.ones(3, 2))
    assert (mixed >= 0).all()
    torch.testing.assert_close(with_effective_size(torch.ones(2, 5), least), torch.ones(2, 5))


def test_it_leaves_the_model_as_it_was():
    model, ids = tiny_model("qwen3"), random_ids(1, 20)
    geometry = CacheGeometry.from_model(model)
    before = states_of(prefill(model, ids)[0])
    with received_attention(model, geometry) as heard:
        during = states_of(prefill(model, ids)[0])
    first = heard.weights()
    after = states_of(prefill(model, ids)[0])  # no longer heard
    for found in (during, after):
        assert all(torch.equal(a, b) for one, other in zip(before, found, strict=True) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.keys, heard.weights().keys, strict=True))


def test_attention_that_cannot_be_heard_is_refused():
    model = tiny_model("llama")
    geometry = CacheGeometry.from_model(model)
    with received_attention(model, geometry) as heard:
        pass
    with pytest.raises(UnsupportedModelError, match="layer 0: its queries do not pass"):
        heard.weights()
    with pytest.raises(UnsupportedModelError, match="layer 1: a position bias"):
        heard.hear(1, *[torch.zeros(1, 2, 4, 4)] * 3, {"position_bias": torch.zeros(1)})
