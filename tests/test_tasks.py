"""Items are made of held-out texts, always the same ones, and their answers stand in the context alone."""

import pytest
from builders import MODELS
from transformers import AutoTokenizer

from hf_crosscache.errors import CalibrationError
from hf_crosscache.tasks import TASKS, build_items
from hf_crosscache.texts import Document, read_documents

CONTEXT = 192


@pytest.fixture(scope="module")
def documents(texts):
    return list(read_documents(texts))


@pytest.fixture(scope="module")
def items(documents, tokenizer):
    return {name: build_items(name, documents, tokenizer, count=8, context_tokens=CONTEXT) for name in TASKS}


def holds(ids, some):
    return any(tuple(ids[at : at + len(some)]) == tuple(some) for at in range(len(ids) - len(some) + 1))


@pytest.mark.parametrize("name", TASKS)
def test_items_depend_on_texts_and_seed_alone(name, items, documents, tokenizer):
    assert items[name] == build_items(name, documents, tokenizer, count=8, context_tokens=CONTEXT)
    assert items[name] != build_items(name, documents, tokenizer, count=8, context_tokens=CONTEXT, seed=2)
    held_out = [document for document in documents if document.split == "test"]
    assert items[name] == build_items(name, held_out, tokenizer, count=8, context_tokens=CONTEXT)


@pytest.mark.parametrize("name", TASKS)
def test_contexts_have_one_length_and_options_one_too(name, items):
    assert len(items[name]) == 8 and len({item.work for item in items[name]}) > 3
    for item in items[name]:
        assert len(item.context) == CONTEXT
        for question in item.questions:
            assert question.prompt and len({len(option) for option in question.options}) == 1
            assert len(set(question.options)) == len(question.options) == (1 if name == "copy_passage" else 4)


@pytest.mark.parametrize("name", TASKS)
def test_no_question_tells_its_answer(name, items, tokenizer):
    for item in items[name]:
        for question in item.questions:
            true = question.options[0]
            assert not holds(question.prompt, true)
            if name != "choose_continuation":
                assert tokenizer.decode(true).strip() in tokenizer.decode(item.context)


def test_the_true_continuation_follows_and_the_others_come_later(items, documents, tokenizer):
    texts = [document.text for document in documents if document.split == "test"]
    for item in items["choose_continuation"]:
        (question,) = item.questions
        whole = tokenizer.decode([*item.context, *question.prompt, *(token for option in question.options for token in option)])
        assert any(whole.strip("\ufffd") in text for text in texts)


def test_keys_stand_at_all_depths_and_wrong_numbers_nowhere(items, tokenizer):
    depths = []
    for item in items["retrieve_key"]:
        context, (question,) = tokenizer.decode(item.context), item.questions
        key, *wrong = (tokenizer.decode(option).strip() for option in question.options)
        sentence = f"{tokenizer.decode(question.prompt).strip()} {key}."
        assert context.count(sentence) == 1 and all(number not in context for number in wrong)
        depths.append(context.index(sentence) / len(context))
    assert min(depths) < 0.4 and max(depths) > 0.6


def test_a_copied_passage_goes_on_as_it_did(items):
    for item in items["copy_passage"]:
        (question,) = item.questions
        assert holds(item.context, question.prompt[-16:] + question.options[0])


def test_turns_hold_the_turns_before_and_ask_for_words_that_stand_once(items, tokenizer):
    for item in items["answer_questions"]:
        context = tokenizer.decode(item.context)
        assert len(item.questions) == 3
        for before, question in zip((None, *item.questions), item.questions, strict=False):
            assert context.count(tokenizer.decode(question.options[0]).strip()) == 1
            if before is not None:
                history = before.prompt + before.options[0]
                assert question.prompt[: len(history)] == history


def test_contexts_open_as_the_tokenizer_opens_a_text(documents):
    with_bos = AutoTokenizer.from_pretrained(MODELS / "gemma3")
    for name in TASKS:
        for item in build_items(name, documents, with_bos, count=4, context_tokens=CONTEXT):
            assert item.context[0] == with_bos.bos_token_id
            assert all(with_bos.bos_token_id not in question.prompt for question in item.questions)


def test_what_cannot_be_made_is_said(documents, tokenizer):
    with pytest.raises(CalibrationError, match="No task 'sing'"):
        build_items("sing", documents, tokenizer)
    with pytest.raises(CalibrationError, match="96 at least"):
        build_items("retrieve_key", documents, tokenizer, context_tokens=40)
    one = next(document for document in documents if document.split == "test")
    with pytest.raises(CalibrationError, match="not of two works"):
        build_items("retrieve_key", [Document(one.text, one.work)], tokenizer, count=4, context_tokens=128)
