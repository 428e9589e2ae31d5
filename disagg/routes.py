"""Which workers the next request goes to: a decision without I/O, from who is ready and what each has been given.

verified pairs and mixed workers;  while there are none, and if that is allowed, any ready worker alone
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from disagg.pairs import Pairs
from disagg.supervisor import Role, WorkerInfo


class Route(NamedTuple):
    """Who computes the prompt, and who then decodes."""

    prefill: WorkerInfo
    decode: WorkerInfo

    @property
    def is_alone(self) -> bool:
        return self.prefill is self.decode


@dataclass(slots=True)
class Load:
    """What the router has given a worker and not got back."""

    prefill_tokens: int = 0  # to be computed here
    reserve_tokens: int = 0  # that wait for blocks here
    num_requests: int = 0  # that decode here, or will


class Routes:
    """``window_tokens`` may wait in each worker's queue; ``fallback``: workers of pairs may serve alone while no pair can."""

    def __init__(self, workers: list[WorkerInfo], pairs: Pairs, *, window_tokens: int, fallback: bool) -> None:
        self._workers = workers
        self._pairs = pairs
        self._window_tokens = window_tokens
        self._fallback = fallback
        self._was_paired = False
        self._loads: defaultdict[str, Load] = defaultdict(Load)  # by worker; they come and go with their nodes

    def load(self, worker: WorkerInfo) -> Load:
        return self._loads[worker.id]

    def on_change(self) -> None:
        """A worker or a pair has come. Before the first pair is proven nobody stands in for one: the server is only starting."""
        self._was_paired = self._was_paired or bool(self._pairs.verified())

    @property
    def is_degraded(self) -> bool:
        """Workers serve alone that should serve in pairs."""
        return any(route.is_alone and route.prefill.role is not Role.MIXED for route in self.open())

    def open(self) -> list[Route]:
        """Every route that could be taken, whatever its load."""
        pairs = self._pairs.verified()
        routes = [Route(pair.prefill, pair.decode) for pair in pairs if pair.prefill.is_open and pair.decode.is_open]
        routes += [Route(worker, worker) for worker in self._workers if worker.is_open and worker.role is Role.MIXED]
        if not routes and self._was_paired and self._fallback:
            routes = [Route(worker, worker) for worker in self._workers if worker.is_open]
        return routes

    def choose(self, num_tokens: int, *, decodes: bool) -> Route | None:
        """The least loaded route that has room for a prompt of ``num_tokens`` now, or None.

        Without anything to decode (``decodes`` False) whoever prefills can serve the request alone.
        """
        routes = self.open()
        if not decodes:
            routes = [Route(route.prefill, route.prefill) for route in routes]
        return min((route for route in routes if self._has_room(route, num_tokens)), key=self._cost, default=None)

    def _has_room(self, route: Route, num_tokens: int) -> bool:
        """A step's worth of tokens ahead of prefill, and as much waiting for blocks on decode: each queue bounds only itself."""
        ahead = [self.load(route.prefill).prefill_tokens]
        if not route.is_alone:
            ahead.append(self.load(route.decode).reserve_tokens)
        return all(not tokens or tokens + num_tokens <= self._window_tokens for tokens in ahead)

    def _cost(self, route: Route) -> tuple[bool, int, int]:
        """What makes a route worse: decode keeps others waiting, prompts ahead on prefill, streams on decode."""
        prefill, decode = self.load(route.prefill), self.load(route.decode)
        return (decode.reserve_tokens > 0, prefill.prefill_tokens, decode.num_requests)
