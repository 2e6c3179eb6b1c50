"""Whatever is done to a translated cache, in whatever order, it holds what a native prefill of the same tokens would."""

from __future__ import annotations

import copy

import pytest
import torch
from builders import identity_translator, random_ids, tiny_model
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hf_crosscache import TranslatedCache
from hf_crosscache.compat import cache_argument, prefill, states_of
from hf_crosscache.errors import HandOffError

_MODELS = {family: tiny_model(family, vocab_size=64) for family in ("llama", "gemma3")}
_TRANSLATORS = {family: identity_translator(model) for family, model in _MODELS.items()}
_WINDOW = 8
_LONGEST = 40


class _World:
    """A cache, and what it should hold: the token ids of each row, `[B, T]`."""

    def __init__(self, family: str, batch: int, context: int, keep_window: bool) -> None:
        self.model, self.translator = _MODELS[family], _TRANSLATORS[family]
        self.slides = family == "gemma3" and keep_window
        self.keep_window, self.seed = keep_window, 0
        self.ids = self.new(batch, context)[:, :-1]
        self.cache = self.handed_over(self.ids)

    def new(self, batch: int, tokens: int) -> torch.Tensor:
        self.seed += 1
        return random_ids(batch, tokens + 1, seed=self.seed) % 63 + 1

    def handed_over(self, ids: torch.Tensor) -> TranslatedCache:
        source, _ = prefill(self.model, ids)
        return TranslatedCache(
            source, self.translator, target_model=self.model, input_ids=ids, recompute_last=0, sink_tokens=2, keep_window=self.keep_window
        )

    def read(self, tokens: int) -> None:
        new = self.new(len(self.ids), tokens)[:, :tokens]
        self.ids = torch.cat([self.ids, new], 1)
        with torch.no_grad():
            self.model(new, attention_mask=torch.ones_like(self.ids), **cache_argument(self.cache))

    def extend(self, tokens: int) -> None:
        self.ids = torch.cat([self.ids, self.new(len(self.ids), tokens)[:, :tokens]], 1)
        source, _ = prefill(self.model, self.ids)
        self.cache.extend(source, input_ids=self.ids, recompute_last=0)

    def crop(self, tokens: int) -> None:
        tokens = min(tokens, self.ids.shape[1] - 2)
        if tokens <= 0:
            return
        if self.slides and self.ids.shape[1] >= _WINDOW and not (self.cache.is_pending and self.cache._hand_off.untouched):
            with pytest.raises(RuntimeError, match="does not track past states"):
                self.cache.crop(-tokens)
            self.cache = self.handed_over(self.ids)  # a part of the layers may be cropped, as in transformers
        elif self.slides and tokens > self.cache._hand_off.length - self.cache._hand_off.start:
            return
        else:
            self.cache.crop(-tokens)
            self.ids = self.ids[:, :-tokens]

    def reorder(self, shift: int) -> None:
        order = torch.arange(len(self.ids)).roll(shift)
        self.cache.reorder_cache(order)
        self.ids = self.ids[order]

    def repeat(self, times: int) -> None:
        if len(self.ids) * times <= 4:
            self.cache.batch_repeat_interleave(times)
            self.ids = self.ids.repeat_interleave(times, 0)

    def select(self, row: int) -> None:
        rows = torch.tensor([row % len(self.ids)])
        self.cache.batch_select_indices(rows)
        self.ids = self.ids[rows]

    def switch(self, left: int) -> None:
        """Hand the cache over as a source."""
        if self.slides:
            return
        left = min(left, self.ids.shape[1] - 3)
        if left >= 0:
            self.cache = TranslatedCache(
                self.cache, self.translator, target_model=self.model, input_ids=self.ids, recompute_last=left, keep_window=self.keep_window
            )
            self.ids = self.ids[:, : self.ids.shape[1] - left]

    def fork(self, copies: int) -> None:
        twin = self.cache.fork() if copies % 2 else copy.deepcopy(self.cache)
        ids, cache = self.ids, self.cache
        self.cache = twin
        self.read(2)
        self.ids, self.cache = ids, cache

    def translate(self, _: int) -> None:
        self.cache.translate()

    def reset(self, tokens: int) -> None:
        self.cache.reset()
        self.ids = self.ids[:, :0]
        self.read(tokens + 2)

    def check(self) -> None:
        assert self.cache.get_seq_length() == self.ids.shape[1]
        native, _ = prefill(self.model, self.ids)
        for layer, (mine, theirs) in enumerate(zip(self.cache.layers, states_of(native), strict=True)):
            for one, other in zip((mine.keys, mine.values), theirs, strict=True):
                kept = min(_WINDOW - 1, other.shape[2]) if mine.is_sliding else other.shape[2]
                torch.testing.assert_close(one, other[:, :, other.shape[2] - kept :], rtol=1e-3, atol=1e-3, msg=f"layer {layer}")


_OPERATIONS = ("read", "extend", "crop", "reorder", "repeat", "select", "switch", "fork", "translate", "reset")


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    family=st.sampled_from(("llama", "gemma3", "gemma3")),
    batch=st.integers(1, 2),
    context=st.integers(3, 14),
    keep_window=st.booleans(),
    operations=st.lists(st.tuples(st.sampled_from(_OPERATIONS), st.integers(1, 6)), min_size=1, max_size=6),
)
@example("gemma3", 1, 12, True, [("crop", 6), ("extend", 5), ("read", 2)])
@example("gemma3", 2, 5, True, [("read", 1), ("extend", 1), ("crop", 3)])
@example("llama", 1, 9, True, [("switch", 2), ("extend", 3), ("fork", 1), ("fork", 2), ("read", 1)])
def test_any_sequence_of_operations(family, batch, context, keep_window, operations):
    world = _World(family, batch, context, keep_window)
    for name, number in operations:
        if world.ids.shape[1] < _LONGEST:
            getattr(world, name)(number)
            assert world.cache.get_seq_length() == world.ids.shape[1]
    world.check()


def test_a_world_notices_another_text():
    world = _World("llama", 1, 9, True)
    world.ids = world.new(1, 9)[:, :-1]
    with pytest.raises(AssertionError):
        world.check()
    with pytest.raises(HandOffError):
        world.extend(0)
