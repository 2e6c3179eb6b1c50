"""Which token of the source has read what a token of the target has read: two tokenizers over one text, by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from .errors import AlignmentError
from .token_spans import TokenSpans, first_difference, shown


@dataclass(frozen=True, eq=False)
class OverlapWeights:
    """The source tokens that spell a target token, as the entries of a sparse matrix: target token = sum of weight times source token.

    Only source tokens that end within the target token count, since the others have read on. Where there are none, the last one before
    counts alone. The weights of a target token are its bytes that each spells, and sum to one.

    row, target_index, source_index: int64 `[N]`, row of the batch and the slots in both caches, sorted. weight: float32 `[N]`.
    """

    row: torch.Tensor
    target_index: torch.Tensor
    source_index: torch.Tensor
    weight: torch.Tensor

    def to(self, device: torch.device | str) -> OverlapWeights:
        """Return the weights on a device."""
        return _moved(self, device)


@dataclass(frozen=True, eq=False)
class TokenAlignment:
    """For each token of the target the last token of the source that has read no more of the text; `[B, T]` each, T slots of the target.

    Keys that are taken over lose the rotation of the source's position and get that of the target's, so both positions are kept.

    source_index: int64, the slot in the source's cache; -1 where the source has read nothing yet, and in padding.
    source_position_ids: int64, the position of that token among the source's tokens, 0 where there is none.
    position_ids: int64, the position of the target's token among the target's tokens, 0 in padding.
    translated: bool, False for what is left to the target: tokens before any of the source's, padding, and the end of the context where
        the source has not finished a token. Elsewhere a source token that spells more than the target's has its predecessor stand in.
    overlap: the alternative to the last token alone.
    """

    source_index: torch.Tensor
    source_position_ids: torch.Tensor
    position_ids: torch.Tensor
    translated: torch.Tensor
    overlap: OverlapWeights

    @property
    def length(self) -> int:
        """Slots of the target that can be handed over at once: those up to the last translated token of every row."""
        slots = torch.arange(1, self.translated.shape[1] + 1)
        return int((self.translated.cpu() * slots).amax(1).min()) if self.translated.numel() else 0

    def rolled(self) -> TokenAlignment:
        """Return the alignment of a batch whose last row was made the first."""
        names = [field.name for field in fields(self) if field.name != "overlap"]
        rows = (self.overlap.row + 1) % len(self.source_index)
        order = rows.argsort(stable=True)
        overlap = OverlapWeights(rows[order], *(getattr(self.overlap, n)[order] for n in ("target_index", "source_index", "weight")))
        return replace(self, overlap=overlap, **{name: getattr(self, name).roll(1, 0) for name in names})

    def to(self, device: torch.device | str) -> TokenAlignment:
        """Return the alignment on a device."""
        return _moved(self, device)


def align(source: TokenSpans, target: TokenSpans, *, start: int = 0) -> TokenAlignment:
    """Align the tokens of two models over one text.

    Target token t, which ends at byte e of the text, gets the last source token that ends at e or before. Tokens that spell nothing of the
    text (special ones, those of a chat template) are matched in order with those of the source that stand between the same bytes: equal
    ones, and special ones that have no equal (a BOS of each). The others get the last source token before them.

    One of the two may have read on: the texts have to agree as far as both go.

    Args:
        source, target: the tokens of one sequence each.
        start: first target token to align, so that a longer context costs what is new; the tensors then begin with it.

    Returns:
        The alignment of a batch of one, `[1, T - start]`; `overlap.target_index` too counts from `start`.

    Raises:
        AlignmentError: the two texts differ; it names the first difference.
    """
    shared = min(len(source.text), len(target.text))
    if source.text[:shared] != target.text[:shared]:
        same = first_difference(source.text, target.text)
        raise AlignmentError(
            f"The {source.side} and the {target.side} have read different texts: from byte {same} on the {source.side}'s is "
            f"{shown(source.text, same)}, the {target.side}'s {shown(target.text, same)}. Pass text= on both sides where special tokens "
            "are written in it, and use chat_spans where each has its own chat template."
        )
    ends, starts = target.ends[start:].contiguous(), target.starts[start:].contiguous()
    index = _last_token(source.ends, ends)
    _match_empty(source, target, start, index)
    finished = _last_token(source.ends, torch.tensor([len(target.text)]))
    read = int(source.ends[finished]) if len(source) and finished >= 0 else 0
    translated = (index >= 0) & (ends <= read)
    return TokenAlignment(
        source_index=index[None],
        source_position_ids=index.clamp_min(0)[None],
        position_ids=torch.arange(start, len(target))[None],
        translated=translated[None],
        overlap=_overlap(source, starts, index),
    )


def align_batch(
    sources: Sequence[TokenSpans],
    targets: Sequence[TokenSpans],
    *,
    source_length: int | None = None,
    target_length: int | None = None,
) -> TokenAlignment:
    """Align each row of a batch that is padded on the left, on both sides.

    Args:
        sources, targets: the tokens of each row, without padding.
        source_length, target_length: slots of the caches; the longest row by default.

    Raises:
        AlignmentError: the rows do not fit, or a row raises as `align` does; it says which.
    """
    width_src = max((len(row) for row in sources), default=0) if source_length is None else source_length
    width_tgt = max((len(row) for row in targets), default=0) if target_length is None else target_length
    if len(sources) != len(targets) or not sources:
        raise AlignmentError(f"As many rows of the source as of the target expected; {len(sources)} and {len(targets)} found.")
    rows = []
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        for spans, width in ((source, width_src), (target, width_tgt)):
            if len(spans) > width:
                raise AlignmentError(f"Row {number}: the {spans.side} has {len(spans)} tokens, more than the {width} slots of its cache.")
        try:
            rows.append(_padded(align(source, target), number, width_src - len(source), width_tgt - len(target)))
        except AlignmentError as error:
            raise AlignmentError(f"Row {number}: {error}") from None
    overlap = OverlapWeights(*(torch.cat([getattr(row.overlap, field.name) for row in rows]) for field in fields(OverlapWeights)))
    names = [field.name for field in fields(TokenAlignment) if field.name != "overlap"]
    return TokenAlignment(**{name: torch.cat([getattr(row, name) for row in rows]) for name in names}, overlap=overlap)


def _last_token(ends: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The last token that ends at a byte or before, -1 for none; not those behind it that spell nothing."""
    index = torch.searchsorted(ends, at)  # the first token that ends there or later: the one that spells the byte before
    reaches = torch.cat([ends, ends.new_tensor([-1])])[index] == at
    return torch.where(at > 0, index - (~reaches).long(), -1)


def _match_empty(source: TokenSpans, target: TokenSpans, start: int, index: torch.Tensor) -> None:
    """Set the source tokens of those target tokens that spell nothing of the text, in place."""
    empty = (target.starts == target.ends).nonzero()[:, 0]
    if not len(empty) or int(empty[-1]) < start:
        return
    offsets = target.ends[empty]
    empty = empty[offsets >= target.ends[start]]  # whole runs, also where `start` lies within one
    offsets, counts = torch.unique_consecutive(target.ends[empty], return_counts=True)
    before = _last_token(source.ends, offsets)
    behind = torch.searchsorted(source.ends, offsets, right=True)
    theirs = _named(target, empty)
    first = 0
    matched: list[int] = []
    for count, low, high in zip(counts.tolist(), (before + 1).tolist(), behind.tolist(), strict=True):
        ours = _named(source, torch.arange(low, high))
        matched += [low + at for at in _partners(ours, theirs[first : first + count])]
        first += count
    new = empty >= start
    index[empty[new] - start] = torch.tensor(matched, dtype=torch.long)[new]


def _named(spans: TokenSpans, tokens: torch.Tensor) -> list[tuple[bytes, bool]]:
    """The bytes of some tokens, and whether they are special."""
    ids = spans.ids[tokens].tolist()
    return [(name, index in spans.table.special) for name, index in zip(spans.table.spell(ids, spans.side), ids, strict=True)]


def _partners(ours: list[tuple[bytes, bool]], theirs: list[tuple[bytes, bool]]) -> list[int]:
    """For each of theirs the last of ours that stands no later than it, -1 for none.

    Equal tokens belong together, and so do two special ones that have no equal on the other side.
    """
    partners = []
    at = 0
    for number, token in enumerate(theirs):
        if token in ours[at:]:
            at = ours.index(token, at) + 1
        elif at < len(ours) and ours[at][1] and token[1] and ours[at] not in theirs[number:]:
            at += 1
        partners.append(at - 1)
    return partners


def _overlap(source: TokenSpans, starts: torch.Tensor, index: torch.Tensor) -> OverlapWeights:
    first = torch.searchsorted(source.ends, starts, right=True)  # the first source token that ends within the target's or later
    counts = (index - first + 1).clamp_min(0)
    alone = (counts == 0) & (index >= 0)
    first, counts = torch.where(alone, index, first), torch.where(alone, 1, counts)
    tokens = torch.repeat_interleave(torch.arange(len(index)), counts)
    within = torch.arange(len(tokens)) - (counts.cumsum(0) - counts)[tokens]
    sources = first[tokens] + within
    spelled = source.ends[sources] - torch.maximum(source.starts[sources], starts[tokens])
    spelled = torch.where(alone[tokens], 1, spelled).double()
    total = torch.zeros(len(index), dtype=torch.double).index_add_(0, tokens, spelled)
    return OverlapWeights(torch.zeros_like(tokens), tokens, sources, (spelled / total[tokens]).float())


def _padded(row: TokenAlignment, number: int, source_padding: int, target_padding: int) -> TokenAlignment:
    """Put the alignment of one row behind padding on both sides."""

    def behind(values: torch.Tensor, padding: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, (target_padding, 0), value=padding)

    overlap = row.overlap
    return TokenAlignment(
        source_index=behind(torch.where(row.source_index < 0, -1, row.source_index + source_padding), -1),
        source_position_ids=behind(row.source_position_ids, 0),
        position_ids=behind(row.position_ids, 0),
        translated=behind(row.translated, False),
        overlap=OverlapWeights(
            torch.full_like(overlap.row, number),
            overlap.target_index + target_padding,
            overlap.source_index + source_padding,
            overlap.weight,
        ),
    )


def _moved(of: Any, device: torch.device | str) -> Any:
    return replace(of, **{field.name: getattr(of, field.name).to(device) for field in fields(of)})
