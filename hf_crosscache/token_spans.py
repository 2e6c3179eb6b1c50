"""Where each token of one model stands in a text, in bytes; the text may grow, and its last tokens may change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from transformers import PreTrainedTokenizerBase

from .errors import AlignmentError
from .token_bytes import TokenBytes

_WHITESPACE = re.compile(rb"\s*")
_SHOWN = 24  # bytes of a text that an error shows


@dataclass(frozen=True, eq=False)
class TokenSpans:
    """The tokens of one sequence, and the bytes of the text that each spells.

        spans = TokenSpans.of_text(tokenizer, "A text.", side="source")
        spans = spans.extend(generated_ids)             # only what is new is looked at

    Tokens that spell nothing of the text have empty spans where they stand: special tokens that are not written in it, such as a BOS, and
    the space that some tokenizers put before a text.

    side: "source" or "target", for the errors. table: what the tokens spell. ids, starts, ends: int64 `[T]`, token t spells the bytes
    `text[starts[t]:ends[t]]` of the UTF-8 text, which may begin or end within a character.
    """

    side: str
    table: TokenBytes
    ids: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    text: bytes

    @classmethod
    def of_text(cls, tokenizer: PreTrainedTokenizerBase, text: str, *, side: str, add_special_tokens: bool = True) -> TokenSpans:
        """Tokenize a text; raises as `of_ids` does."""
        _utf8(text, side)
        ids = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return cls.of_ids(tokenizer, ids, side=side, text=text)

    @classmethod
    def of_ids(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        ids: torch.Tensor | Sequence[int],
        *,
        side: str,
        text: str | bytes | None = None,
    ) -> TokenSpans:
        """Find the spans of token ids, which the tokenizer or the model itself has made.

        Args:
            ids: `[T]`, without padding.
            side: "source" or "target", for the errors.
            text: all that the ids spell, where it is known. A special token belongs to the text where the text has its name there. Without
                a text no special token does, and a space before the first word is taken for the tokenizer's own where it puts one.

        Raises:
            AlignmentError: the ids spell another text (it names the first difference), or the tokenizer does not say what they spell.
        """
        nothing = torch.empty(0, dtype=torch.long)
        empty = cls(side, TokenBytes.of(tokenizer, side), nothing, nothing, nothing, b"")
        return empty.extend(ids, text=text)

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def complete_text(self) -> str:
        """The text as a string, without a last character of which only some bytes are there."""
        return self.text.decode("utf-8", errors="ignore")

    def extend(self, ids: torch.Tensor | Sequence[int], *, text: str | bytes | None = None) -> TokenSpans:
        """Return the spans with tokens more, which alone are looked at.

        Args:
            ids: `[n]` the new tokens.
            text: what they spell, where it is known; it may have been tokenized by itself.

        Raises:
            AlignmentError: as `of_ids`.
        """
        new = _list_of(ids, self.side)
        spelled = self.table.spell(new, self.side)
        loose = [at for at, index in enumerate(new) if index in self.table.loose]
        if text is None:
            spelled = self._guessed(new, spelled, loose)
            added = b"".join(spelled)
            lengths = torch.tensor([len(piece) for piece in spelled], dtype=torch.long)
        else:
            added = _utf8(text, self.side)
            lengths = self._found(new, spelled, loose, added)
        ends = len(self.text) + lengths.cumsum(0)
        return replace(
            self,
            ids=torch.cat([self.ids, torch.tensor(new, dtype=torch.long)]),
            starts=torch.cat([self.starts, ends - lengths]),
            ends=torch.cat([self.ends, ends]),
            text=self.text + added,
        )

    def crop(self, length: int) -> TokenSpans:
        """Return the spans of the first `length` tokens, and the text up to there."""
        ends = self.ends[:length]
        text = self.text[: int(ends[-1])] if len(ends) else b""
        return replace(self, ids=self.ids[:length], starts=self.starts[:length], ends=ends, text=text)

    def retokenized(self, ids: torch.Tensor | Sequence[int], *, text: str | bytes | None = None) -> TokenSpans:
        """Return the spans of a longer text whose tokens begin as these do; the last of these may have changed.

        Args:
            ids: `[T']` all tokens of the longer text.
            text: all of it, where it is known.

        Raises:
            AlignmentError: as `of_ids`.
        """
        new = torch.tensor(_list_of(ids, self.side), dtype=torch.long)
        shared = min(len(new), len(self))
        differs = (new[:shared] != self.ids[:shared]).nonzero()
        same = int(differs[0]) if len(differs) else shared
        kept = self if same == len(self) else self.crop(same)
        if text is None:
            return kept.extend(new[same:])
        whole = _utf8(text, self.side)
        if not whole.startswith(kept.text):
            raise AlignmentError(_difference(self.side, kept.text, whole, 0))
        return kept.extend(new[same:], text=whole[len(kept.text) :])

    def within(self, spans: Sequence[tuple[int, int]]) -> TokenSpans:
        """Return the spans in a shorter text, of some stretches of this one: what two models share where each has its own chat template.

        Tokens between the stretches spell nothing of the shorter text, and have empty spans.

        Args:
            spans: (start, end) bytes of this text, in order, without overlap.
        """
        bounds = torch.tensor([(0, 0), *spans], dtype=torch.long)
        first, last = bounds[:, 0].contiguous(), bounds[:, 1]
        before = (last - first).cumsum(0) - (last - first)  # bytes of the shorter text before each stretch

        def shortened(at: torch.Tensor) -> torch.Tensor:
            stretch = torch.searchsorted(first, at, right=True) - 1
            return before[stretch] + torch.minimum(at - first[stretch], (last - first)[stretch])

        text = b"".join(self.text[start:end] for start, end in spans)
        return replace(self, starts=shortened(self.starts), ends=shortened(self.ends), text=text)

    def _guessed(self, ids: list[int], spelled: list[bytes], loose: list[int]) -> list[bytes]:
        """What the tokens add to a text that nobody has told."""
        special = self.table.special
        spelled = list(spelled)
        for at in loose:
            spelled[at] = b"" if ids[at] in special else spelled[at]
        own_spaces = set()
        if self.table.space_after_special:
            own_spaces = {at + 1 for at in loose if ids[at] in special} | ({0} if len(self) and int(self.ids[-1]) in special else set())
        if self.table.space_at_start and not self.text and all(index in special for index in self.ids.tolist()):
            own_spaces |= {next((at for at, index in enumerate(ids) if index not in special), len(ids))}
        for at in own_spaces:
            if at < len(ids) and ids[at] not in special:
                spelled[at] = spelled[at].removeprefix(b" ")
        return spelled

    def _found(self, ids: list[int], spelled: list[bytes], loose: list[int], text: bytes) -> torch.Tensor:
        """How many bytes of a known text each token spells: `[n]`, in sum all of it."""
        lengths = torch.tensor([len(piece) for piece in spelled], dtype=torch.long)
        at = first = 0
        for stop in [*loose, len(ids)]:
            at = self._follow(ids, spelled, lengths, first, stop, text, at)
            if stop < len(ids):
                name, space = spelled[stop], 0
                eaten_before = stop > 0 and ids[stop - 1] in self.table.eats_right
                if not text.startswith(name, at) and (eaten_before or ids[stop] in self.table.eats_left):
                    space = _spaces(text, at)
                if text.startswith(name, at + space):
                    lengths[stop - 1 if eaten_before else stop] += space
                    at += space + len(name)
                elif ids[stop] in self.table.special:
                    lengths[stop] = 0
                else:
                    raise AlignmentError(_difference(self.side, name, text[at:], len(self.text) + at))
            first = stop + 1
        if at < len(text) and ids and ids[-1] in self.table.eats_right:
            lengths[-1] += _spaces(text, at)
            at += _spaces(text, at)
        if at < len(text):
            raise AlignmentError(_difference(self.side, b"", text[at:], len(self.text) + at))
        return lengths

    def _follow(self, ids: list[int], spelled: list[bytes], lengths: torch.Tensor, first: int, stop: int, text: bytes, at: int) -> int:
        """Follow a text along the plain tokens from `first` to `stop`; where they begin, a space or whitespace may be nobody's."""
        run = b"".join(spelled[first:stop])
        if not run:
            return at
        own_space = None
        if first or (len(self) and int(self.ids[-1]) in self.table.special):  # behind a special token, be it of an earlier call
            own_space = self.table.space_after_special
        if not first or not len(self.text) + at:  # tokenized by itself, or the first of all words
            own_space = own_space or self.table.space_at_start
        goes_on = not first and len(self.text) + at > 0  # the words so far may have been tokenized together with these, or not
        skips = [0, 1] if own_space == "if missing" or (own_space and goes_on) else [1, 0] if own_space else [0]
        eaten = _spaces(text, at) if first and ids[first - 1] in self.table.eats_right else 0
        for space in (0, eaten):
            for skip in skips:
                if run[:skip] in (b"", b" ") and text.startswith(run[skip:], at + space):
                    lengths[first] -= skip
                    if space:
                        lengths[first - 1] += space
                    return at + space + len(run) - skip
        skip = 1 if own_space and run[:1] == b" " and text[at : at + 1] != b" " else 0
        raise AlignmentError(_difference(self.side, run[skip:], text[at + eaten :], len(self.text) + at + eaten))


def _list_of(ids: torch.Tensor | Sequence[int], side: str) -> list[int]:
    if isinstance(ids, torch.Tensor):
        if ids.ndim != 1:
            raise AlignmentError(f"The {side}'s ids of one sequence, [T], expected; {list(ids.shape)} found. Take one row at a time.")
        return ids.tolist()
    return list(ids)


def _utf8(text: str | bytes, side: str) -> bytes:
    try:
        return text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise AlignmentError(f"The {side}'s text is not Unicode: character {error.start} is half of a pair (a surrogate).") from None


def _spaces(text: bytes, at: int) -> int:
    found = _WHITESPACE.match(text, at)
    return found.end() - at if found else 0


def _difference(side: str, spelled: bytes, text: bytes, offset: int) -> str:
    """Say where the tokens of a side leave a text; `offset` bytes stand before both."""
    same = first_difference(spelled, text)
    return (
        f"The {side}'s tokens do not spell the text: from byte {offset + same} on they have {shown(spelled, same)}, the text has "
        f"{shown(text, same)}. Pass the text that the ids were made of. If the tokenizer changes texts "
        "(Unicode normal form, case, spaces), pass both models the text as it decodes it."
    )


def first_difference(one: bytes, other: bytes) -> int:
    """How many bytes two texts begin with in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def shown(text: bytes, at: int) -> str:
    """What an error shows of a text from a byte on: "its end" where nothing is left."""
    piece = text[at : at + _SHOWN]
    return repr(piece.decode("utf-8", errors="backslashreplace")) if piece else "its end"
