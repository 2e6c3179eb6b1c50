"""The spans of a sequence's tokens: byte by byte, whatever the tokenizer, however the text grows."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import POCKET, TEXT, any_of, byte_level, pocket, sentencepiece

from hf_crosscache.errors import AlignmentError
from hf_crosscache.token_bytes import TokenBytes
from hf_crosscache.token_spans import TokenSpans

ALL = [*POCKET, "byte-level", "like-gemma", "like-llama2"]


def of_text(name, text):
    return TokenSpans.of_text(any_of(name), text.replace("▁", "_"), side="source")


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=30, deadline=None)
@given(text=TEXT)
def test_spans_cover_every_byte_once_and_in_order(name, text):
    spans = of_text(name, text)
    assert spans.text == text.replace("▁", "_").encode() and spans.complete_text == text.replace("▁", "_")
    assert (spans.ends >= spans.starts).all() and (spans.starts[1:] == spans.ends[:-1]).all()
    assert len(spans) == 0 or (int(spans.starts[0]) == 0 and int(spans.ends[-1]) == len(spans.text))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=30, deadline=None)
@given(text=TEXT)
def test_spans_lie_within_the_characters_that_the_tokenizer_names(name, text):
    spans, text = of_text(name, text), text.replace("▁", "_")
    offsets = any_of(name)(text, return_offsets_mapping=True)["offset_mapping"]
    byte = [0, *torch.tensor([len(c.encode()) for c in text], dtype=torch.long).cumsum(0).tolist()]
    for start, end, (first, last) in zip(spans.starts.tolist(), spans.ends.tolist(), offsets, strict=True):
        assert start == end or byte[first] <= start < end <= byte[last]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=30, deadline=None)
@given(text=TEXT)
def test_ids_alone_say_the_same(name, text):
    spans = of_text(name, text.replace("<|im_end|>", "").replace("<|", ""))
    alone = TokenSpans.of_ids(any_of(name), spans.ids, side="source")
    assert alone.text == spans.text and alone.ends.equal(spans.ends) and alone.starts.equal(spans.starts)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=30, deadline=None)
@given(text=TEXT, data=st.data())
def test_a_text_that_grows_token_by_token_or_in_turns_is_the_text(name, text, data):
    whole = of_text(name, text.replace("<|", ""))
    cut = data.draw(st.integers(0, len(whole)))
    for known in (None, whole.text[len(whole.crop(cut).text) :]):
        grown = whole.crop(cut).extend(whole.ids[cut:], text=known)
        assert grown.text == whole.text and grown.ends.equal(whole.ends) and grown.starts.equal(whole.starts)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=30, deadline=None)
@given(text=TEXT, more=TEXT)
@example(text="\r\n", more="  ")
def test_the_last_tokens_may_be_tokenized_anew(name, text, more):
    text, more = text.replace("▁", "_"), more.replace("▁", "_")
    before, after = of_text(name, text), of_text(name, text + more)
    grown = before.retokenized(after.ids, text=text + more)
    assert grown.text == after.text and grown.ends.equal(after.ends) and grown.starts.equal(after.starts)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=30, deadline=None)
@given(text=TEXT, more=TEXT)
def test_a_turn_may_be_tokenized_by_itself(name, text, more):
    more = more.replace("▁", "_")
    before = of_text(name, text)
    ids = any_of(name)(more, add_special_tokens=False)["input_ids"]
    grown = before.extend(ids, text=more)
    assert grown.text == before.text + more.encode() and int(grown.ends.max() if len(grown) else 0) == len(grown.text)


def test_only_new_tokens_are_spelled(monkeypatch):
    tokenizer = pocket("llama")
    spans = TokenSpans.of_text(tokenizer, "The quick brown fox. " * 50, side="source")
    asked, spell = [], TokenBytes.spell
    monkeypatch.setattr(TokenBytes, "spell", lambda self, ids, side: asked.append(len(ids)) or spell(self, ids, side))
    spans.extend([5, 6]).retokenized([*spans.ids.tolist(), 7, 8, 9])
    assert asked == [2, 3]


def test_the_space_of_the_tokenizer_is_no_part_of_the_text():
    for prefix, text in [("prepend", "the fox"), ("prepend", " the"), ("metaspace", "the fox"), ("metaspace", " the"), (None, " the")]:
        spans = TokenSpans.of_text(sentencepiece(prefix), text, side="source")
        assert spans.text == text.encode() and spans.starts[:2].tolist() == [0, 0]  # <s> spells nothing
    spans = TokenSpans.of_text(sentencepiece("prepend"), "\nHi</s>Hi", side="source")
    assert [spans.text[a:b] for a, b in zip(spans.starts, spans.ends, strict=True)] == [b"", b"", b"\n", b"Hi", b"</s>", b"Hi"]
    generated = TokenSpans.of_text(sentencepiece("prepend"), "the", side="source").extend([sentencepiece(None).get_vocab()["▁fox"]])
    assert generated.text == b"the fox"


def test_special_tokens_have_spans_where_the_text_names_them():
    tokenizer = byte_level()
    text = "<|im_start|>the<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    named, alone = (TokenSpans.of_ids(tokenizer, ids, side="source", text=known) for known in (text, None))
    assert named.text == text.encode() and named.ends[0] == len("<|im_start|>")
    assert alone.text == b"the\n" and alone.ends[0] == 0


def test_whitespace_that_a_token_swallows_is_its_own():
    tokenizer = sentencepiece("prepend", strips_right=True)
    for text in ("the<|end|>\n \n fox", "the<|end|>\nfox<|end|>\n", "the<|end|>\n</s>fox", "<|end|>\n<|end|>\n\nfox"):
        spans = TokenSpans.of_text(tokenizer, text, side="source")
        pieces = [spans.text[a:b].decode() for a, b in zip(spans.starts, spans.ends, strict=True)]
        assert "".join(pieces) == text and any(piece.startswith("<|end|>\n") for piece in pieces)


def test_a_generated_half_of_a_character_waits_for_the_other():
    tokenizer = pocket("qwen3-small")
    ids = tokenizer("a👍", add_special_tokens=False)["input_ids"]
    spans = TokenSpans.of_ids(tokenizer, ids[:-1], side="source")
    assert spans.complete_text == "a" and spans.extend(ids[-1:]).complete_text == "a👍"


@pytest.mark.parametrize(
    ("tokenizer", "text", "found"),
    [
        (
            byte_level("NFC"),
            "cafe\u0301 now",
            r"source's tokens do not spell the text: from byte 3 on they have 'é now', the text has 'é now'",
        ),
        (byte_level("Lowercase"), "the Fox", r"from byte 4 on they have 'fox', the text has 'Fox'"),
        (sentencepiece(None), "a▁b", r"from byte 1 on they have ' b', the text has '▁b'"),
    ],
)
def test_a_tokenizer_that_changes_the_text_is_told_where(tokenizer, text, found):
    with pytest.raises(AlignmentError, match=found.replace("é", "(é|e\u0301)")):
        TokenSpans.of_text(tokenizer, text, side="source")


def test_ids_of_another_text_are_told_where():
    tokenizer = pocket("llama")
    ids = tokenizer("The quick fox")["input_ids"]
    for text, found in [
        ("The quack fox", "byte 6"),
        ("The quick fox!", "byte 13 on they have its end, the text has '!'"),
        ("The", "byte 3"),
    ]:
        with pytest.raises(AlignmentError, match=f"The target's tokens do not spell the text: from {found}"):
            TokenSpans.of_ids(tokenizer, ids, side="target", text=text)
    with pytest.raises(AlignmentError, match=r"from byte 0 on they have '\\nHi', the text has 'Hi'"):  # a space alone may be nobody's
        TokenSpans.of_ids(sentencepiece("prepend"), sentencepiece(None)("\nHi")["input_ids"], side="source", text="Hi")
    with pytest.raises(AlignmentError, match="from byte 0"):
        TokenSpans.of_ids(tokenizer, ids, side="target").retokenized(ids, text="A quick fox")
    with pytest.raises(AlignmentError, match=r"\[T\], expected; \[1, 3\] found"):
        TokenSpans.of_ids(tokenizer, torch.ones((1, 3), dtype=torch.long), side="target")
    with pytest.raises(AlignmentError, match="character 1 is half of a pair"):
        TokenSpans.of_text(tokenizer, "a\ud800", side="target")
