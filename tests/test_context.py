"""Where each token of a context stands, in the source's cache and in the target's: checked with ids that no two tokens share."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_crosscache.context import Context
from hf_crosscache.errors import HandOffError


def mask_of(*rows):
    return torch.tensor([[int(slot) for slot in row] for row in rows])


def token_ids(mask):
    """`[B, L]` of a mask: the n-th token of row b is 1000 b + n + 1, padding 0."""
    return (1000 * torch.arange(len(mask))[:, None] + mask.cumsum(1)) * mask


def assert_maps_each_token_to_itself(context, source_mask, prompt_mask):
    """What the source has cached of a token goes where the prompt has it, at its rank among the tokens of its row."""
    source_ids, prompt_ids = token_ids(source_mask), token_ids(prompt_mask)[:, : context.length]
    real = prompt_mask[:, : context.length] == 1
    rows = context.source_rows
    handed = source_ids[:, : context.length] if rows is None else source_ids.gather(1, rows)
    assert torch.equal(handed[real], prompt_ids[real])
    position_ids = torch.arange(context.length).expand_as(real) if context.position_ids is None else context.position_ids
    assert torch.equal(position_ids[real], (real.cumsum(1) - 1)[real].to(position_ids.dtype))
    assert position_ids.min() >= 0
    first = torch.zeros(len(real), dtype=torch.long) if context.first_slots is None else context.first_slots
    assert torch.equal(prompt_ids.gather(1, first[:, None]), 1000 * torch.arange(len(real))[:, None] + 1)
    assert context.tokens is None or torch.equal(context.tokens, real.sum(1).to(context.tokens.dtype))


@pytest.mark.parametrize("masks", [(None, None), ("prompt", None), ("prompt", "source"), (None, "source")])
def test_without_padding_slot_and_position_are_one(masks):
    prompt = torch.ones(2, 9, dtype=torch.long) if masks[0] else None
    source = torch.ones(2, 6, dtype=torch.long) if masks[1] else None
    context = Context.of(2, 6, 1, prompt, source)
    assert (context.length, context.position_ids, context.source_rows, context.first_slots, context.tokens) == (5, None, None, None, None)


def test_left_padding_keeps_its_slots():
    prompt = mask_of("11111111", "00011111", "00001111")
    context = Context.of(3, 6, 1, prompt, None)
    assert context.length == 5 and context.source_rows is None
    assert context.first_slots.tolist() == [0, 3, 4] and context.tokens.tolist() == [5, 2, 1]
    assert context.shortened(1).tokens.tolist() == [4, 1, 0]


def test_left_padding_of_a_mask_of_booleans_is_the_same():
    prompt = mask_of("11111111", "00111111")
    for mask in (prompt.bool(), prompt.float()):
        context = Context.of(2, 6, 1, mask, None)
        assert_maps_each_token_to_itself(context, prompt[:, :6], prompt)


@pytest.mark.parametrize(
    "source,prompt",
    [
        (("1111", "1100"), ("011111", "000111")),  # on the right, then on the left
        (("1111", "0011"), ("111100", "110000")),  # and the other way round
        (("111111", "111000"), ("111111111", "000111111")),
        (("1111", "1111"), ("001111", "111111")),  # padded in the prompt alone
        (("0110", "1001"), ("0011", "0110")),  # with holes
        (("1011", "1101"), ("10110111", "11010111")),
        (("1110", "1000"), ("1110", "1111")),  # rows go on for different lengths
    ],
)
def test_padding_of_any_kind(source, prompt):
    source, prompt = mask_of(*source), mask_of(*prompt)
    assert_maps_each_token_to_itself(Context.of(2, source.shape[1], 0, prompt, source), source, prompt)


def test_as_many_slots_as_every_row_has_context_for():
    """A row whose context ends earlier bounds the batch: what follows is the target's to read."""
    source, prompt = mask_of("1111", "1100"), mask_of("111111", "111111")
    assert Context.of(2, 4, 0, prompt, source).length == 2
    assert Context.of(2, 4, 1, prompt, source).length == 1


@st.composite
def batches(draw):
    batch = draw(st.integers(1, 4))
    contexts = [draw(st.integers(1, 6)) for _ in range(batch)]
    more = [draw(st.integers(0, 4)) for _ in range(batch)]
    masks = []
    for lengths in (contexts, [context + new for context, new in zip(contexts, more, strict=True)]):
        slots = max(lengths) + draw(st.integers(0, 3))
        masks.append(torch.zeros(batch, slots, dtype=torch.long))
        for row, length in enumerate(lengths):
            masks[-1][row, draw(st.permutations(range(slots)))[:length]] = 1
    return masks[0], masks[1], draw(st.integers(0, 2))


@settings(deadline=None, max_examples=300)
@given(batches())
def test_each_token_is_mapped_to_itself(batch):
    source, prompt, recompute_last = batch
    try:
        context = Context.of(len(source), source.shape[1], recompute_last, prompt, source)
    except HandOffError as error:  # some row has its first token behind the last context token of another, or nothing is left
        assert "no context left" in str(error) or "recompute_last" in str(error)
        return
    assert_maps_each_token_to_itself(context, source, prompt)
    for tokens in (0, 1, context.length):
        cut = context.shortened(tokens)
        assert cut.length == context.length - tokens
        if cut.tokens is not None:
            real = prompt[:, : cut.length] if source.min() == 0 or prompt.min() == 0 else torch.ones(len(source), cut.length)
            assert torch.equal(cut.tokens.long(), real.sum(1).long())


def test_the_property_sees_a_wrong_mapping():
    source, prompt = mask_of("1111", "1100"), mask_of("111111", "001111")
    context = Context.of(2, 4, 0, prompt, source)
    shifted = Context(context.length, context.position_ids, context.source_rows.roll(1, 1), context.first_slots)
    with pytest.raises(AssertionError):
        assert_maps_each_token_to_itself(shifted, source, prompt)


@pytest.mark.parametrize(
    "prompt,source,message",
    [
        (("111", "111"), None, r"attention_mask of shape \[2, at least 4\] expected.*\[2, 3\] found"),
        (("1111",), None, r"attention_mask of shape \[2, at least 4\] expected.*\[1, 4\] found"),
        (("11111", "11111"), ("111", "111"), r"source_attention_mask of shape \[2, 4\] expected.*\[2, 3\] found"),
        (None, ("1111", "0111"), "pass attention_mask= of the target's prompt"),
        (("11111", "00001"), None, r"Every row of the batch needs a context.*read \[4, 0\] tokens"),
        (("111", "011"), ("1111", "1111"), r"read \[4, 4\] tokens a row, the prompt has \[3, 2\]"),
        (("111", "111"), ("1111", "1111"), r"read \[4, 4\] tokens a row, the prompt has \[3, 3\]"),
    ],
)
def test_masks_that_do_not_fit_are_refused(prompt, source, message):
    masks = [None if rows is None else mask_of(*rows) for rows in (prompt, source)]
    with pytest.raises(HandOffError, match=message):
        Context.of(2, 4, 0, *masks)
    with pytest.raises(HandOffError, match="attention_mask of shape"):
        Context.of(2, 4, 0, torch.ones(2, 1, 4, 4), None)


@pytest.mark.parametrize("recompute_last", [-1, 4, 5])
def test_as_much_as_the_context_cannot_be_left_to_the_target(recompute_last):
    with pytest.raises(HandOffError, match=rf"recompute_last = {recompute_last} of a context of 4 tokens: 0 to 3"):
        Context.of(2, 4, recompute_last, None, None)


def test_a_row_that_is_left_to_the_target_altogether_is_refused():
    with pytest.raises(HandOffError, match="recompute_last = 2 some row has no context left"):
        Context.of(2, 4, 2, mask_of("11111", "00111"), None)
