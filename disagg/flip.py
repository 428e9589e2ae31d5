"""Changes the role of a worker while the server runs: prefill, decode or mixed.

    refused? ─▶ nothing new for it ─▶ what it has runs to its end, or for ``wait_s`` ─▶ it ends ─▶ it starts in its new role,
                                      and then goes on elsewhere, as after a death      under a new epoch ─▶ its pairs are proven

A worker keeps its name, whatever it does. Whoever asked and goes before the worker has ended calls it off.
"""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from disagg.deployment import in_role
from disagg.errors import InvalidRequestError
from disagg.pairs import Pairs
from disagg.router import Router
from disagg.supervisor import Role, Supervisor, WorkerInfo

log = structlog.get_logger(__name__)


class Flipped(msgspec.Struct, frozen=True):
    """How it went. ``is_ready``: it serves in its new role, over every pair that it has."""

    worker: str
    role: Role
    epoch: int
    is_ready: bool


class Flipper:
    """``start_s``: how long a worker may take to be ready again before the answer is that it is not."""

    def __init__(self, router: Router, pairs: Pairs, supervisor: Supervisor, *, start_s: float) -> None:
        self._router = router
        self._pairs = pairs
        self._supervisor = supervisor
        self._start_s = start_s

    async def flip(self, worker_id: str, role_name: str, wait_s: float) -> Flipped:
        """Give the worker another role; return when it serves in it. Raises InvalidRequestError (409), having changed nothing."""
        worker, role = self._checked(worker_id, role_name)
        epoch = worker.epoch
        log.info("worker flips", worker=worker.id, role=worker.role, to=role, wait_s=wait_s)
        worker.next = in_role(worker.settings, role)
        try:
            async with asyncio.timeout(wait_s):
                await self._router.until(lambda: not self._router.is_using(worker) or worker.epoch != epoch)
        except TimeoutError:
            log.info("flip waits no longer", worker=worker.id, streams=self._router.counts())
        except asyncio.CancelledError:
            if worker.epoch == epoch:
                worker.next = None
                self._router.on_change()
            raise
        if worker.epoch == epoch:  # else it has died by itself meanwhile
            await self._supervisor.end(worker, f"it becomes {role}")
        is_ready = await self._is_ready_again(worker)
        return Flipped(worker.id, worker.role, worker.epoch, is_ready)

    async def _is_ready_again(self, worker: WorkerInfo) -> bool:
        def serves() -> bool:
            pairs = [pair for pair in self._pairs if worker in (pair.prefill, pair.decode)]
            return worker.is_open and all(pair.is_verified for pair in pairs)

        try:
            async with asyncio.timeout(self._start_s):
                await self._router.until(serves)
        except TimeoutError:
            log.error("flipped worker is not ready", worker=worker.id, role=worker.role, cause=worker.cause)
            return False
        return True

    def _checked(self, worker_id: str, role_name: str) -> tuple[WorkerInfo, Role]:
        workers = self._supervisor.workers
        worker = next((worker for worker in workers if worker.id == worker_id), None)
        if role_name not in set(Role):
            raise _refusal(f"a worker is {', '.join(Role)}, not {role_name[:40]!r}")
        role = Role(role_name)
        if worker is None:
            raise _refusal(f"there is no worker {worker_id[:80]!r}; there are {', '.join(w.id for w in workers)}")
        if worker.node:
            raise _refusal(f"{worker.id} is a worker of node {worker.node}: what it does is said there, by disagg worker")
        if self._router.is_draining:
            raise _refusal("the server is draining: resume first, or let it end")
        if flipping := next((w for w in workers if w.next is not None), None):
            raise _refusal(f"{flipping.id} is being flipped: one at a time")
        if not worker.is_ready:
            raise _refusal(f"{worker.id} is {worker.state}: only a worker that is ready can be flipped")
        if worker.role is role:
            raise _refusal(f"{worker.id} is {role} already")
        roles = {role, *(w.role for w in workers if w.is_ready and w is not worker)}
        if Role.MIXED not in roles and (missing := {Role.PREFILL, Role.DECODE} - roles):
            raise _refusal(f"with {worker.id} as {role} no worker that is ready could do {missing.pop()}: flip another one first")
        return worker, role


def _refusal(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, code="cannot_flip", status=409)
