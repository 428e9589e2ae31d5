"""One worker: messages in, one engine step at a time, messages out.

A worker's role is a policy, not a kind of process: every worker has both sides, and what it does follows from the messages it
is sent. A prefill worker gets Prefill with a target, a decode worker Reserve and Commit, a mixed one Prefill without a
target. They share one engine, one pool and one scheduler.

No sockets, processes or clocks in here: ``worker_process`` drives it for real, the simulation on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from disagg.decode import DecodeRole
from disagg.engine.base import Engine
from disagg.engine.blocks import BlockPool, BlockState
from disagg.engine.scheduler import Progress, Scheduler
from disagg.errors import HandoffError, OutOfBlocksError
from disagg.handoff.digest import block_digests
from disagg.handoff.transport import Arrived
from disagg.handoff.transports import Transports
from disagg.messages import (
    Abort,
    Commit,
    Configure,
    Connect,
    Connected,
    Disconnect,
    Message,
    Prefill,
    Probe,
    Probed,
    Quiesced,
    Reserve,
    Stats,
    Tokens,
    Verify,
)
from disagg.prefill import PrefillRole
from disagg.probe import Prober, digest

log = structlog.get_logger()


class Worker:
    """``pool`` is the KV memory, ``num_blocks * layout.block_nbytes`` bytes; the engine is bound to it here."""

    def __init__(
        self,
        settings: Configure,
        engine: Engine,
        pool: memoryview,
        transports: Transports,
        send: Callable[[Message], None],
        clock: Callable[[], float],
    ) -> None:
        layout = engine.layout
        self._engine = engine
        self._transports = transports
        self._send = send
        self.pool = BlockPool(len(pool) // layout.block_nbytes, settings.kv_ample_nbytes // layout.block_nbytes)
        self.scheduler = Scheduler(
            self.pool,
            block_size=layout.block_size,
            chunk_tokens=settings.chunk_tokens,
            max_num_seqs=settings.max_num_seqs,
            prefix_cache=settings.prefix_cache,
        )
        digests = block_digests(pool, layout)
        self.decode = DecodeRole(self.scheduler, transports, send, clock, digests, partial(digest, pool, layout))
        self.prefill = PrefillRole(
            self.scheduler,
            transports,
            send,
            clock,
            decode_here=self.decode.adopt,
            block_digests=digests if settings.verify_kv else None,
        )
        self.prober = Prober(self.pool, layout, pool, transports, send)
        self._num_steps = 0
        self._num_late = 0
        engine.bind(pool)

    def __repr__(self) -> str:
        return f"Worker({self.scheduler!r}, {self.prefill!r}, {self.decode!r})"

    def receive(self, message: Message, fds: list[int]) -> None:
        """Take one message. What it starts happens in the steps that follow."""
        match message:
            case Prefill():
                if not self._is_known(message.dispatch):
                    self.prefill.start(message)
            case Reserve():
                if not self._is_known(message.dispatch):
                    self.decode.reserve(message)
            case Commit() | Verify():
                if not self.decode.commit(message):
                    self._late(message)
            case Abort():
                self._abort(message)
            case Connect():
                self._connect(message, fds)
            case Disconnect():
                self._transports.disconnect(message.peer, message.epoch)
            case Probe():
                try:
                    self.prober.start(message)
                except OutOfBlocksError as error:
                    self._send(Probed(message.dispatch, b"", 0, 0.0, str(error)))
            case _:
                self._late(message)

    def step(self) -> bool:
        """Compute one batch, report its tokens, then settle copies and reservations. False: there was nothing to compute."""
        self.poll()  # blocks that come back here may admit a prompt
        batch = self.scheduler.schedule()
        if batch:
            for chunk in batch:
                if chunk.sequence.dispatch in self.prefill:
                    self.prefill.before_step(chunk.sequence)
            samples = self._engine.step(batch)
            self._num_steps += 1
            self._report(self.scheduler.commit(batch, samples))
            self.poll()
        return bool(batch)

    def poll(self) -> None:
        """Settle what needs no computing: finished copies, reservations that fit now or have waited too long."""
        self.decode.poll()
        while done := self._transports.completed():
            for ended in done:
                if isinstance(ended, Arrived):
                    self.decode.arrived(ended)
                else:
                    owner = self.prefill if ended.dispatch in self.prefill else self.prober
                    owner.copied(ended)
            self.decode.poll()

    def stats(self) -> Stats:
        counts, scheduler = self.pool.counts, self.scheduler
        return Stats(
            waiting=len(scheduler.waiting) + self.decode.num_waiting,
            running=len(scheduler.running),
            free=counts[BlockState.FREE],
            reserved=counts[BlockState.RESERVED],
            filling=counts[BlockState.FILLING],
            in_use=counts[BlockState.IN_USE],
            cached=counts[BlockState.CACHED],
            steps=self._num_steps,
            decode_prefill_tokens=scheduler.num_recomputed_tokens,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.num_prefix_queries,
            prefix_hits=scheduler.num_prefix_hits,
            late_messages=self._num_late,
        )

    def _report(self, results: list[Progress]) -> None:
        outputs = []
        for progress in results:
            sequence = progress.sequence
            if sequence.dispatch in self.prefill:
                self.prefill.after_step(progress)
            elif (output := progress.output) is not None:
                outputs.append(output)
                if progress.finish_reason is not None:
                    self.decode.finished(sequence.dispatch)
        if outputs:
            self._send(Tokens(outputs))

    def _abort(self, message: Abort) -> None:
        if message.dispatch in self.prefill:
            self.prefill.abort(message.dispatch)
        elif message.dispatch in self.decode:
            self.decode.abort(message)
        else:  # it ended here before the word arrived; the parent waits for an answer all the same
            self._late(message)
            self._send(Quiesced(message.dispatch))

    def _connect(self, message: Connect, fds: list[int]) -> None:
        fd = fds[0] if fds else -1
        try:
            transport = self._transports.connect(
                message.peer, message.epoch, message.layout, message.num_blocks, fd, message.address
            )
        except HandoffError as failure:
            self._send(Connected(message.peer, message.epoch, "", str(failure)))
        else:
            self._send(Connected(message.peer, message.epoch, transport.name, None, transport.is_two_sided))

    def _is_known(self, dispatch: int) -> bool:
        if is_known := dispatch in self.prefill or dispatch in self.decode:
            self._num_late += 1
        return is_known

    def _late(self, message: Message) -> None:
        self._num_late += 1
        log.debug("late message ignored", message=type(message).__name__, dispatch=getattr(message, "dispatch", None))
