"""Which slots of the target's cache a hand-off fills, for one tokenizer or two."""

from __future__ import annotations

import torch

from .alignment import TokenAlignment
from .context import Context
from .errors import HandOffError
from .source import SourceStates
from .translator import CacheTranslator


def context_of(
    translator: CacheTranslator,
    source: SourceStates,
    recompute_last: int,
    attention_mask: torch.Tensor | None,
    source_attention_mask: torch.Tensor | None,
    alignment: TokenAlignment | None = None,
    sink_tokens: int | None = None,
) -> Context:
    """Find where the tokens of a source's cache stand in the target's; see `TranslatedCache` for the arguments.

    Raises:
        HandOffError: as `Context.of` and `Context.aligned`, or the two tokenizers of a translator come without an alignment.
    """
    if alignment is None:
        if translator.two_tokenizers:
            raise HandOffError(
                f"{translator.source.name!r} and {translator.target.name!r} have different tokenizers: pass alignment=, which "
                "Retokenizer(tokenizer, source_tokenizer) makes of the target's prompt. Sessions and extend() do not take one yet."
            )
        return Context.of(source.batch_size, source.length, recompute_last, attention_mask, source_attention_mask)
    if attention_mask is not None and not attention_mask.all():
        raise HandOffError("A padded prompt with an alignment is not supported yet: hand over rows of one length, or one by one.")
    sinks = translator.sink_tokens if sink_tokens is None else sink_tokens
    return Context.aligned(alignment, source.batch_size, source.length, sinks, recompute_last)
