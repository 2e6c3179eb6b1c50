"""One text in two tokenizers: what the source reads of the text that some tokens of the target spell, and which of its tokens is whose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from .alignment import TokenAlignment, align_batch
from .errors import AlignmentError
from .token_spans import TokenSpans


@dataclass(frozen=True, eq=False)
class SourceTokens:
    """What a source reads of a batch of texts, padded on the left.

    ids, attention_mask: int64 `[B, S]`. alignment: of the target's tokens with them.
    """

    ids: torch.Tensor
    attention_mask: torch.Tensor
    alignment: TokenAlignment


class Retokenizer:
    """Tokenizes for a source what was tokenized for a target.

    Args:
        tokenizer, source_tokenizer: of the target and of the source.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source_tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.source_tokenizer = tokenizer, source_tokenizer

    def __call__(self, ids: torch.Tensor) -> SourceTokens:
        """Return what the source reads of the texts that target tokens `[B, T]` (without padding) spell, from its own BOS on.

        A text ends with its last whole character; target tokens that spell part of one are not aligned.

        Raises:
            AlignmentError: a tokenizer does not give back the text that it is given; it names the row and the first difference.
        """
        targets = [TokenSpans.of_ids(self.tokenizer, row, side="target") for row in ids.cpu()]
        sources = [TokenSpans.of_text(self.source_tokenizer, spans.complete_text, side="source") for spans in targets]
        width = max(len(spans) for spans in sources)
        padded, mask = torch.zeros((2, len(sources), width), dtype=torch.long)
        for row, spans in enumerate(sources):
            padded[row, width - len(spans) :], mask[row, width - len(spans) :] = spans.ids, 1
        return SourceTokens(padded, mask, align_batch(sources, targets))

    def align(self, source_ids: torch.Tensor, ids: torch.Tensor, source_attention_mask: torch.Tensor | None = None) -> TokenAlignment:
        """Align target tokens `[B, T]` with what the source has read already, `[B, S]`, padded on the left where a mask says so.

        Raises:
            AlignmentError: the two texts differ; it names the row and the first difference.
        """
        mask = torch.ones_like(source_ids) if source_attention_mask is None else source_attention_mask
        rows = [row[of_row.bool()].cpu() for row, of_row in zip(source_ids, mask, strict=True)]
        sources = [TokenSpans.of_ids(self.source_tokenizer, row, side="source") for row in rows]
        targets = [TokenSpans.of_ids(self.tokenizer, row, side="target") for row in ids.cpu()]
        return align_batch(sources, targets, source_length=source_ids.shape[1])

    def readable(self, windows: torch.Tensor) -> torch.Tensor:
        """Keep the windows `[n, T]` whose text both tokenizers give back."""
        kept = []
        for row in windows:
            try:
                kept.append(bool(self(row[None]).alignment.translated.any()))
            except AlignmentError:
                kept.append(False)
        return windows[torch.tensor(kept, dtype=torch.bool)]
