"""A target token is given the last source token that has read no more than it: an oracle that spells, and theorems."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import TEXT, any_of, byte_level, pocket, sentencepiece

from hf_crosscache.alignment import align, align_batch
from hf_crosscache.errors import AlignmentError
from hf_crosscache.token_spans import TokenSpans

PAIRS = [
    ("llama", "gemma3"),
    ("gemma3", "llama"),
    ("qwen3-small", "llama"),
    ("byte-level", "like-gemma"),
    ("like-llama2", "gemma3"),
    ("gemma3", "like-llama2"),
    ("like-gemma", "byte-level"),
]


def both(source, target, text):
    text = text.replace("▁", "_")
    return tuple(TokenSpans.of_text(any_of(name), text, side=side) for name, side in ((source, "source"), (target, "target")))


def pieces(spans):
    return [spans.text[a:b] for a, b in zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)]


def oracle(source, target):
    """Read on, token by token: the source stops before it has read more, and behind no special token that the target may not have read."""
    read, chosen = b"", []
    for piece in pieces(target):
        read += piece
        heard, last = b"", -1
        for number, other in enumerate(pieces(source)):
            heard += other
            if not read.startswith(heard):
                break
            if other or heard != read:
                last = number
        chosen.append(last)
    return chosen


@pytest.mark.parametrize(("source", "target"), PAIRS)
@settings(max_examples=40, deadline=None)
@given(text=TEXT)
def test_the_alignment_is_that_of_a_reader_who_spells(source, target, text):
    src, tgt = both(source, target, text)
    index = align(src, tgt).source_index[0]
    spells = tgt.ends > tgt.starts
    assert index[spells].tolist() == torch.tensor(oracle(src, tgt), dtype=torch.long)[spells].tolist()


@pytest.mark.parametrize(("source", "target"), PAIRS)
@settings(max_examples=40, deadline=None)
@given(text=TEXT)
def test_it_never_goes_back_never_reads_on_and_leaves_little_out(source, target, text):
    src, tgt = both(source, target, text)
    made = align(src, tgt)
    index, known = made.source_index[0], made.source_index[0] >= 0
    assert (index[1:] >= index[:-1]).all()
    assert (src.ends[index[known]] <= tgt.ends[known]).all()
    spells = (tgt.ends > tgt.starts) & (index < len(src) - 1)
    following = index[spells] + 1
    assert ((src.ends[following] > tgt.ends[spells]) | (src.starts == src.ends)[following]).all()
    assert made.translated[0].equal(known)  # both have read all of the text
    assert made.length == (len(tgt) if known.any() and known[-1] else 0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "byte-level", "like-gemma", "like-llama2"])
@settings(max_examples=30, deadline=None)
@given(text=TEXT)
def test_a_tokenizer_aligned_with_itself_is_the_identity(name, text):
    for spans in (both(name, name, text)[0], TokenSpans.of_ids(any_of(name), both(name, name, text)[0].ids, side="source")):
        made = align(spans, spans)
        assert made.source_index.tolist() == made.position_ids.tolist() == [list(range(len(spans)))] and made.translated.all()
        assert made.overlap.source_index.equal(made.overlap.target_index) and (made.overlap.weight == 1).all()


@pytest.mark.parametrize(("source", "target"), PAIRS)
@settings(max_examples=40, deadline=None)
@given(text=TEXT, data=st.data())
def test_a_prefix_is_aligned_as_in_the_whole(source, target, text, data):
    src, tgt = both(source, target, text)
    whole = align(src, tgt)
    cut = data.draw(st.integers(0, len(tgt)))
    part = tgt.crop(cut)
    read = int((src.ends <= len(part.text)).sum())
    prefix = align(src.crop(read), part)
    assert prefix.source_index.equal(whole.source_index[:, :cut]) and prefix.position_ids.equal(whole.position_ids[:, :cut])
    ahead = align(src, part)  # the source has read on: nothing of that shows
    assert ahead.source_index.equal(prefix.source_index) and ahead.translated.equal(prefix.translated)
    assert not prefix.translated[0][part.ends > (src.ends[read - 1] if read else 0)].any()
    more = align(src, tgt, start=cut)
    assert more.source_index.equal(whole.source_index[:, cut:]) and more.position_ids.equal(whole.position_ids[:, cut:])
    assert more.translated.equal(whole.translated[:, cut:])
    late = whole.overlap.target_index >= cut
    assert more.overlap.source_index.equal(whole.overlap.source_index[late]) and more.overlap.weight.equal(whole.overlap.weight[late])


@pytest.mark.parametrize(("source", "target"), PAIRS)
@settings(max_examples=40, deadline=None)
@given(text=TEXT)
def test_overlap_weights_are_the_bytes_of_finished_tokens(source, target, text):
    src, tgt = both(source, target, text)
    made = align(src, tgt)
    expected = {}
    for row, (start, end, last) in enumerate(zip(tgt.starts.tolist(), tgt.ends.tolist(), made.source_index[0].tolist(), strict=True)):
        spans = zip(src.starts.tolist(), src.ends.tolist(), strict=True)
        shared = {at: max(0, min(b, end) - max(a, start)) for at, (a, b) in enumerate(spans) if b <= end}
        total = sum(shared.values())
        if last >= 0:
            expected |= {(row, at): n / total for at, n in shared.items() if n} if total else {(row, last): 1.0}
    overlap = made.overlap
    found = zip(overlap.target_index.tolist(), overlap.source_index.tolist(), overlap.weight.tolist(), strict=True)
    assert {(row, at): weight for row, at, weight in found if weight} == pytest.approx(expected)


def test_the_first_and_the_last_tokens_are_left_to_the_target():
    tokenizer = sentencepiece(None)
    vocabulary = tokenizer.get_vocab()

    def spans(side, *tokens):
        return TokenSpans.of_ids(tokenizer, [vocabulary[token] for token in tokens], side=side)

    target = spans("target", "t", "h", "e", "▁", "f", "o", "x")
    made = align(spans("source", "the", "▁fox"), target)
    assert made.source_index.tolist() == [[-1, -1, 0, 0, 0, 0, 1]]
    assert made.translated.tolist() == [[False, False, True, True, True, True, True]]  # in the middle the last one stands in
    made = align(spans("source", "the", "▁fox"), target.crop(6))
    assert made.translated.tolist() == [[False, False, True, False, False, False]] and made.length == 3
    assert not align(spans("source"), target).translated.any() and align(spans("source", "the"), spans("target")).length == 0


def test_special_tokens_meet_their_like_or_the_place_between():
    llama, gemma, chat = sentencepiece("prepend"), pocket("gemma3"), byte_level()
    source, target = (TokenSpans.of_text(some, "the fox", side="source") for some in (llama, gemma))
    assert align(source, target).source_index[0, 0] == 0  # <s> has read what <bos> has
    assert align(TokenSpans.of_text(pocket("llama"), "the fox", side="source"), target).source_index[0, 0] == -1
    assert align(target, TokenSpans.of_text(pocket("llama"), "the fox", side="target")).source_index[0, 0] >= 1
    other = byte_level(specials=("<|im_end|>", "<|im_start|>", "<|eot|>"))
    source = TokenSpans.of_ids(other, other("the<|eot|><|im_end|><|im_start|>fox<|im_end|>")["input_ids"], side="source")
    target = TokenSpans.of_ids(chat, chat("the<|im_end|><|im_start|>fox<|im_start|>")["input_ids"], side="target")
    name = {index: token for token, index in [*other.get_vocab().items()]}
    matched = align(source, target).source_index[0]
    met = [(chat.convert_ids_to_tokens(int(a)), name[int(source.ids[b])]) for a, b in zip(target.ids, matched, strict=True)]
    assert ("<|im_end|>", "<|im_end|>") in met and ("<|im_start|>", "<|im_start|>") in met
    assert met[-1] == ("<|im_start|>", "<|im_end|>") and matched.tolist() == sorted(matched.tolist())


def test_special_tokens_that_one_side_spells_out_are_aligned_by_their_bytes():
    text = "<|im_start|>the fox<|im_end|>"
    source, target = (TokenSpans.of_text(some, text, side="source") for some in (pocket("llama"), byte_level()))
    made = align(source, target)
    assert int(source.ends[made.source_index[0, 0]]) == len("<|im_start|>") and made.translated.all()
    assert align(target, source).translated.sum() < len(source)  # the letters of <|im_start|> have no token that has read them


def test_rows_of_a_batch_are_padded_on_the_left():
    texts = ["The quick brown fox", "the", "A jumping fox jumps"]
    rows = [both("gemma3", "llama", text) for text in texts]
    sources, targets = zip(*rows, strict=True)
    made = align_batch(sources, targets, source_length=20)
    width = max(len(row) for row in targets)
    assert made.source_index.shape == made.translated.shape == (3, width)
    dense = torch.zeros(3, width, 20)
    dense[made.overlap.row, made.overlap.target_index, made.overlap.source_index] = made.overlap.weight
    for number, (source, target) in enumerate(rows):
        alone, own = align(source, target), slice(width - len(target), None)
        padding = 20 - len(source)
        assert made.source_position_ids[number, own].equal(alone.source_position_ids[0])
        assert made.source_index[number, own].equal(torch.where(alone.source_index[0] < 0, -1, alone.source_index[0] + padding))
        assert made.position_ids[number, own].equal(alone.position_ids[0]) and made.translated[number, own].equal(alone.translated[0])
        assert (made.source_index[number, : own.start] == -1).all() and not made.translated[number, : own.start].any()
        assert (dense[number].sum(1) > 0).equal(made.source_index[number] >= 0)
        assert dense[number, :, :padding].sum() == 0
    assert made.to("cpu").overlap.weight.equal(made.overlap.weight)
    with pytest.raises(AlignmentError, match="Row 0: the source has .* more than the 2 slots"):
        align_batch(sources, targets, source_length=2)
    with pytest.raises(AlignmentError, match="3 and 2 found"):
        align_batch(sources, targets[:2])
    with pytest.raises(AlignmentError, match="Row 1: The source and the target have read different texts"):
        align_batch(sources, [targets[0], targets[0], targets[2]])


def test_different_texts_are_told_where():
    source, target = both("llama", "gemma3", "The fox jumps")[0], both("llama", "gemma3", "The fog")[1]
    with pytest.raises(AlignmentError, match="from byte 6 on the source's is 'x jumps', the target's 'g'"):
        align(source, target)


def test_one_conversation_that_two_models_take_turns_in():
    small, large = pocket("llama"), pocket("gemma3")
    source, target = (TokenSpans.of_text(one, "A question?", side=side) for one, side in ((small, "source"), (large, "target")))
    held = len(target)
    for answer in (" 你好, ", "the quick 👍", " fox\r\n"):
        for index in small(answer, add_special_tokens=False)["input_ids"]:  # the source generates
            source = source.extend([index])
        target = target.retokenized(large(source.complete_text)["input_ids"], text=source.complete_text)
        new = align(source, target, start=held)
        whole = align(source, target)
        assert new.source_index.equal(whole.source_index[:, held:]) and new.translated.all()
        held = len(target)


def test_it_costs_milliseconds():
    tokenizer, other = pocket("llama"), pocket("gemma3")
    text = "The quick brown fox jumps over the lazy dog, 12 times.\n" * 1500
    source, target = (TokenSpans.of_text(one, text, side="source") for one in (tokenizer, other))
    assert len(target) > 20_000
    started = time.perf_counter()
    align(TokenSpans.of_ids(tokenizer, source.ids, side="source"), TokenSpans.of_ids(other, target.ids, side="target"))
    assert time.perf_counter() - started < 1.0
