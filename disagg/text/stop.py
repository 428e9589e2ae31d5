"""Stop strings in a stream of text.

The match is the one that a reader going character by character sees first: the stop string that is complete earliest, and
of several complete at the same character the longest. Therefore it does not depend on how tokens cut the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from disagg.errors import InvalidRequestError


class StopMatcher:
    """One stream. ``include``: the matched stop string is emitted too. Raises InvalidRequestError for an empty stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if not all(stops):
            raise InvalidRequestError("a stop string cannot be empty", param="stop")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""  # a proper prefix of a stop string, and the longest such suffix of the text so far
        self._stopped = False

    def push(self, text: str) -> tuple[str, str | None]:
        """``(text that is safe to emit, the stop string that is now complete)``. After a match: ``("", None)``."""
        if not self._stops:
            return text, None
        if self._stopped:
            return "", None
        text = self._held + text
        if match := self._first_match(text):
            start, stop = match
            self._stopped, self._held = True, ""
            return text[: start + len(stop)] if self._include else text[:start], stop
        tail = range(max(0, len(text) - self._longest + 1), len(text))
        safe = next((i for i in tail if text[i] in self._first_chars and self._may_begin(text[i:])), len(text))
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """What was held back: the stream ended, and it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _may_begin(self, suffix: str) -> bool:
        return any(stop.startswith(suffix) for stop in self._stops)
