"""When the tokens of a stream came, and what follows from that for a window of time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Streamed:
    """One stream: when it was asked for, and after each event that brought tokens, when that was and how many had come."""

    started: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.started

    def take(self, event: dict[str, Any], now: float) -> None:
        """Count an event's tokens: by the usage it carries, otherwise as one, unless it only tells the end."""
        before = self.arrivals[-1][1] if self.arrivals else 0
        choice = event["choices"][0]
        usage = event.get("usage")
        brings = choice.get("text") or not choice.get("finish_reason")
        count = usage["completion_tokens"] if usage else before + bool(brings)
        if count > before:
            self.arrivals.append((now, count))

    def correct(self, num_tokens: int) -> None:
        """Spread the server's own count at the end evenly, where events were counted for want of a better one."""
        if self.arrivals and self.arrivals[-1][1] != num_tokens:
            counted = self.arrivals[-1][1]
            self.arrivals = [(when, round(count * num_tokens / counted)) for when, count in self.arrivals]

    def tokens_in(self, start: float, end: float) -> int:
        """Tokens that came after ``start`` and not after ``end``."""
        counts = [0, *(count for _, count in self.arrivals)]
        return sum(
            after - before for (when, _), (before, after) in zip(self.arrivals, itertools.pairwise(counts)) if start < when <= end
        )

    def gaps_in(self, start: float, end: float) -> list[float]:
        """Seconds between events, as far as they lie within."""
        times = [when for when, _ in self.arrivals]
        return [
            min(after, end) - max(before, start) for before, after in itertools.pairwise(times) if after > start and before < end
        ]


def common_window(runs: Iterable[Streamed]) -> tuple[float, float]:
    """From the first token of the last to begin until the first one ends. Raises RuntimeError when they never all ran."""
    runs = list(runs)
    start, end = max(run.arrivals[0][0] for run in runs), min(run.arrivals[-1][0] for run in runs)
    if end <= start:
        raise RuntimeError("the first stream had ended before the last one began: ask for more tokens")
    return start, end
