"""Documents are held out whole and for ever; windows are cut as the tokenizer starts a text."""

import gzip
import itertools
import json
import lzma

import pytest
import torch
from builders import MODELS
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_crosscache.errors import CalibrationError
from hf_crosscache.texts import SPLITS, Document, opening_ids, read_documents, token_windows


@given(st.text(min_size=1), st.text(min_size=1))
def test_the_split_is_a_function_of_the_work_or_the_text(text, other):
    assert Document(text).split == Document(text).split in SPLITS
    assert Document(text, work="w").split == Document(other, work="w").split


def test_splits_are_eight_one_one():
    counts = {split: sum(Document(str(i)).split == split for i in range(4000)) / 4000 for split in SPLITS}
    assert counts["fit"] == pytest.approx(0.8, abs=0.03) and counts["test"] == pytest.approx(0.1, abs=0.02)


def test_files_strings_rows_and_packed_files_are_read(tmp_path):
    rows = [{"text": "one", "work": "w"}, {"text": "two"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_text(lines)
    with lzma.open(tmp_path / "c.jsonl.xz", "wt") as file:
        file.write(lines)
    with gzip.open(tmp_path / "d.txt.gz", "wt") as file:
        file.write("packed")
    paths = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.jsonl.xz", "d.txt.gz")]
    assert [d.text for d in read_documents(paths)] == ["plain", "one", "two", "one", "two", "packed"]
    assert next(iter(read_documents(tmp_path / "b.jsonl"))).work == "w"
    assert [d.text for d in read_documents(["a string", {"text": "a row"}, Document("a document")])] == [
        "a string",
        "a row",
        "a document",
    ]


def test_what_is_not_a_text_is_said(tmp_path):
    with pytest.raises(CalibrationError, match="does not exist"):
        list(read_documents([tmp_path / "none.txt"]))
    (tmp_path / "a.jsonl").write_text('{"body": 1}\n')
    with pytest.raises(CalibrationError, match="line 1: no 'text' field"):
        list(read_documents(tmp_path / "a.jsonl"))
    with pytest.raises(CalibrationError, match="int found"):
        list(read_documents([3]))


def test_windows_come_from_their_split_alone_and_repeat(texts, tokenizer):
    documents = list(read_documents(texts))
    settings = {"length": 128, "count": 60, "seed": 3}
    by_split = {split: token_windows(documents, tokenizer, split=split, **settings) for split in SPLITS}
    assert by_split["fit"].shape == (60, 128)
    rows = {split: {tuple(row.tolist()) for row in windows} for split, windows in by_split.items()}
    assert not rows["fit"] & rows["test"] and not rows["fit"] & rows["validation"]
    assert torch.equal(by_split["test"], token_windows(documents, tokenizer, split="test", **settings))


def test_documents_share_the_windows_evenly(tokenizer):
    documents = [Document(f"{i} " + "word another third " * size) for i, size in enumerate((3000, 200, 200, 200))]
    for document in documents:
        object.__setattr__(document, "work", "the same work")
    split = documents[0].split
    windows = token_windows(documents, tokenizer, split=split, length=64, count=8)
    assert len(windows) == 8
    every = token_windows(documents, tokenizer, split=split, length=64, count=10_000)
    assert len(every) > 40  # where the count is not reached, the long one gives the rest


def test_windows_open_with_the_special_tokens_of_the_tokenizer(texts, tokenizer):
    with_bos = AutoTokenizer.from_pretrained(MODELS / "gemma3")
    assert opening_ids(tokenizer) == [] and opening_ids(with_bos) == [with_bos.bos_token_id]
    windows = token_windows(read_documents(texts), with_bos, split="fit", length=32, count=5)
    assert windows.shape == (5, 32) and (windows[:, 0] == with_bos.bos_token_id).all()


def test_texts_too_short_for_a_window_are_said(tokenizer):
    with pytest.raises(CalibrationError, match="is 512 tokens long"):
        token_windows([Document("short")], tokenizer, split="fit", length=512, count=4)


def test_an_endless_dataset_ends(tokenizer):
    endless = ({"text": f"{i}. " + "the cat sat on the mat. " * 50} for i in itertools.count())
    assert token_windows(read_documents(endless), tokenizer, split="test", length=32, count=20).shape == (20, 32)
