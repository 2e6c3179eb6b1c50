"""Where the tokens of a context stand: in the source's cache, in the target's, and at which position in each row of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from .alignment import TokenAlignment
from .errors import HandOffError

_BY_SLOT = ("position_ids", "source_rows", "source_position_ids")


@dataclass(frozen=True, eq=False)
class Context:
    """The slots of a target's cache that a hand-off fills.

    length: slots, the same for every row of the batch; those of left padding count.
    position_ids: int32 `[B, length]` the position of each slot's token, 0 for padding; None where slot and position are one.
    source_rows: int64 `[B, length]` the slot of the source's cache that holds each token; None where it is the same slot.
    source_position_ids: int32 `[B, length]` the position that the source has each token at; None where both models have it at one.
    first_slots: int64 `[B]` slot of each row's first token; None where it is 0.
    """

    length: int
    position_ids: torch.Tensor | None = None
    source_rows: torch.Tensor | None = None
    first_slots: torch.Tensor | None = None
    source_position_ids: torch.Tensor | None = None
    _on: dict[torch.device, Context] = field(init=False, repr=False, default_factory=dict)

    @classmethod
    def of(
        cls,
        batch: int,
        source_length: int,
        recompute_last: int,
        attention_mask: torch.Tensor | None,
        source_attention_mask: torch.Tensor | None,
    ) -> Context:
        """Find where the context's tokens stand.

        Args:
            batch, source_length: of the source's cache.
            recompute_last: trailing context slots that are left to the target.
            attention_mask: `[B, L]` of the prompt that the target will read, or of the context at least; 1 for tokens, 0 for padding.
            source_attention_mask: `[B, source_length]` as the source read the context; None where that is how the prompt begins.

        Raises:
            HandOffError: a mask does not fit, or a row has less context in the prompt than in the source.
        """
        prompt = _checked(attention_mask, batch, source_length, "attention_mask", at_least=source_attention_mask is None)
        read = _checked(source_attention_mask, batch, source_length, "source_attention_mask", at_least=False)
        if prompt is None and read is not None and not read.all():
            raise HandOffError("The source read a padded batch: pass attention_mask= of the target's prompt as well.")
        if prompt is None:
            return cls(_left(source_length, recompute_last))
        if read is None:
            read = prompt[:, :source_length]
        counts = read.sum(1)
        if (counts == 0).any() or (prompt.sum(1) < counts).any():
            raise HandOffError(
                f"Every row of the batch needs a context, and a prompt that holds it: the source read {counts.tolist()} tokens a row, "
                f"the prompt has {prompt.sum(1).tolist()}."
            )
        if prompt.all() and read.all():
            return cls(_left(source_length, recompute_last))
        rank = prompt.cumsum(1) - 1  # of each slot's token among the row's tokens
        covered = ((rank < counts[:, None]) | (prompt == 0)).long().cumprod(1).sum(1)  # slots up to the row's last context token
        length = _left(int(covered.min()), recompute_last)
        rank, real = rank[:, :length].clamp_min(0), prompt[:, :length] == 1
        slots = torch.argsort(1 - read, dim=1, stable=True)  # the source's slots, tokens first
        rows = slots.gather(1, rank)
        same = (rows == torch.arange(length))[real].all()
        first = (rank == 0).logical_and(real).int().argmax(1)
        if not real.any(1).all():
            raise HandOffError(
                f"After recompute_last = {recompute_last} some row has no context left to hand over: leave less to the target."
            )
        return cls(length, rank.int(), None if same and length <= source_length else rows, first)

    @classmethod
    def aligned(cls, alignment: TokenAlignment, batch: int, source_length: int, sink_tokens: int, recompute_last: int) -> Context:
        """The context of a target whose tokens are others than the source's: up to the last that every row has a source token for.

        Raises:
            HandOffError: the alignment is of another cache, or padded.
        """
        rows, position_ids = alignment.source_index.cpu(), alignment.position_ids.cpu()
        if rows.shape[0] != batch or int(rows.max()) >= source_length:
            raise HandOffError(
                f"The alignment is of {rows.shape[0]} rows and source slots up to {int(rows.max())}; the source cache holds {batch} rows "
                f"of {source_length}. Align the tokens that the source has read with those of the target's prompt."
            )
        if not torch.equal(position_ids, torch.arange(rows.shape[1]).expand_as(position_ids)):
            raise HandOffError("The alignment is of padded target tokens, or begins behind the first: whole rows of one length expected.")
        length = _left(alignment.length, recompute_last)
        without = (~alignment.translated.cpu()[:, sink_tokens:length]).nonzero()
        if len(without):
            row, token = without[-1].tolist()
            raise HandOffError(
                f"Row {row}: the source has read nothing whole before the target's token {sink_tokens + token}. Leave the first tokens to "
                f"the target: sink_tokens={sink_tokens + token + 1}."
            )
        source_position_ids = alignment.source_position_ids.cpu()[:, :length].int()
        return cls(length, None, rows[:, :length].clamp_min(0), None, source_position_ids)

    def shortened(self, tokens: int) -> Context:
        """Return the context without its last slots."""
        length = max(0, self.length - tokens)
        cut = {name: None if (ids := getattr(self, name)) is None else ids[:, :length] for name in _BY_SLOT}
        return replace(self, length=length, **cut)

    def on(self, device: torch.device) -> Context:
        """Return the context with its tensors on a device; kept, since every group of layers asks."""
        if self.first_slots is None and self.source_rows is None:
            return self
        if device not in self._on:
            moved = {name: getattr(self, name) for name in (*_BY_SLOT, "first_slots")}
            self._on[device] = replace(self, **{name: None if ids is None else ids.to(device) for name, ids in moved.items()})
        return self._on[device]

    @property
    def tokens(self) -> torch.Tensor | None:
        """`[B]` tokens of each row, padding left out; None where every slot holds one."""
        if self.position_ids is None or self.first_slots is None:
            return None
        if self.length == 0:
            return torch.zeros_like(self.first_slots)
        return torch.where(self.first_slots < self.length, self.position_ids[:, -1] + 1, 0)


def _checked(mask: torch.Tensor | None, batch: int, length: int, name: str, *, at_least: bool) -> torch.Tensor | None:
    if mask is None:
        return None
    fits = mask.ndim == 2 and mask.shape[0] == batch and (name == "attention_mask" or mask.shape[1] == length)
    if not fits or (at_least and mask.shape[1] < length):
        raise HandOffError(
            f"{name} of shape [{batch}, {'at least ' if name == 'attention_mask' else ''}{length}] expected, since the source cache holds "
            f"that context; {list(mask.shape)} found."
        )
    return (mask != 0).long().cpu()


def _left(length: int, recompute_last: int) -> int:
    if not 0 <= recompute_last < length:
        raise HandOffError(f"recompute_last = {recompute_last} of a context of {length} tokens: 0 to {length - 1} expected.")
    return length - recompute_last
