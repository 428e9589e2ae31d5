"""Answers that workers owe the parent. When one does not come its worker is ended, and its streams go on elsewhere.

Death, hanging and lost messages are noticed before (``supervisor``, ``channel``). What is left is a worker that lives, reports
and has taken a message, yet does nothing about it: without a limit, that message would hold its blocks and its client for ever.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from disagg.supervisor import WorkerInfo

LOOK_S = 1.0


class Debt(NamedTuple):
    """``worker`` owes ``what`` about ``key``. It is being worked on as long as ``progress`` changes."""

    key: Hashable
    worker: WorkerInfo
    what: str
    progress: Hashable = None
    grace_s: float = 0.0  # that it may take beyond the limit


class Overdue:
    """Watches debts from look to look; ``limit_s`` is how long one may go without progress."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: dict[Hashable, tuple[Debt, float]] = {}  # and since when it has been like that
        self._looked_at = float("-inf")

    def __repr__(self) -> str:
        return f"Overdue({[f'{debt.worker.id} {debt.what}' for debt, _ in self._seen.values()]})"

    def look(self, debts: Iterable[Debt], now: float) -> None:
        """Kill every worker that has owed one of ``debts`` for too long. May be called often: it looks every LOOK_S."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        before, self._seen = self._seen, {}
        for debt in debts:
            known, since = before.get(debt.key, (None, now))
            if debt != known:
                since = now
            elif now - since > self._limit_s + debt.grace_s:
                debt.worker.kill(f"it owes {debt.what} ({debt.key}) for {now - since:.0f} s, and makes no progress with it")
            self._seen[debt.key] = (debt, since)
