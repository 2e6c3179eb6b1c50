"""Two models with chat templates of their own share what the messages say."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import TEXT, byte_level, sentencepiece

from hf_crosscache.alignment import align
from hf_crosscache.chat_spans import chat_spans
from hf_crosscache.errors import AlignmentError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADED = "<s>{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}</s>{% endfor %}"


def tokenizer(template, made):
    made = copy.deepcopy(made)
    made.chat_template = template
    return made


CHAT = tokenizer(CHATML, byte_level())
PLAIN = tokenizer(HEADED, sentencepiece(None))


def conversation(*contents):
    return [{"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)]


@settings(max_examples=40, deadline=None)
@given(contents=st.lists(TEXT, min_size=1, max_size=4))
def test_the_text_is_what_was_said(contents):
    contents = [content.replace("▁", "_") for content in contents]
    source, target = chat_spans(CHAT, conversation(*contents), side="source"), chat_spans(PLAIN, conversation(*contents), side="target")
    assert source.text == target.text == "".join(content.strip() for content in contents).encode()
    made = align(source, target)
    index, known = made.source_index[0], made.source_index[0] >= 0
    assert (index[1:] >= index[:-1]).all() and (source.ends[index[known]] <= target.ends[known]).all()
    assert align(source, source).source_index.tolist() == [list(range(len(source)))]


def test_messages_meet_messages_and_templates_meet_templates():
    said = conversation("user", " the fox\n", "[user]")  # words that the templates have too, and whitespace that one of them strips
    source, target = chat_spans(CHAT, said, side="source", add_generation_prompt=True), chat_spans(PLAIN, said, side="target")
    assert source.text == b"userthe fox[user]"
    met = align(source, target).source_index[0]
    for token, partner in enumerate(met.tolist()):
        if target.ends[token] > target.starts[token]:  # a message
            assert source.ends[partner] > source.starts[partner] or source.ends[partner] < target.ends[token]
    assert target.ids[0] == 1 and met[0] == 0  # <s> has read what <|im_start|> has: nothing
    text = "".join(target.table.spelling[index].decode() for index in target.ids.tolist())
    assert text == "<s>[user]\n\nuser</s>[assistant]\n\nthe fox</s>[user]\n\n[user]</s>"


def test_a_word_of_a_template_that_is_cut_otherwise_is_not_read_ahead():
    source, target = (chat_spans(one, conversation("Hi", "Hi", "Hi"), side="source") for one in (PLAIN, CHAT))
    name = [source.table.spelling[index] for index in source.ids.tolist()]
    for token, partner in enumerate(align(source, target).source_index[0].tolist()):
        spelled = target.table.spelling[int(target.ids[token])]
        if partner >= 0 and target.ends[token] == target.starts[token]:
            special = int(target.ids[token]) in target.table.special
            fresh = token == 0 or partner > align(source, target).source_index[0, token - 1]
            assert not fresh or special or name[partner] == spelled


def test_a_template_that_changes_a_message_is_told_which():
    loud = tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content | upper }}{% endfor %}", byte_level())
    with pytest.raises(AlignmentError, match="source's chat template leaves out message 0, or changes it: 'the fox' was said"):
        chat_spans(loud, conversation("the fox"), side="source")
    forgetful = tokenizer("{% for m in messages[-1:] %}{{ m.role }}: {{ m.content }}{% endfor %}", byte_level())
    with pytest.raises(AlignmentError, match="message 0"):
        chat_spans(forgetful, conversation("the fox", "jumps"), side="target")
    with pytest.raises(AlignmentError, match="target's message 0 is not a text"):
        chat_spans(CHAT, [{"role": "user", "content": [{"type": "image"}]}], side="target")
