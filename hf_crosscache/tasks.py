"""Tasks whose answers only the context holds, made mechanically from held-out texts: nothing is downloaded, nothing is labelled by hand."""

from __future__ import annotations

import itertools
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .errors import CalibrationError
from .texts import Document, document_windows, opening_ids

_OPTIONS = 4
_CONTINUATION = 32  # tokens of each continuation to choose from
_CUE, _REST = 16, 32  # tokens of a passage that are given, and that are left to copy
_TURNS = 3  # questions asked over one context
_SENTENCE_WORDS = range(6, 41)
_LEAST_CONTEXT = 96
_NAMES = (
    "Alice", "Bruno", "Clara", "Diego", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas", "Klara", "Louis", "Marta", "Nadia", "Oscar",
    "Paula", "Quinn", "Rosa", "Simon", "Teresa", "Ulrich", "Vera", "Walter", "Yara",
)  # fmt: skip
# Split at the end of a sentence and at empty lines: headings and table cells are no sentences.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
_BLANKABLE = re.compile(r"(?<![\w.'-])(?:[A-Z]\w+|\d+)(?![\w'-])")


@dataclass(frozen=True)
class Question:
    """What is asked behind a context, in token ids.

    prompt: read by whoever answers, one token at least; of a later turn it begins with all earlier turns and their true answers.
    options: the continuations to score; the first is true.
    """

    prompt: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Item:
    """A context of some token ids, the work it was cut from by number, and the questions asked over it."""

    work: int
    context: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Task:
    """How items are made of token windows, and what is measured on them.

    build: windows (work, ids), tokenizer, context_tokens, rng -> items; a window that carries none is passed over.
    metrics: of "choice" (the true option is the likeliest), "exact" (greedy decoding gives the true option, token by token) and "tokens"
        (share of its tokens that are the likeliest, given those before).
    tokens_after: tokens of a window that follow the context. windows_an_item: windows to look at for each item wanted.
    """

    build: Callable[[Sequence[tuple[int, list[int]]], PreTrainedTokenizerBase, int, random.Random], Iterator[Item]]
    metrics: tuple[str, ...]
    tokens_after: int = 0
    windows_an_item: int = 2


def build_items(
    name: str,
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int = 500,
    context_tokens: int = 384,
    seed: int = 1,
) -> list[Item]:
    """Make the items of one task from documents of the "test" split, which no fit and no selection sees.

    The items depend on the texts, the tokenizer and the seed alone. There are fewer than `count` where the texts do not carry more.

    Args:
        name: of a task, see `TASKS`.
        context_tokens: of each context, exactly; with the tokens that the tokenizer begins a text with.

    Raises:
        CalibrationError: no such task, too short a context, or texts that do not carry items of two works at least.
    """
    if name not in TASKS:
        raise CalibrationError(f"No task {name!r}; there are {', '.join(TASKS)}.")
    if context_tokens < _LEAST_CONTEXT:
        raise CalibrationError(f"context_tokens = {context_tokens}: the tasks need {_LEAST_CONTEXT} at least.")
    task, rng = TASKS[name], random.Random(f"{name} {seed}")
    length = context_tokens + task.tokens_after
    windows = document_windows(documents, tokenizer, split="test", length=length, count=task.windows_an_item * count, seed=seed)
    rng.shuffle(windows)
    items = list(itertools.islice(task.build(windows, tokenizer, context_tokens, rng), count))
    if len({item.work for item in items}) < 2:
        raise CalibrationError(
            f"The texts carry {len(items)} items of {name!r}, not of two works, which are needed at least, since one is the other's "
            "control. Give more or longer texts, or a smaller context_tokens."
        )
    return items


def choose_continuation(
    windows: Sequence[tuple[int, list[int]]], tokenizer: PreTrainedTokenizerBase, context_tokens: int, rng: random.Random
) -> Iterator[Item]:
    """Tell how a text goes on: the true continuation, or one of three passages of the same length that follow later in the document."""
    start = context_tokens + 1
    for work, ids in windows:
        options = tuple(tuple(ids[at : at + _CONTINUATION]) for at in range(start, start + _OPTIONS * _CONTINUATION, _CONTINUATION))
        if len(set(options)) == _OPTIONS:
            yield Item(work, tuple(ids[:context_tokens]), (Question((ids[context_tokens],), options),))


def retrieve_key(
    windows: Sequence[tuple[int, list[int]]], tokenizer: PreTrainedTokenizerBase, context_tokens: int, rng: random.Random
) -> Iterator[Item]:
    """Give back a number that one sentence at a random depth of the context tells; the other options are numbers that nothing tells."""
    for work, ids in windows:
        text = str(tokenizer.decode(ids))
        unused = [name for name in _NAMES if name not in text]
        if not unused:
            continue
        name = rng.choice(unused)
        prompt = f"\n\nThe access code of {name} is"
        numbers: dict[str, tuple[int, ...]] = {}
        while len(numbers) < _OPTIONS:
            number = str(rng.randrange(10_000, 100_000))
            tokens = _continuation(tokenizer, prompt, f" {number}")
            if number not in text and all(len(tokens) == len(others) for others in numbers.values()):
                numbers[number] = tokens
        sentence = _ids(tokenizer, f"\nThe access code of {name} is {next(iter(numbers))}.\n")
        depth = rng.randrange(context_tokens // 10, context_tokens - len(sentence) - context_tokens // 10)
        context = [*ids[:depth], *sentence, *ids[depth:]][:context_tokens]
        yield Item(work, tuple(context), (Question(_ids(tokenizer, prompt), tuple(numbers.values())),))


def copy_passage(
    windows: Sequence[tuple[int, list[int]]], tokenizer: PreTrainedTokenizerBase, context_tokens: int, rng: random.Random
) -> Iterator[Item]:
    """Go on copying a passage that stands at a random place of the context and is begun again behind it."""
    separator, first = _ids(tokenizer, "\n\n"), len(opening_ids(tokenizer))
    for work, ids in windows:
        start = rng.randrange(first, context_tokens - _CUE - _REST)
        cue, rest = tuple(ids[start : start + _CUE]), tuple(ids[start + _CUE : start + _CUE + _REST])
        if _occurrences(cue, ids) == 1:
            yield Item(work, tuple(ids), (Question(separator + cue, (rest,)),))


def answer_questions(
    windows: Sequence[tuple[int, list[int]]], tokenizer: PreTrainedTokenizerBase, context_tokens: int, rng: random.Random
) -> Iterator[Item]:
    """Answer some questions about one context, turn after turn: which word is missing in a sentence of it.

    The word is the sentence's rarest capitalised word or number (in the fewest of the texts) that the context holds exactly once. The
    other options are words of its kind and of as many tokens, from elsewhere in the context where it has enough of them, else from other
    texts.
    """
    works: defaultdict[str, set[int]] = defaultdict(set)  # each word's, in the windows
    texts = []
    for work, ids in windows:
        texts.append(str(tokenizer.decode(ids[len(opening_ids(tokenizer)) :])))
        for word in _BLANKABLE.findall(texts[-1]):
            works[word].add(work)
    everywhere = sorted(works)
    for (work, ids), text in zip(windows, texts, strict=True):
        gaps = [gap for sentence in _sentences(text) if (gap := _rarest_gap(sentence, text, works)) is not None]
        nearby = sorted(set(_BLANKABLE.findall(text)))
        rng.shuffle(gaps)
        questions: list[Question] = []
        history: tuple[int, ...] = ()
        for gap in gaps:
            words = rng.sample(nearby, len(nearby)) + rng.sample(everywhere, min(len(everywhere), 500))
            asked = _ask(gap, words, tokenizer)
            if asked is not None and len(questions) < _TURNS:
                questions.append(Question(history + asked.prompt, asked.options))
                history = questions[-1].prompt + asked.options[0] + _ids(tokenizer, ".")
        if len(questions) == _TURNS:
            yield Item(work, tuple(ids), tuple(questions))


def _ask(gap: tuple[str, str, str], words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Question | None:
    """Ask for the word of a gap, with the first of some words as wrong options that are of its kind and length; None where they lack."""
    before, word, after = gap
    prompt = f"\n\nComplete this sentence of the text: {before}____{after}\nThe missing word is"
    options = [_continuation(tokenizer, prompt, f" {word}")]
    for other in words:
        if len(options) < _OPTIONS and other[0].isdigit() == word[0].isdigit() and other not in prompt:
            option = _continuation(tokenizer, prompt, f" {other}")
            if len(option) == len(options[0]) and option not in options:
                options.append(option)
    return None if len(options) < _OPTIONS or word in prompt else Question(_ids(tokenizer, prompt), tuple(options))


TASKS = {
    "choose_continuation": Task(choose_continuation, ("choice",), tokens_after=1 + _OPTIONS * _CONTINUATION),
    "retrieve_key": Task(retrieve_key, ("exact", "choice")),
    "copy_passage": Task(copy_passage, ("tokens", "exact")),
    "answer_questions": Task(answer_questions, ("exact", "choice"), windows_an_item=10),
}


def _sentences(text: str) -> list[str]:
    """The whole sentences of a window's text, each on one line; the first and the last may have been cut."""
    found = (" ".join(sentence.split()) for sentence in _SENTENCE_END.split(text)[1:-1])
    return [sentence for sentence in found if len(sentence.split()) in _SENTENCE_WORDS and sentence[-1] in ".!?"]


def _rarest_gap(sentence: str, text: str, works: dict[str, set[int]]) -> tuple[str, str, str] | None:
    """What stands before, at and after the word of a sentence that is to be found; None where no word will do."""
    words = [match for match in _BLANKABLE.finditer(sentence) if match.start() > 0 and text.count(match[0]) == 1]
    if not words:
        return None
    rarest = min(words, key=lambda match: (len(works[match[0]]), -len(match[0]), match.start()))
    return sentence[: rarest.start()], rarest[0], sentence[rarest.end() :]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _continuation(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str) -> tuple[int, ...]:
    """The tokens of a text behind a prompt, as they are when both are tokenized at once."""
    return _ids(tokenizer, prompt + text)[len(_ids(tokenizer, prompt)) :]


def _occurrences(some: tuple[int, ...], ids: Sequence[int]) -> int:
    return sum(tuple(ids[at : at + len(some)]) == some for at in range(len(ids) - len(some) + 1))
