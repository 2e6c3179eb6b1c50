"""The arms of a task: exact where the translator is, at the floor without the context, and in the order of any real pair."""

import json

import pytest
import torch
from builders import MODELS, generate, identity_translator
from transformers import AutoTokenizer

from hf_crosscache import TranslatedCache
from hf_crosscache.compat import cache_argument, prefill
from hf_crosscache.errors import CrossCacheError
from hf_crosscache.task_evaluation import _answers, _of_another_work, _summarize, evaluate_tasks
from hf_crosscache.task_report import tasks_table
from hf_crosscache.tasks import TASKS, Item, Question, build_items
from hf_crosscache.texts import read_documents

SETTINGS = {"items": 6, "context_tokens": 256}
ARMS = ["native", "none", "source", "translated", "wrong_document"]


@pytest.fixture(scope="module")
def to_itself(large, tokenizer, texts):
    return evaluate_tasks(identity_translator(large), large, large, tokenizer, texts, recompute_last=3, **SETTINGS)


def test_self_translation_is_native_to_the_last_item(to_itself):
    for task in TASKS:
        for metric in TASKS[task].metrics:
            native, translated, source = (to_itself[task, metric, arm] for arm in ("native", "translated", "source"))
            assert native.accuracy == translated.accuracy == source.accuracy
            assert native.p_value == 1 and translated.p_value is None and translated.gap_recovered is None


def test_what_only_the_context_holds_is_lost_without_it(large, tokenizer, texts):
    settings = {"tasks": ["retrieve_key"], "items": 24, "context_tokens": 128}
    evaluation = evaluate_tasks(identity_translator(large), large, large, tokenizer, texts, **settings)
    key, none, control = (evaluation["retrieve_key", "choice", arm] for arm in ("translated", "none", "wrong_document"))
    assert key.accuracy > 0.9 and key.retention == key.floor_normalised_retention == 1 and none.floor_normalised_retention == 0
    assert none.p_value < 0.01 and control.p_value < 0.01 and control.accuracy < 0.6
    assert evaluation["retrieve_key", "exact", "none"].accuracy == evaluation["retrieve_key", "exact", "wrong_document"].accuracy == 0


def test_every_score_is_told_and_holds_its_interval(to_itself):
    assert [score.arm for score in to_itself.scores] == ARMS * 7
    for score in to_itself.scores:
        assert score.accuracy_low <= score.accuracy <= score.accuracy_high
        assert score.items == 6 and score.questions == (18 if score.task == "answer_questions" else 6)
    assert len(tasks_table(to_itself).splitlines()) == 1 + len(to_itself.scores)
    assert json.loads(json.dumps(to_itself.to_dict()))["recompute_last"] == 3


def test_copying_is_ordered_on_the_pocket_pair(translator, small, large, tokenizer, texts):
    evaluation = evaluate_tasks(translator, small, large, tokenizer, texts, tasks=["copy_passage"], items=24, context_tokens=128)
    native, none, _, translated, control = (evaluation["copy_passage", "tokens", arm] for arm in ARMS)
    assert native.accuracy > translated.accuracy > none.accuracy and native.p_value < 0.01
    assert control.accuracy < translated.accuracy


@torch.no_grad()
def test_turn_after_turn_over_one_cache_gives_the_same_answers(large, tokenizer, texts):
    """What is scored with its history in the prompt is what a conversation over the same translated cache would generate."""
    exact, documents = identity_translator(large), list(read_documents(texts))
    item = build_items("answer_questions", documents, tokenizer, count=6, context_tokens=256)[1]
    context = torch.tensor([item.context])
    cache = TranslatedCache(prefill(large, context)[0], exact, target_model=large, input_ids=context).translate()
    said, told = context, []
    for turn, question in enumerate(item.questions):
        history = () if turn == 0 else item.questions[turn - 1].prompt + item.questions[turn - 1].options[0]
        said = torch.cat([said, torch.tensor([question.prompt[len(history) :]])], dim=1)
        true = torch.tensor([question.options[0]])
        answer = generate(large, said, cache.fork(), max_new_tokens=true.shape[1], min_new_tokens=true.shape[1])
        told.append(float(torch.equal(answer[:, -true.shape[1] :], true)))
        said = torch.cat([said, true], dim=1)
        held = cache.get_seq_length()
        large(said[:, held:], **cache_argument(cache))  # the true answer is what the next turn goes on from
    fresh = TranslatedCache(prefill(large, context)[0], exact, target_model=large, input_ids=context).translate()
    assert _answers(large, fresh, context, [item])[0, 1].item() == pytest.approx(sum(told) / 3)


def test_the_control_is_of_another_work():
    items = [Item(work, (1,), ()) for work in (0, 0, 0, 1, 0)]
    assert [_of_another_work(items, index).work for index in range(5)] == [1, 1, 1, 0, 1]


def test_shares_are_told_only_where_there_is_something_to_share():
    question = Question((1,), ((2,), (3,)))
    items = [Item(0, (1,), (question,))] * 40
    right = torch.tensor([1.0, 1.0, 1.0, 0.0] * 10).double()
    columns = {"native": right, "none": right * 0, "source": right, "translated": right * torch.arange(40).lt(20)}
    scores = _summarize("retrieve_key", items, {arm: column[:, None].expand(-1, 3) for arm, column in columns.items()})
    translated = next(score for score in scores if score.arm == "translated")
    assert translated.retention == translated.floor_normalised_retention == pytest.approx(0.5)
    assert translated.retention_low < 0.5 < translated.retention_high and translated.gap_recovered is None


def test_no_share_is_told_of_a_gap_that_some_resample_does_not_show():
    items = [Item(0, (1,), (Question((1,), ((2,), (3,))),))] * 20
    few = torch.arange(20).lt(4).double()  # 4 of 20: one resample in a hundred has none of them
    columns = {"native": few, "none": few * 0, "source": few * 0, "translated": few}
    scores = _summarize("retrieve_key", items, {arm: column[:, None].expand(-1, 3) for arm, column in columns.items()})
    assert all(score.retention is score.floor_normalised_retention is score.gap_recovered is None for score in scores)


def test_strangers_are_refused(translator, small, large, texts):
    with pytest.raises(CrossCacheError, match="another tokenizer"):
        evaluate_tasks(translator, small, large, AutoTokenizer.from_pretrained(MODELS / "gemma3"), texts)
