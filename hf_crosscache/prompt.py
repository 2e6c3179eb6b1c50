"""What is known of the prompt that a translated cache is part of, and what it says about the tokens that the target is given."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from .context import Context
from .errors import HandOffError
from .source import SourceStates


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt's token ids and mask, as far as they were given; nothing is known of a cache whose rows were moved.

    input_ids: `[B, L]`, the whole prompt or the context at least. attention_mask: `[B, L']` of it. batch: rows of the source's cache.
    handed_over: leading slots that came with the hand-off.
    """

    input_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    batch: int | None = None
    handed_over: int = 0

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        source: SourceStates,
        context: Context,
        target_model: PreTrainedModel | None,
    ) -> Prompt:
        """Check a prompt against the cache of its context.

        Raises:
            HandOffError: shapes do not fit, padding without a mask, or a context of more than text.
        """
        if input_ids is not None:
            if not isinstance(input_ids, torch.Tensor):
                raise HandOffError(f"input_ids: a tensor of token ids expected, a {type(input_ids).__name__} found.")
            # Of rows that are padded otherwise than the source's, the prompt may be the shorter one.
            least = source.length if context.source_rows is None else context.length
            if input_ids.ndim != 2 or input_ids.shape[0] != source.batch_size or input_ids.shape[1] < least:
                raise HandOffError(
                    f"input_ids of shape [{source.batch_size}, at least {least}] expected, since the source cache holds that context; "
                    f"{list(input_ids.shape)} found. Pass the ids of the whole prompt."
                )
            if target_model is not None:
                _refuse_media(input_ids[:, : context.length], target_model)
                if attention_mask is None:
                    _refuse_padding(input_ids, target_model)
        return cls(input_ids, attention_mask, source.batch_size, context.length)

    def within(self, length: int) -> Prompt:
        """Return what is still known of a cache that was cut to some length."""
        return replace(self, handed_over=min(self.handed_over, length))

    def unread(self, length: int, input_ids: torch.Tensor, new_tokens: int | None, attention_mask: torch.Tensor | None) -> int | None:
        """How many of the last tokens that `generate` was given the target has to read behind a cache of some length.

        Args:
            length: of the cache.
            input_ids: `[B', n]` as generate holds them: the whole prompt, or only what follows the cache.
            new_tokens: what generate would slice off, None for all.
            attention_mask: `[B', m]`, None where generate has none or dropped one of ones.

        Raises:
            HandOffError: nothing is left to read, or the prompt does not begin with the context.
        """
        given = input_ids.shape[1]
        if new_tokens is None:
            if length == 0 or given <= length:
                return None
            mask = attention_mask.shape[1] if attention_mask is not None and attention_mask.ndim == 2 else None
            if mask is not None and mask != given:
                return None  # of the whole prompt, so that these are the new tokens alone
            if mask is None:
                differs = self._difference(input_ids)
                if differs is None and self.input_ids is None:
                    raise HandOffError(
                        f"Whether these {given} tokens follow the {length} of the cache or contain them cannot be seen: pass input_ids= to "
                        "TranslatedCache."
                    )
                if differs is not None:
                    return None
            new_tokens = given - length
        elif new_tokens <= 0:
            raise HandOffError(
                f"The cache holds {length} positions and the prompt {given} tokens: none is left for the target to read. Pass generate the "
                "whole prompt (context included) with its attention mask, longer than the translated context: recompute_last=1 at least "
                "where the prompt ends with the context."
            )
        elif new_tokens != given - length or (new_tokens == 1 and length != self.handed_over):
            return new_tokens  # a step of decoding
        differs = self._difference(input_ids)
        if differs is not None:
            raise HandOffError(
                f"The prompt differs from the context that the cache was made of at row {differs[0]}, token {differs[1]}. Pass generate "
                "the whole prompt (context included, padded as the cache was) with its attention mask."
            )
        return new_tokens

    def check_step(
        self,
        length: int,
        context: Context | None,
        new_tokens: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        use_cache: bool | None,
    ) -> None:
        """Refuse a forward pass behind a cache of some length that would read it wrongly; `context` is what waits to be read first, if any.

        Raises:
            HandOffError: it says what to pass.
        """
        if length and use_cache is False:
            raise HandOffError("use_cache=False, although a filled cache was passed: leave it out, or the cache.")
        if attention_mask is not None and attention_mask.shape[1] != length + new_tokens:
            raise HandOffError(
                f"The cache holds {length} positions and the target was given {new_tokens} tokens, but an attention mask of "
                f"{attention_mask.shape[1]}: {length + new_tokens} expected, since it covers both. Pass generate the whole prompt (context "
                "included) with its mask, and no prefill_chunk_size on transformers before 5.23."
            )
        if context is None:
            return
        if attention_mask is None and position_ids is None and context.first_slots is not None:
            raise HandOffError("The context is padded: pass the target the attention mask of the whole prompt.")
        self.check_positions(context, new_tokens, input_ids, position_ids)

    def check_growth(self, start: int, context: Context, source: SourceStates, before: Context | None) -> None:
        """Refuse a source cache that holds nothing behind the `start` positions of a cache, or other rows than `before`.

        Raises:
            HandOffError: it says which.
        """
        if context.length <= start:
            raise HandOffError(
                f"The source cache holds {source.length} positions, of which recompute_last = {source.length - context.length} are left to "
                f"the target; the translated cache has {start} already. Let the source read on first."
            )
        if self.batch not in (None, source.batch_size):
            raise HandOffError(f"The cache was made of {self.batch} sequences, the source cache holds {source.batch_size}.")
        if before is None or start == 0:
            return
        if context.first_slots is None and before.first_slots is not None:
            raise HandOffError("The cache is of a padded batch: pass attention_mask= of the whole prompt.")
        rows = [[0] * source.batch_size if of.first_slots is None else of.first_slots.tolist() for of in (before, context)]
        if self.batch is not None and rows[0] != rows[1]:  # what became of the rows is not known once they were moved
            raise HandOffError(
                f"The rows of the cache begin in the slots {rows[0]}, those of attention_mask in {rows[1]}: pad them on the left as before."
            )

    def check_positions(self, context: Context, new_tokens: int, input_ids: torch.Tensor | None, position_ids: torch.Tensor | None) -> None:
        """Refuse a first step that does not continue where the context ends, which transformers runs without a word.

        Raises:
            HandOffError: the tokens would get wrong positions.
        """
        expected = context.length if context.tokens is None else context.tokens
        if isinstance(position_ids, torch.Tensor) and position_ids.ndim == 2:
            first = position_ids[:, 0]
            if isinstance(expected, torch.Tensor):
                expected = expected.to(first.device)
                if first.shape[0] != expected.shape[0]:
                    expected = expected.repeat_interleave(max(1, first.shape[0] // expected.shape[0]))
            misplaced = first.shape[0] > 1 and not isinstance(expected, int) and first.shape != expected.shape
            misplaced = misplaced or bool((first != expected).any())
        else:
            whole = self.input_ids
            misplaced = whole is not None and new_tokens == whole.shape[1] and context.length > 0
            if misplaced and input_ids is not None and whole is not None:
                misplaced = self._difference(input_ids) is None
        if misplaced:
            raise HandOffError(
                f"The target was given {new_tokens} tokens that do not start at position {_spoken(expected)}, where the translated context "
                "ends, so their positions would be wrong. Pass generate the whole prompt (context included) with its attention mask, "
                "longer than the translated context: recompute_last=1 at least where the prompt ends with the context."
            )

    def inputs(self, start: int, context: Context, device: torch.device) -> dict[str, torch.Tensor]:
        """What a model is given to read the context itself, from slot `start` on."""
        if self.input_ids is None:
            raise HandOffError("The target cannot read the context itself: its ids were not given.")
        inputs = {"input_ids": self.input_ids[:, start : context.length].to(device)}
        if context.position_ids is None:
            inputs["position_ids"] = torch.arange(start, context.length, device=device)[None].expand_as(inputs["input_ids"])
        else:
            inputs["position_ids"] = context.position_ids[:, start:].long().to(device)
            if self.attention_mask is not None:
                inputs["attention_mask"] = self.attention_mask[:, : context.length].to(device)
        return inputs

    def _difference(self, input_ids: torch.Tensor) -> tuple[int, int] | None:
        """Row and column of the first token in which a prompt differs from what was handed over; None where it does not."""
        if self.input_ids is None:
            return None
        columns = min(self.handed_over, input_ids.shape[1], self.input_ids.shape[1])
        known = self.input_ids[:, :columns].to(input_ids.device)
        mask = None if self.attention_mask is None else self.attention_mask[:, :columns].to(input_ids.device)
        if input_ids.shape[0] % known.shape[0]:
            return 0, 0
        repeats = input_ids.shape[0] // known.shape[0]
        differs = known.repeat_interleave(repeats, dim=0) != input_ids[:, :columns]
        if mask is not None:
            differs[:, : mask.shape[1]] &= mask.repeat_interleave(repeats, dim=0) != 0
        if not differs.any():
            return None
        row, column = differs.nonzero()[0].tolist()
        return row, column


def _spoken(expected: int | torch.Tensor) -> str:
    return str(expected if isinstance(expected, int) else expected.tolist())


def _refuse_media(context_ids: torch.Tensor, target_model: PreTrainedModel) -> None:
    for name in ("image_token_id", "video_token_id", "audio_token_id"):
        token = getattr(target_model.config, name, None)
        if token is not None and (found := (context_ids == token).nonzero()).numel():
            row, column = found[0].tolist()
            raise HandOffError(
                f"Row {row}, token {column} of the context is the target's {name} {token}: text alone can be handed over, since "
                "what stands behind such a token is not in the ids. Let the target read this context itself."
            )


def _refuse_padding(input_ids: torch.Tensor, target_model: PreTrainedModel) -> None:
    pad = target_model.config.get_text_config(decoder=True).pad_token_id
    starts_with_padding = (input_ids[:, 0] == pad) if pad is not None else torch.tensor([False])
    if starts_with_padding.any() and not starts_with_padding.all():
        raise HandOffError(
            f"Some prompts of the batch begin with the padding token {pad}: pass attention_mask= as well, which says where each row's "
            "tokens begin."
        )
