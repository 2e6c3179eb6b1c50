"""Several models, one conversation: each keeps a cache of its own, and is handed what another one has read since."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .cache import OnError, TranslatedCache
from .compat import cache_argument, decoder_of, states_of
from .errors import HandOffError
from .placement import device_of
from .translator import CacheTranslator


@dataclass(frozen=True)
class Turn:
    """What one call of `generate` cost, in positions of the conversation.

    held: positions that the model's cache held before. translated: handed over from other models. prefilled: read by the model itself, as
    first positions, because nobody could hand them over, or because what was handed over must not be used. read: the newest turn and what
    follows it, read by the model within generate. generated: new tokens. switch_seconds: of translation and of reading what could not be
    translated; seconds: of the turn.
    """

    model: str
    held: int
    translated: int
    prefilled: int
    read: int
    generated: int
    switch_seconds: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        return asdict(self)


@dataclass
class _Side:
    """One model's share of the conversation: its cache, and the spans of positions that it has read itself."""

    model: PreTrainedModel
    cache: TranslatedCache
    native: list[tuple[int, int]] = field(default_factory=list)

    def note(self, start: int, end: int) -> None:
        """Note that the model has read the positions from `start` to before `end`."""
        if start < end:
            self.native.append((start, end))

    def native_until(self, position: int) -> int:
        """The end of the native span that a position lies in; the position itself where it lies in none."""
        end = position
        for first, last in sorted(self.native):
            if first <= end < last:
                end = last
        return end


class HandoffSession:
    """One conversation over several models that share a tokenizer.

        session = HandoffSession({"small": small, "large": large}, {("small", "large"): up, ("large", "small"): down})
        session.add(tokenizer(question, return_tensors="pt").input_ids)
        session.generate("small", max_new_tokens=200)
        session.add(tokenizer(harder, return_tensors="pt").input_ids)
        session.generate("large", max_new_tokens=200)      # is handed what "small" has read and written

    The history is token ids. Each model keeps one cache; when it is its turn, it is handed only those positions that it has not got yet,
    from a model that has read them itself: nothing is translated back from a translation, and what a model has read itself is never
    replaced, nor read again. What nobody can hand over, it reads.

    Args:
        models: name -> model.
        translators: (source name, target name) -> translator. A pair that is missing is a switch with a prefill.
        tokenizers: name -> tokenizer with a chat template, for `chat` alone.
        recompute_last: what the model of a turn reads itself at the end of the history: "turn", all that was added since the last
            generation, or a number of tokens, 0 for as few as possible (one at least, and what no model has read yet).
        on_error: as for `TranslatedCache`.

    Raises:
        HandOffError: a translator's models are not among the models.
        GeometryError, IdentityError: a translator was fitted on other models.
    """

    def __init__(
        self,
        models: Mapping[str, PreTrainedModel],
        translators: Mapping[tuple[str, str], CacheTranslator],
        *,
        tokenizers: Mapping[str, PreTrainedTokenizerBase] | None = None,
        recompute_last: Literal["turn"] | int = "turn",
        on_error: OnError = "raise",
    ) -> None:
        if recompute_last != "turn" and (not isinstance(recompute_last, int) or recompute_last < 0):
            raise HandOffError(f'recompute_last: "turn" or a number of tokens expected, {recompute_last!r} found.')
        for (source, target), translator in translators.items():
            for name in (source, target):
                if name not in models:
                    raise HandOffError(f"The translator {source!r} -> {target!r} needs a model {name!r}; there are {sorted(models)}.")
            translator.check(source_model=models[source], target_model=models[target])
        self._sides = {
            name: _Side(model, TranslatedCache.empty(model, on_error=on_error, keep_window=False)) for name, model in models.items()
        }
        self._translators, self._tokenizers = dict(translators), dict(tokenizers or {})
        self._recompute_last: Literal["turn"] | int = recompute_last
        self._input_ids: torch.Tensor = torch.empty((1, 0), dtype=torch.long)
        self._turn_start = 0
        self.turns: list[Turn] = []

    @property
    def input_ids(self) -> torch.Tensor:
        """`[1, T]` the whole conversation so far, on the CPU."""
        return self._input_ids

    def native_spans(self, name: str) -> list[tuple[int, int]]:
        """The spans of positions that a model has read itself, in order; the rest of its cache was translated."""
        return sorted(self._side(name).native)

    def add(self, input_ids: torch.Tensor) -> HandoffSession:
        """Append tokens to the conversation: what the user says, with what the models expect around it.

        Args:
            input_ids: `[1, n]` or `[n]`.
        """
        ids = input_ids[None] if input_ids.ndim == 1 else input_ids
        if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1]:
            raise HandOffError(f"Ids of one conversation, [1, n], expected; {list(input_ids.shape)} found. Open a session for each row.")
        self._input_ids = torch.cat([self._input_ids, ids.cpu().long()], dim=1)
        return self

    def generate(self, name: str, **settings: Any) -> torch.Tensor:
        """Let a model answer; what it lacks is handed over first.

        Args:
            name: of the model.
            settings: of `generate`, but for inputs, cache and mask. One sequence is kept, so beams are not supported.

        Returns:
            `[1, n]` the new tokens. They belong to the conversation from now on.

        Raises:
            HandOffError: nothing to read, or settings that ask for several sequences. The conversation is as it was.
        """
        side, total = self._side(name), self._input_ids.shape[1]
        if total == 0:
            raise HandOffError("The conversation is empty: add(input_ids) first.")
        if max(settings.get("num_beams") or 1, settings.get("num_return_sequences") or 1) > 1:
            raise HandOffError("A session goes on with one sequence: num_beams and num_return_sequences of more are not supported.")
        started, held = time.perf_counter(), side.cache.get_seq_length()
        attempt = _Side(side.model, side.cache.fork(), list(side.native))  # so that a failure leaves the conversation as it was
        report = attempt.cache.report()
        known = len(report.fallen_back)
        translated, prefilled = self._bring_up(name, attempt)
        switched = time.perf_counter()
        before = report.translation_seconds + report.native_seconds
        reached = attempt.cache.get_seq_length()
        inputs = {"input_ids": self._input_ids.to(device_of(side.model))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        settings = {**settings, "return_dict_in_generate": False}
        output = side.model.generate(**inputs, **settings, **cache_argument(attempt.cache))  # type: ignore[operator]
        attempt.note(reached, attempt.cache.get_seq_length())
        for start, end in report.fallen_back[known:]:
            attempt.note(start, end)
            translated, prefilled = translated - (end - start), prefilled + (end - start)
        self._sides[name] = attempt
        self._input_ids = output.cpu()
        self._turn_start = self._input_ids.shape[1]
        lazily = report.translation_seconds + report.native_seconds - before
        seconds = time.perf_counter() - started
        generated = self._turn_start - total
        self.turns.append(Turn(name, held, translated, prefilled, total - reached, generated, switched - started + lazily, seconds))
        return self._input_ids[:, total:]

    def chat(self, name: str, messages: list[dict[str, Any]], **settings: Any) -> str:
        """Let a model answer the last of some messages, rendered by its tokenizer's chat template.

        Args:
            messages: the whole conversation, as `apply_chat_template` takes it; answers as `chat` returned them.
            settings: of `generate`.

        Raises:
            HandOffError: the template renders what was said before otherwise than it stands in the history; it says where.
        """
        if name not in self._tokenizers:
            raise HandOffError(f"chat needs a tokenizer with a chat template for {name!r}: pass tokenizers= to HandoffSession.")
        tokenizer = self._tokenizers[name]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
        ids, known = rendered["input_ids"].cpu(), self._input_ids.shape[1]  # type: ignore[index]
        shared = min(ids.shape[1], known)
        same = int((ids[0, :shared] == self._input_ids[0, :shared]).long().cumprod(0).sum())
        if same < known or ids.shape[1] == known:
            theirs, ours = (str(tokenizer.decode(side[0, max(0, same - 4) : same + 8])) for side in (ids, self._input_ids))
            raise HandOffError(
                f"{name!r} renders the conversation differently from token {same} of {known} on: {theirs!r}, where the history has "
                f"{ours!r}. Add what was said as token ids (add), or go back to where they agree: rewind({same})."
            )
        self.add(ids[:, known:])
        try:
            answer = self.generate(name, **settings)
        except Exception:
            self._input_ids = self._input_ids[:, :known]
            raise
        return str(tokenizer.decode(answer[0], skip_special_tokens=True))

    def fork(self) -> HandoffSession:
        """Return a session that goes on from here by itself; models are shared, and so is every tensor of the caches."""
        twin = object.__new__(HandoffSession)
        twin.__dict__.update(self.__dict__)
        twin._sides = {name: _Side(side.model, side.cache.fork(), list(side.native)) for name, side in self._sides.items()}
        twin.turns = list(self.turns)
        return twin

    def rewind(self, length: int) -> HandoffSession:
        """Forget all of the conversation from a position on, in every model's cache.

        Args:
            length: tokens that stay.
        """
        if not 0 <= length <= self._input_ids.shape[1]:
            raise HandOffError(f"The conversation has {self._input_ids.shape[1]} tokens; {length} cannot stay.")
        self._input_ids, self._turn_start = self._input_ids[:, :length], min(self._turn_start, length)
        for side in self._sides.values():
            too_many = side.cache.get_seq_length() - length
            if too_many > 0:
                side.cache.crop(-too_many)
            side.native = [(first, min(last, length)) for first, last in side.native if first < length]
        return self

    def _side(self, name: str) -> _Side:
        if name not in self._sides:
            raise HandOffError(f"No model {name!r} in this session; there are {sorted(self._sides)}.")
        return self._sides[name]

    @torch.no_grad()
    def _bring_up(self, name: str, side: _Side) -> tuple[int, int]:
        """Hand over, or let the model read, what its cache lacks before the part that is left to it; count both."""
        total = self._input_ids.shape[1]
        left = total - self._turn_start if self._recompute_last == "turn" else self._recompute_last
        upto = total - max(1, min(left, total))
        translated = prefilled = 0
        for start, end, owner in self._plan(name, side.cache.get_seq_length(), upto):
            if owner is None:
                self._read(side, start, end)
                prefilled += end - start
                continue
            translator = self._translators[owner, name]
            first = min(end, translator.sink_tokens)
            if start < first:  # the attention sinks are never translated
                self._read(side, start, first)
                prefilled += first - start
                start = first
            if start < end:
                states = [(keys[:, :, :end], values[:, :, :end]) for keys, values in states_of(self._sides[owner].cache)]
                side.cache.extend(states, translator=translator, input_ids=self._input_ids, recompute_last=0)
                translated += end - start
        return translated, prefilled

    def _plan(self, name: str, start: int, upto: int) -> list[tuple[int, int, str | None]]:
        """Say who hands over which positions; None for those that the model has to read itself, but for the last such."""
        plan: list[tuple[int, int, str | None]] = []
        for position, end, owner in self._owners(name, start, upto):
            if owner is None and plan and plan[-1][2] is None:
                plan[-1] = (plan[-1][0], end, None)
            else:
                plan.append((position, end, owner))
        if plan and plan[-1][2] is None:
            plan.pop()  # generate reads it with the newest turn
        return plan

    def _owners(self, name: str, start: int, upto: int) -> Iterator[tuple[int, int, str | None]]:
        sources = [source for source, target in self._translators if target == name]
        while start < upto:
            ends = {source: min(upto, self._sides[source].native_until(start)) for source in sources}
            owner = max(ends, key=lambda source: ends[source], default=None)
            if owner is None or ends[owner] == start:
                yield start, start + 1, None
                start += 1
            else:
                yield start, ends[owner], owner
                start = ends[owner]

    def _read(self, side: _Side, start: int, end: int) -> None:
        """Let a model read some positions behind its cache, without an answer."""
        device = device_of(side.model)
        decoder_of(side.model)(
            input_ids=self._input_ids[:, start:end].to(device),
            attention_mask=torch.ones((1, end), dtype=torch.long, device=device),
            position_ids=torch.arange(start, end, device=device)[None],
            use_cache=True,
            **cache_argument(side.cache),
        )
        side.note(start, end)
