"""Seconds that some blocks of work took, on whatever device they ran."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Seconds spent in some blocks of work; on CUDA those of the device, read when asked for."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        if device.type == "cuda":
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record(torch.cuda.current_stream(device))
            yield
            events[1].record(torch.cuda.current_stream(device))
            self._events.append(events)
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    def fork(self) -> Stopwatch:
        """Return one that goes on from here by itself."""
        twin = Stopwatch(self._seconds)
        twin._events = list(self._events)
        return twin

    @property
    def seconds(self) -> float:
        """Seconds so far; waits for the device."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._events.clear()
        return self._seconds
