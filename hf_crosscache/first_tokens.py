"""The first tokens of a context, which hold the attention sinks and are never translated: the target's own states of them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .compat import prefill, states_of
from .context import Context
from .errors import HandOffError
from .native_states import NativeStates
from .placement import device_of
from .prompt import Prompt
from .translator import CacheTranslator


def of(
    translator: CacheTranslator,
    target_model: PreTrainedModel | None,
    prompt: Prompt,
    sink_tokens: int | None,
    context: Context,
) -> NativeStates | None:
    """Return the target's own states of each row's first tokens, or None where there are none.

    Raises:
        HandOffError: they can be had neither from the target nor from the translator's opening.
    """
    wanted = min(translator.sink_tokens if sink_tokens is None else sink_tokens, context.length)
    if wanted <= 0:
        return None
    input_ids = _first_of_each_row(prompt, context, wanted)
    if target_model is not None and input_ids is not None:
        cache, _ = prefill(target_model, input_ids.to(device_of(target_model)))
        return NativeStates(*map(tuple, zip(*states_of(cache), strict=True)))
    opening = translator.opening
    mend = "Pass target_model= and input_ids=, so that the target reads them itself."
    if opening is None:
        raise HandOffError(f"The first {wanted} positions are never translated, and the translator carries no states for them. {mend}")
    if wanted > len(opening.token_ids):
        raise HandOffError(
            f"The first {wanted} positions are never translated; the translator carries states for {len(opening.token_ids)}. {mend}"
        )
    if input_ids is None:
        raise HandOffError(f"Whether the context begins as the translator's calibration did cannot be seen without input_ids. {mend}")
    if any(tuple(row) != opening.token_ids[:wanted] for row in input_ids.tolist()):
        raise HandOffError(
            f"The context does not begin with the tokens {list(opening.token_ids[:wanted])} that the translator has states for. {mend}"
        )
    return opening.states(wanted)


def behind(
    translator: CacheTranslator, target_model: PreTrainedModel | None, prompt: Prompt, context: Context, start: int
) -> NativeStates | None:
    """As `of`, for a cache that holds `start` slots already; None where these hold the first tokens of every row."""
    held = start if context.first_slots is None else start - int(context.first_slots.max())
    return None if held >= translator.sink_tokens else of(translator, target_model, prompt, None, context)


def _first_of_each_row(prompt: Prompt, context: Context, wanted: int) -> torch.Tensor | None:
    """Token ids `[B, wanted]`; of a row whose context is shorter, what follows fills up, and attention to what precedes ignores it."""
    ids = prompt.input_ids
    if ids is None or context.first_slots is None:
        return None if ids is None else ids[:, :wanted]
    slots = context.first_slots[:, None] + torch.arange(wanted)
    return ids.gather(1, slots.clamp_max(ids.shape[1] - 1).to(ids.device))
