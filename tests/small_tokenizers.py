"""Tokenizers of every kind that language models have, small enough to make on the spot."""

from __future__ import annotations

import functools

from builders import MODELS
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

POCKET = ("llama", "gemma3", "qwen3-small")
_TEXTS = ["The quick brown fox jumps over the lazy dog. " * 3, "naïve  café\t你好 世界\r\n    def f(x): return x", "👍🏽 12,345 times!"]
_PIECES = [
    "\r\n",
    "\t",
    "  ",
    " " * 40,
    "\n\n\n",
    "é",
    "e\u0301",
    "你好",
    "👩‍👩‍👧",
    "👍🏽",
    "▁",
    "<|im_end|>",
    "the",
    " fox",
    "ﬁ",
    "\u200b",
    "Ω",
    "\x00",
]
TEXT = st.lists(st.one_of(st.sampled_from(_PIECES), st.text(max_size=6), st.sampled_from(_TEXTS)), max_size=12).map("".join)


@functools.cache
def pocket(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer of the repository: byte-level BPE, gemma3 with a BOS."""
    return AutoTokenizer.from_pretrained(MODELS / name)


@functools.cache
def byte_level(normalizer: str | None = None, specials: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> PreTrainedTokenizerBase:
    """Byte-level BPE, as Qwen or Llama 3 have; normalizer "NFC" or "Lowercase"."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = getattr(normalizers, normalizer)()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(_TEXTS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(list(specials))
    return PreTrainedTokenizerFast(tokenizer_object=made)


@functools.cache
def sentencepiece(prefix: str | None, strips_right: bool = False) -> PreTrainedTokenizerBase:
    """Pieces, ▁ for a space, bytes for what has no piece; prefix None as in Gemma, "prepend" as in Llama 2, "metaspace" as in Mistral."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    for character in ["▁", *"abcdefghijklmnopqrstuvwxyzTHD.,:é好你"]:
        vocabulary.setdefault(character, len(vocabulary))
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("f", "o"),
        ("fo", "x"),
        ("▁", "fox"),
        ("H", "i"),
        ("▁", "Hi"),
        ("▁", "▁"),
        ("▁▁", "▁▁"),
        ("你", "好"),
    ]
    for one, other in merges:
        vocabulary.setdefault(one + other, len(vocabulary))
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        spaces = [normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    made.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens(["<unk>", "<s>", "</s>", AddedToken("<|end|>", rstrip=strips_right)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def any_of(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer that gives every text back, by a name that a test can show."""
    kinds = {"byte-level": byte_level, "like-gemma": lambda: sentencepiece(None), "like-llama2": lambda: sentencepiece("prepend")}
    return kinds[name]() if name in kinds else pocket(name)
