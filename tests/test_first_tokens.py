"""The first tokens of each row are the target's own, wherever the row begins."""

import pytest
import torch
from builders import identity_translator, random_ids, tiny_model

from hf_crosscache import CacheGeometry, first_tokens
from hf_crosscache.compat import prefill
from hf_crosscache.context import Context
from hf_crosscache.errors import HandOffError
from hf_crosscache.native_states import Opening
from hf_crosscache.prompt import Prompt
from hf_crosscache.source import SourceStates

MODEL = tiny_model("llama")
TRANSLATOR = identity_translator(MODEL)


def sinks(ids, *, model=MODEL, translator=TRANSLATOR, sink_tokens=None, mask=None, length=None):
    source = SourceStates(prefill(MODEL, ids)[0], CacheGeometry.from_model(MODEL), {0: 1})
    context = Context.of(*ids.shape, 1, mask, None)
    return first_tokens.of(translator, model, Prompt.of(ids, mask, source, context, None), sink_tokens, context)


@pytest.mark.parametrize("sink_tokens,length", [(None, 4), (1, 1), (7, 7), (99, 11)])
def test_they_are_what_the_target_reads_of_them(sink_tokens, length):
    ids = random_ids(2, 12)
    found, whole = sinks(ids, sink_tokens=sink_tokens), prefill(MODEL, ids)[0]
    assert found.length == length
    for layer_idx, layer in enumerate(whole.layers):
        torch.testing.assert_close(found.keys[layer_idx], layer.keys[:, :, :length], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.values[layer_idx], layer.values[:, :, :length], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found.keys[0][0], found.keys[0][1])  # of each row its own


def test_there_may_be_none():
    assert sinks(random_ids(1, 12), sink_tokens=0) is None
    assert sinks(random_ids(1, 12), sink_tokens=-1) is None


def test_those_of_padded_rows_are_read_from_position_0():
    ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    found = sinks(ids, mask=mask)
    alone = sinks(ids[1:, 5:])
    for layer_idx in range(3):
        torch.testing.assert_close(found.keys[layer_idx][1:], alone.keys[layer_idx], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found.keys[0][1:], sinks(ids).keys[0][1:], atol=1e-2)


def test_a_row_that_is_shorter_than_they_are():
    ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :9] = 0  # 3 tokens, of which 2 are context
    found = sinks(ids, mask=mask)
    torch.testing.assert_close(found.values[1][1:, :, :2], sinks(ids[1:, 9:]).values[1], rtol=1e-4, atol=1e-5)


def test_an_opening_serves_without_a_model_where_every_row_begins_with_it():
    ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    ids[0, :2] = ids[1, 5:7] = torch.tensor([7, 8])
    native = prefill(MODEL, torch.tensor([[7, 8]]))[0].layers
    opening = Opening((7, 8), tuple(layer.keys for layer in native), tuple(layer.values for layer in native))
    translator = identity_translator(MODEL, opening=opening, sink_tokens=2)
    found = sinks(ids, model=None, translator=translator, mask=mask)
    assert found.length == 2 and torch.equal(found.keys[2], native[2].keys)
    with pytest.raises(HandOffError, match=r"does not begin with the tokens \[7, 8\]"):
        sinks(ids, model=None, translator=translator)  # of the second row, the mask says where it begins
