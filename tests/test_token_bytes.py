"""Every token says which bytes it spells, or the tokenizer is refused by name."""

import copy

import pytest
from small_tokenizers import POCKET, any_of, byte_level, pocket, sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_crosscache import token_bytes
from hf_crosscache.errors import AlignmentError
from hf_crosscache.token_bytes import TokenBytes


@pytest.mark.parametrize("name", [*POCKET, "byte-level", "like-gemma"])
def test_the_bytes_of_a_text_are_those_of_its_tokens(name):
    text = "The quick café\r\n\t 你好 👍🏽  e\u0301 Ω"
    tokenizer = any_of(name)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(TokenBytes.of(tokenizer, "source").spell(ids, "source")) == text.encode()


def test_tokens_may_be_parts_of_a_character():
    table = TokenBytes.of(sentencepiece(None), "source")
    vocabulary = sentencepiece(None).get_vocab()
    assert table.spelling[vocabulary["<0xE2>"]] == b"\xe2" and table.spelling[vocabulary["▁the"]] == b" the"
    assert table.spelling[vocabulary["</s>"]] == b"</s>"


@pytest.mark.parametrize(
    ("tokenizer", "at_start", "behind_special"),
    [
        (pocket("llama"), None, None),
        (sentencepiece(None), None, None),
        (sentencepiece("prepend"), "always", "always"),
        (sentencepiece("metaspace"), "if missing", None),
    ],
)
def test_a_space_of_the_tokenizers_own_is_known(tokenizer, at_start, behind_special):
    table = TokenBytes.of(tokenizer, "source")
    assert (table.space_at_start, table.space_after_special) == (at_start, behind_special)


def test_the_table_is_read_once_and_again_when_tokens_were_added(monkeypatch):
    tokenizer = copy.deepcopy(byte_level())
    table = TokenBytes.of(tokenizer, "source")
    assert TokenBytes.of(tokenizer, "target") is table
    tokenizer.add_tokens(["<new>"], special_tokens=True)
    assert TokenBytes.of(tokenizer, "source").spell([len(tokenizer) - 1], "source") == [b"<new>"]
    monkeypatch.setattr(token_bytes, "_read", None)
    TokenBytes.of(tokenizer, "source")


@pytest.mark.parametrize("wrong", [-1, 4096])
def test_an_unknown_id_is_named(wrong):
    with pytest.raises(AlignmentError, match=rf"target's token 2 has the id {wrong}"):
        TokenBytes.of(pocket("llama"), "target").spell([5, 6, wrong, 7], "target")


def test_tokenizers_that_cannot_say_are_refused():
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    with pytest.raises(AlignmentError, match=r"The source's tokenizer .* decoder WordPiece"):
        TokenBytes.of(PreTrainedTokenizerFast(tokenizer_object=words), "source")
    words.decoder = None
    with pytest.raises(AlignmentError, match=r"The target's tokenizer .* decoder none"):
        TokenBytes.of(PreTrainedTokenizerFast(tokenizer_object=words), "target")
    slow = copy.deepcopy(byte_level())
    type_ = type("Slow", (type(slow),), {"is_fast": property(lambda self: False)})
    slow.__class__ = type_
    with pytest.raises(AlignmentError, match=r"tokenizer \(Slow\) is not a fast one"):
        TokenBytes.of(slow, "source")
