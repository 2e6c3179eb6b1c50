"""Texts: read them from files or iterables, hold whole documents out, cut them into token windows."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .errors import CalibrationError

SPLITS = ("fit", "validation", "test")
_DOCUMENTS_AT_ONCE = 64
_CHARACTERS_READ = 40  # characters read for each token wanted: ten tokens to choose from
_DOCUMENTS_READ = 1000  # documents read at least, so that every split has some
_OPENERS = {".xz": lzma.open, ".gz": gzip.open}


@dataclass(frozen=True)
class Document:
    """A text, and the work it belongs to where several texts are pieces of one (they are held out together)."""

    text: str
    work: str | None = None

    @property
    def split(self) -> str:
        """Where the document belongs: 80 % "fit", 10 % "validation" (alpha, head selection, R2), 10 % "test" (evaluation).

        A pure function of the content, so that a later evaluation over the same texts never meets a document of the fit.
        """
        bucket = int(hashlib.sha256((self.work or self.text).encode()).hexdigest(), 16) % 10
        return "test" if bucket == 0 else "validation" if bucket == 1 else "fit"


def read_documents(texts: str | Path | Iterable[Any]) -> Iterator[Document]:
    """Read documents from a file, a list of files, an iterable of strings, or rows with a "text" field (a `datasets` dataset).

    Files are plain text, one document each, or JSON lines with a "text" field and optionally "work"; `.gz` and `.xz` are unpacked.

    Raises:
        CalibrationError: a file does not exist or a row has no text; it says which.
    """
    if isinstance(texts, (str, Path)):
        texts = [Path(texts)]
    for item in texts:
        if isinstance(item, Document):
            yield item
        elif isinstance(item, Path):
            yield from _read_file(item)
        elif isinstance(item, str):
            yield Document(item)
        elif hasattr(item, "get") and isinstance(item.get("text"), str):
            yield Document(item["text"], item.get("work"))
        else:
            raise CalibrationError(f"A text is a string, a path, or a row with a 'text' field; {type(item).__name__} found.")


def token_windows(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str,
    length: int,
    count: int,
    seed: int = 0,
) -> torch.Tensor:
    """Return the ids of `document_windows` alone, `[n, length]` on the CPU, n at most `count`."""
    return torch.tensor([ids for _, ids in document_windows(documents, tokenizer, split=split, length=length, count=count, seed=seed)])


def document_windows(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str,
    length: int,
    count: int,
    seed: int = 0,
) -> list[tuple[int, list[int]]]:
    """Cut the documents of one split into token windows, each starting the way the tokenizer starts a text.

    Documents are taken in a random order and share the windows evenly, from random places, so that a few long works do not make up the
    whole set; only where that does not fill the count do the longer ones give more. Of a very long list only the first are read (`enough`).
    The windows depend on the seed and the texts alone.

    Returns:
        At most `count` pairs: a number that the windows of one work share, and `length` token ids.

    Raises:
        CalibrationError: no document of the split is `length` tokens long.
    """
    chosen = list(enough(count * length, (document for document in documents if document.split == split)))
    rng = random.Random(seed)
    rng.shuffle(chosen)
    opening = opening_ids(tokenizer)
    body = length - len(opening)
    share = -(-count // max(1, len(chosen)))
    works: dict[str, int] = {}
    windows: list[tuple[int, list[int]]] = []
    spare: list[tuple[int, list[int]]] = []
    with tqdm(total=count, desc=f"tokenize {split}", unit="window", delay=5) as progress:
        for start in range(0, len(chosen), _DOCUMENTS_AT_ONCE):
            if len(windows) >= count:
                break
            some = chosen[start : start + _DOCUMENTS_AT_ONCE]
            encoded = tokenizer([document.text for document in some], add_special_tokens=False, verbose=False)["input_ids"]
            for document, ids in zip(some, encoded, strict=True):
                work = works.setdefault(document.work or document.text, len(works))
                cut = [(work, opening + ids[at : at + body]) for at in range(0, len(ids) - body + 1, body)]
                rng.shuffle(cut)
                windows += cut[:share]
                spare += cut[share : share + max(0, count - len(spare))]
                progress.update(len(cut[:share]))
    windows = (windows + spare)[:count]
    if not windows:
        raise CalibrationError(
            f"None of the {len(chosen)} documents held for {split!r} is {length} tokens long. "
            "Give more or longer texts, or a smaller window."
        )
    return windows


def enough(tokens: int, documents: Iterable[Document]) -> Iterator[Document]:
    """Yield documents until there are many and they hold about ten times the tokens wanted, so that an endless dataset ends."""
    characters = 0
    for number, document in enumerate(documents, 1):
        yield document
        characters += len(document.text)
        if characters >= _CHARACTERS_READ * tokens and number >= _DOCUMENTS_READ:
            return


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that a tokenizer puts before any text, such as a BOS; [] for many."""
    with_special = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return with_special[:start]
    return []


def _read_file(path: Path) -> Iterator[Document]:
    if not path.is_file():
        raise CalibrationError(f"{path} does not exist: give text files, or JSON lines with a 'text' field.")
    opener = _OPENERS.get(path.suffix, open)
    kind = path.with_suffix("").suffix if path.suffix in _OPENERS else path.suffix
    with opener(path, "rt", encoding="utf-8") as file:
        if kind != ".jsonl":
            yield Document(file.read())
            return
        for number, line in enumerate(file, 1):
            row = json.loads(line)
            if not isinstance(row.get("text"), str):
                raise CalibrationError(f"{path}, line {number}: no 'text' field.")
            yield Document(row["text"], row.get("work"))
