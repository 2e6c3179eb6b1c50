"""What a prompt says of the tokens that generate hands on: how many are new, and whether they follow the context."""

import pytest
import torch
from builders import VOCABULARY, generate, identity_translator, random_ids, tiny_model, tiny_model_that_sees

from hf_crosscache import CacheGeometry, TranslatedCache
from hf_crosscache.compat import prefill
from hf_crosscache.context import Context
from hf_crosscache.errors import HandOffError
from hf_crosscache.prompt import Prompt
from hf_crosscache.source import SourceStates

IDS = random_ids(2, 12)
KNOWN = Prompt(IDS, None, 2, 8)  # a prompt of 12 tokens, of which 8 came with the hand-off
CPU = torch.device("cpu")


def mask(slots, batch=2):
    return torch.ones(batch, slots, dtype=torch.long)


@pytest.mark.parametrize(
    "length,ids,new_tokens,attention_mask,expected",
    [
        (8, IDS, 4, mask(12), 4),  # a first step, sliced by generate
        (8, IDS, None, mask(12), 4),  # the whole prompt, unsliced
        (8, IDS, None, None, 4),
        (8, IDS[:, 8:], None, mask(12), None),  # what follows alone
        (8, IDS[:, 8:], None, None, None),
        (0, IDS, None, None, None),  # nothing cached
        (12, torch.cat([IDS, IDS], 1), 1, mask(13), 1),  # a step of decoding
        (8, IDS.repeat_interleave(3, 0), None, mask(12, 6), 4),  # beams
        (8, torch.cat([IDS[:, 4:], IDS], 1), None, None, None),  # longer than the cache, yet not of it
    ],
)
def test_tokens_that_are_left_to_read(length, ids, new_tokens, attention_mask, expected):
    assert KNOWN.unread(length, ids, new_tokens, attention_mask) == expected


@pytest.mark.parametrize("new_tokens", [0, -3])
def test_nothing_left_to_read_is_refused(new_tokens):
    with pytest.raises(HandOffError, match="none is left for the target to read"):
        KNOWN.unread(8, IDS[:, :8], new_tokens, mask(8))


@pytest.mark.parametrize("new_tokens", [4, None])
def test_another_prompt_is_refused_at_its_first_token_that_differs(new_tokens):
    other = IDS.clone()
    other[1, 5] += 1
    with pytest.raises(HandOffError, match="differs from the context that the cache was made of at row 1, token 5"):
        KNOWN.unread(8, other, new_tokens, mask(12))
    other = IDS.clone()
    other[:, 8:] += 1  # behind the context, a prompt may be any
    assert KNOWN.unread(8, other, new_tokens, mask(12)) == 4


def test_padding_may_hold_any_token():
    pads = torch.tensor([[1] * 12, [0] * 3 + [1] * 9])
    padded, other = Prompt(IDS, pads, 2, 8), IDS.clone()
    other[1, :3] = 7
    assert padded.unread(8, other, 4, pads) == 4
    other[1, 3] += 1
    with pytest.raises(HandOffError, match="row 1, token 3"):
        padded.unread(8, other, 4, pads)


def test_without_ids_it_says_which_are_missing():
    with pytest.raises(HandOffError, match="Whether these 12 tokens follow the 8 of the cache.*pass input_ids="):
        Prompt(None, None, 2, 8).unread(8, IDS, None, None)
    assert Prompt(None, None, 2, 8).unread(8, IDS, None, mask(12)) == 4
    with pytest.raises(HandOffError, match="ids were not given"):
        Prompt().inputs(0, Context(8), CPU)


@pytest.mark.parametrize("position", [0, 7, 9])
def test_positions_that_do_not_go_on_are_refused(position):
    KNOWN.check_positions(Context(8), 2, None, torch.tensor([[8, 9]]))
    with pytest.raises(HandOffError, match="do not start at position 8"):
        KNOWN.check_positions(Context(8), 2, None, torch.tensor([[position, position + 1]]))


def test_positions_of_padded_rows_are_those_of_their_tokens():
    context = Context.of(2, 8, 0, torch.tensor([[1] * 8, [0] * 3 + [1] * 5]), None)
    KNOWN.check_positions(context, 1, None, torch.tensor([[8], [5]]))
    KNOWN.check_positions(context, 1, None, torch.tensor([[8], [8], [5], [5]]))  # beams
    for positions in ([[8], [8]], [[5], [8]], [[8], [5], [8], [5]], [[8], [5], [5]]):
        with pytest.raises(HandOffError, match=r"do not start at position \[8, (8, 5, )?5\]"):
            KNOWN.check_positions(context, 1, None, torch.tensor(positions))


def test_what_the_target_is_given_to_read_the_context_itself():
    assert torch.equal(KNOWN.inputs(0, Context(8), CPU)["input_ids"], IDS[:, :8])
    later = KNOWN.inputs(5, Context(8), CPU)
    assert torch.equal(later["input_ids"], IDS[:, 5:8]) and later["position_ids"].tolist() == [[5, 6, 7]] * 2
    pads = torch.tensor([[1] * 12, [0] * 3 + [1] * 9])
    padded = Prompt(IDS, pads, 2, 8).inputs(0, Context.of(2, 8, 0, pads, None), CPU)
    assert padded["position_ids"][1].tolist() == [0, 0, 0, 0, 1, 2, 3, 4] and torch.equal(padded["attention_mask"], pads[:, :8])


def test_padding_without_a_mask_is_refused_where_it_shows():
    model = tiny_model("llama")
    ids = IDS.clone()
    ids[1, 0] = model.config.pad_token_id
    source = SourceStates(prefill(model, ids)[0], CacheGeometry.from_model(model), {0: 1})
    with pytest.raises(HandOffError, match=r"begin with the padding token 0: pass attention_mask="):
        Prompt.of(ids, None, source, Context(11), model)
    ids[0, 0] = model.config.pad_token_id  # of every row: a token like another, as of models whose padding is their BOS
    assert Prompt.of(ids, None, source, Context(11), model).batch == 2


def test_ids_that_are_no_tensor_are_refused():
    model = tiny_model("llama")
    source = SourceStates(prefill(model, IDS)[0], CacheGeometry.from_model(model), {0: 1})
    with pytest.raises(HandOffError, match="a tensor of token ids expected, a list found"):
        Prompt.of(IDS.tolist(), None, source, Context(11), model)


def test_rows_that_were_moved_are_not_compared():
    model, ids = tiny_model("llama"), random_ids(2, 12)
    cache = TranslatedCache(prefill(model, ids)[0], identity_translator(model), target_model=model, input_ids=ids)
    cache.batch_select_indices(torch.tensor([1]))
    assert torch.equal(generate(model, ids[1:], cache), generate(model, ids[1:]))


def test_a_model_that_sees_is_handed_text_alone():
    model, ids = tiny_model_that_sees(), random_ids(2, 24).clamp_max(VOCABULARY - 2)
    translator, source_cache = identity_translator(model), prefill(model, ids)[0]
    cache = TranslatedCache(source_cache, translator, target_model=model, input_ids=ids)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))
    ids[1, 7] = VOCABULARY - 1
    with pytest.raises(HandOffError, match="Row 1, token 7 of the context is the target's image_token_id 255"):
        TranslatedCache(source_cache, translator, target_model=model, input_ids=ids)
    TranslatedCache(source_cache, translator, target_model=model, input_ids=ids, recompute_last=17)  # which the target reads
