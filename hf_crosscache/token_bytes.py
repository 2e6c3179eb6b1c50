"""What each token id spells, in bytes: read once from a tokenizer's vocabulary."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .errors import AlignmentError

_METASPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TABLES: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, TokenBytes] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of every token of a tokenizer, which need not be whole characters.

    spelling: bytes of each id, None where no token has the id.
    special: ids that stand for no text of the user, such as BOS; they spell their own names.
    loose: ids that need not spell just what stands in a text: the special ones, and the next.
    eats_left, eats_right: ids of added tokens that swallow the whitespace before or behind them (some chat templates rely on it).
    space_at_start: the tokenizer puts a space before a text: "always", only where it begins with none ("if missing"), or None.
    space_after_special: the same behind a special token.
    """

    spelling: list[bytes | None]
    special: frozenset[int]
    loose: frozenset[int]
    eats_left: frozenset[int]
    eats_right: frozenset[int]
    space_at_start: str | None
    space_after_special: str | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, side: str) -> TokenBytes:
        """Read the table of a fast tokenizer whose tokens are bytes (byte-level BPE) or pieces with byte fallback (sentencepiece).

        The table is kept for as long as the tokenizer lives, and read again when tokens were added to it.

        Args:
            side: "source" or "target", for the errors.

        Raises:
            AlignmentError: the tokenizer is of another kind.
        """
        known = _TABLES.get(tokenizer)
        if known is None or len(known.spelling) < len(tokenizer):
            known = _TABLES[tokenizer] = _read(tokenizer, side)
        return known

    def spell(self, ids: Iterable[int], side: str) -> list[bytes]:
        """Return the bytes of some ids.

        Raises:
            AlignmentError: an id is no token; it says which.
        """
        ids = list(ids)
        try:
            spelled = [self.spelling[index] for index in ids]
        except IndexError:
            spelled = [self.spelling[index] if index < len(self.spelling) else None for index in ids]
        if None in spelled or (ids and min(ids) < 0):
            at = next(at for at, index in enumerate(ids) if spelled[at] is None or index < 0)
            raise AlignmentError(
                f"The {side}'s token {at} has the id {ids[at]}, which its tokenizer does not know ({len(self.spelling)} ids). Pass the "
                f"tokenizer that made the {side}'s ids, and leave padding out or mask it."
            )
        return spelled  # type: ignore[return-value]


def _read(tokenizer: PreTrainedTokenizerBase, side: str) -> TokenBytes:
    name = f"The {side}'s tokenizer ({type(tokenizer).__name__})"
    if not tokenizer.is_fast:
        raise AlignmentError(
            f"{name} is not a fast one: which bytes its tokens spell is not known. Load it with AutoTokenizer, from a folder that has a "
            "tokenizer.json."
        )
    spell = _speller(_decoders(tokenizer.backend_tokenizer.decoder), name)  # type: ignore[attr-defined]
    vocabulary = tokenizer.get_vocab()
    spelling: list[bytes | None] = [None] * max(len(tokenizer), 1 + max(vocabulary.values()))
    for token, index in vocabulary.items():
        spelling[index] = spell(token)
    added = tokenizer.added_tokens_decoder
    special = frozenset(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}
    for index, token in added.items():
        if index in special or _METASPACE not in token.content:
            spelling[index] = token.content.encode()
    eats_left = frozenset(index for index, token in added.items() if token.lstrip)
    eats_right = frozenset(index for index, token in added.items() if token.rstrip)
    plain = TokenBytes(spelling, special, special | eats_left | eats_right, eats_left, eats_right, None, None)
    at_start = _space_before(tokenizer, plain, "", side)
    opening = next((added[index].content for index in sorted(special) if index in added and index not in eats_right), None)
    after_special = None if opening is None else _space_before(tokenizer, plain, opening, side)
    return replace(plain, space_at_start=at_start, space_after_special=after_special)


def _space_before(tokenizer: PreTrainedTokenizerBase, table: TokenBytes, opening: str, side: str) -> str | None:
    def spaces(text: str) -> int:
        ids = tokenizer(opening + text, add_special_tokens=False)["input_ids"]
        spelled = b"".join(table.spell((index for index in ids if index not in table.special), side))
        return len(spelled) - len(spelled.lstrip(b" "))

    if spaces("a") == 0:
        return None
    return "always" if spaces(" a") > 1 else "if missing"


def _decoders(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder, as in its tokenizer.json."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _speller(steps: list[dict[str, Any]], name: str) -> Any:
    kinds = {step["type"] for step in steps}
    metaspace = "Metaspace" in kinds or any(step.get("pattern") == {"String": _METASPACE} for step in steps)
    if "ByteLevel" in kinds:
        return _byte_level
    if metaspace and not kinds & {"WordPiece", "BPEDecoder", "CTC"}:
        return _metaspace_with_bytes if "ByteFallback" in kinds else _metaspace
    raise AlignmentError(
        f"{name} has the decoder {' + '.join(sorted(kinds)) or 'none'}, which does not say which bytes of a text each token spells: "
        "byte-level BPE, or sentencepiece pieces with ▁ for a space, expected."
    )


_TO_BYTE = {ord(character): chr(byte) for byte, character in bytes_to_unicode().items()}


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:  # a token that was added as it stands
        return token.encode()


def _metaspace(token: str) -> bytes:
    return token.replace(_METASPACE, " ").encode()


def _metaspace_with_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _metaspace(token)
