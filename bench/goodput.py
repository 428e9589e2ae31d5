"""How well requests were served: their latencies, and how many were within both limits (goodput, as in DistServe, OSDI 2024).

Limits are on TTFT and on TPOT, the mean gap between the tokens after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clients import percentile


@dataclass(frozen=True, slots=True)
class Limits:
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Times are from the moment it was sent, ``lag_s`` after it was due."""

    num_prompt: int
    lag_s: float
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    num_output: int = 0
    num_cached: int | None = None  # prompt tokens from a prefix cache; None: the server does not tell
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        return (self.e2e_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else None

    def is_within(self, limits: Limits) -> bool:
        """An answer of one token has no TPOT to miss; what failed is never within."""
        return self.error is None and self.ttft_s <= limits.ttft_s and (self.tpot_s or 0.0) <= limits.tpot_s


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds of the requests that succeeded, by the name of the latency."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    return {
        "ttft_s": [outcome.ttft_s for outcome in done],
        "tpot_s": [outcome.tpot_s for outcome in done if outcome.tpot_s is not None],
        "e2e_s": [outcome.e2e_s for outcome in done],
    }


def summarise(outcomes: Sequence[Outcome], limits: Limits, duration_s: float) -> dict[str, Any]:
    """Goodput, percentiles and counts of the requests that were due within ``duration_s``; there is at least one."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    num_good = sum(outcome.is_within(limits) for outcome in outcomes)
    told = [outcome for outcome in done if outcome.num_cached is not None]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    return {
        "requests": len(outcomes),
        "offered_per_s": round(len(outcomes) / duration_s, 3),
        "goodput": round(num_good / len(outcomes), 4),
        "goodput_per_s": round(num_good / duration_s, 3),
        "within_ttft": round(sum(outcome.ttft_s <= limits.ttft_s for outcome in done) / len(outcomes), 4),
        "within_tpot": round(sum((outcome.tpot_s or 0.0) <= limits.tpot_s for outcome in done) / len(outcomes), 4),
        **{name: _percentiles(values) for name, values in latencies(outcomes).items() if values},
        "lag_s": _percentiles([outcome.lag_s for outcome in outcomes]),
        "prompt_tokens": sum(outcome.num_prompt for outcome in done),
        "cached_prompt_tokens": sum(outcome.num_cached or 0 for outcome in told) if told else None,
        "output_tokens": sum(outcome.num_output for outcome in done),
        "errors": len(errors),
        "first_errors": errors[:3],
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    return {**{f"p{q}": round(percentile(values, q / 100), 4) for q in (50, 90, 99)}, "max": round(max(values), 4)}
