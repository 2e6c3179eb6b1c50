"""What became of a hand-off: how many positions came from where, and how long that took."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .stopwatch import Stopwatch
from .translation import PendingTranslation


@dataclass
class HandOffReport:
    """What a `TranslatedCache` was filled with; positions are of one row.

    native_tokens: first positions that the target read itself.
    native_layers: first layers that the target ran itself over the rest of the context, of the newest hand-off.
    left_to_target: last context positions that were left out for the target to read.
    fallen_back: spans (start, end) of slots that the target read itself because translation failed; fallback_reason names the layer.
    """

    native_tokens: int = 0
    native_layers: int = 0
    left_to_target: int = 0
    fallen_back: tuple[tuple[int, int], ...] = ()
    fallback_reason: str | None = None
    native_work: Stopwatch = field(default_factory=Stopwatch, repr=False)
    _hand_offs: list[PendingTranslation] = field(default_factory=list, repr=False)

    @property
    def translated_tokens(self) -> int:
        """Positions that are translated, or will be once asked for."""
        return max(
            0, sum(hand_off.length - hand_off.start for hand_off in self._hand_offs) - (self.native_tokens if self._hand_offs else 0)
        )

    @property
    def fallen_back_tokens(self) -> int:
        """Positions that the target read itself because translation failed."""
        return sum(end - start for start, end in self.fallen_back)

    @property
    def translated_layers(self) -> int:
        """Layers translated so far, of all hand-offs together."""
        return sum(hand_off.translated_layers for hand_off in self._hand_offs)

    @property
    def translation_seconds(self) -> float:
        """Of the layers translated so far; waits for the device."""
        return sum(hand_off.work.seconds for hand_off in self._hand_offs)

    @property
    def native_seconds(self) -> float:
        """Of the target's own passes: first positions, first layers and fallbacks."""
        return self.native_work.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        return {
            name: getattr(self, name)
            for name in (
                "native_tokens", "native_layers", "translated_tokens", "left_to_target", "fallen_back_tokens", "fallback_reason",
                "translated_layers", "native_seconds", "translation_seconds",
            )
        }  # fmt: skip

    def follow(self, hand_off: PendingTranslation) -> None:
        """Count a hand-off in."""
        self._hand_offs.append(hand_off)

    def fall_back(self, hand_off: PendingTranslation, reason: str) -> None:
        """Count a hand-off as the target's own work."""
        self._hand_offs.remove(hand_off)
        self.fallen_back += ((hand_off.start, hand_off.length),)
        self.fallback_reason = reason
        if hand_off.start == 0:
            self.native_tokens = 0

    def fork(self, current: PendingTranslation | None, hand_off: PendingTranslation | None) -> HandOffReport:
        """Return the report of a copy that goes on with a hand-off of its own in the place of the current one."""
        followed = [hand_off if known is current and hand_off is not None else known for known in self._hand_offs]
        return replace(self, native_work=self.native_work.fork(), _hand_offs=followed)
