"""Admits requests, chooses workers, and walks each request through its states.

    submit ─▶ queue ─▶ choose ─▶ Reserve ─▶ Reserved ─▶ Prefill ─▶ Prefilled ─▶ Pushed ─▶ Commit ─▶ Tokens … ─▶ finished
                          └ colocated, or one token only: Prefill without a target ─▶ Prefilled ─▶ Tokens …

A request's state (what its client sees) and its dispatch (one attempt; what workers hold for it) end separately: the client's
stream ends at once, while the dispatch stays in the books until every worker has said that nothing of it is left. Decode's
blocks are asked back only when the writer has quiesced or is dead (``disagg.handoff.protocol``).

When a worker is lost, the stream goes back to its place in the queue, before all of its priority that came later, and its next
dispatch computes prompt + generated tokens and goes on from there. Draws depend on seed and position only, so the text is the one
it would have been.

Decisions are made here and nowhere else; no I/O but ``WorkerInfo.send``. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from operator import attrgetter
from typing import Protocol

import structlog

from disagg.config import SchedulerConfig
from disagg.errors import OverloadedError, UnavailableError
from disagg.handoff.protocol import HANDOFF_TABLE, HandoffEvent, HandoffState
from disagg.lifetime import summary
from disagg.messages import (
    Abort,
    Commit,
    Message,
    Prefill,
    Prefilled,
    Pushed,
    Quiesced,
    Refused,
    Rejected,
    Reserve,
    Reserved,
    Stats,
    Target,
    TokenOutput,
    Tokens,
)
from disagg.overdue import Debt, Overdue
from disagg.pairs import Pairs
from disagg.request import FailReason, FinishReason, Request, RequestEvent, RequestState, advance
from disagg.routes import Route, Routes
from disagg.stream import Attempt, RequestStream
from disagg.supervisor import WorkerInfo

log = structlog.get_logger(__name__)


_WAITS_FOR_BLOCKS = (HandoffState.OFFERED, HandoffState.RELEASING)
_RANK = attrgetter("rank")
_IS_WRITTEN = (HandoffState.PUSHING, HandoffState.QUIESCING)


class RouterMetrics(Protocol):
    def observe_request(self, stream: RequestStream) -> None:
        """A request has ended, in whatever way; its state and times are final."""
        ...

    def observe_transfer(self, transport: str, nbytes: int, seconds: float) -> None: ...

    def observe_corrupted_block(self) -> None:
        """A block that arrived was not the one that was pushed."""
        ...

    def observe_failover(self, reason: FailReason) -> None:
        """An attempt of a request is lost, and another begins."""
        ...


@dataclass(eq=False, slots=True)
class _Dispatch:
    """One attempt of a request: who works on it. ``handoff`` is None when the prompt is computed where it is decoded."""

    id: int
    stream: RequestStream
    num_tokens: int  # that prefill computes
    prefill: WorkerInfo
    decode: WorkerInfo
    handoff: HandoffState | None
    is_current: bool = True  # its stream listens to it
    is_prefilled: bool = False
    is_reserving: bool = False  # it waits for decode's blocks
    has_prefill_part: bool = True  # prefill computes or copies something of it, or will
    is_at_prefill: bool = False  # and has been told to
    is_decode_gone: bool = False  # decode died: its blocks went with it
    committed_at: float | None = None  # decode has been told to go on, and nothing has come yet

    def move(self, event: HandoffEvent) -> None:
        if self.handoff is not None:
            self.handoff = advance(HANDOFF_TABLE, self.handoff, event)


def _involves(dispatch: _Dispatch, worker: WorkerInfo) -> bool:
    return worker is dispatch.decode or (worker is dispatch.prefill and dispatch.has_prefill_part)


class Router:
    def __init__(
        self,
        workers: list[WorkerInfo],
        pairs: Pairs,
        config: SchedulerConfig,
        mint: Iterator[int],
        clock: Callable[[], float],
        metrics: RouterMetrics,
        *,
        fallback: bool,
        stuck_s: float,
    ) -> None:
        """``fallback``: while no pair can serve, workers that were to serve in pairs do both.

        ``stuck_s``: how long a worker may owe an answer, without progress, before it is ended.
        """
        self._workers = workers
        self._pairs = pairs
        self._config = config
        self._mint = mint
        self._clock = clock
        self._metrics = metrics
        self._queue: list[RequestStream] = []  # in order of rank
        self._arrivals = count(1)
        self._dispatches: dict[int, _Dispatch] = {}
        self._by_stream: dict[RequestStream, _Dispatch] = {}
        self._routes = Routes(workers, pairs, window_tokens=2 * config.chunk_tokens, fallback=fallback)
        self._overdue = Overdue(stuck_s)
        self._emptied = asyncio.Event()
        self._changed = asyncio.Event()
        self.is_draining = False
        self.num_late_messages = 0
        self.num_generated_tokens = 0

    def __repr__(self) -> str:
        dispatches = ", ".join(f"{d.id}: {d.stream.state}/{d.handoff}" for d in self._dispatches.values())
        return f"Router(queued {len(self._queue)}, dispatches [{dispatches}])"

    @property
    def is_empty(self) -> bool:
        """No request is queued or served and no worker holds anything of one."""
        return not self._queue and not self._dispatches

    def counts(self) -> dict[str, int]:
        """Requests by state, as in the status answer."""
        states = [dispatch.stream.state for dispatch in self._by_stream.values()]
        return {
            "queued": len(self._queue) + states.count(RequestState.RESERVING),
            "prefilling": states.count(RequestState.PREFILLING),
            "handing_off": states.count(RequestState.HANDING_OFF),
            "decoding": states.count(RequestState.DECODING),
        }

    def can_serve(self) -> bool:
        return bool(self._routes.open())

    @property
    def is_degraded(self) -> bool:
        """Workers serve alone that should serve in pairs."""
        return self._routes.is_degraded

    def submit(self, request: Request) -> RequestStream:
        """Admit a request. Raises OverloadedError when the queue is full, UnavailableError when nobody can serve it."""
        if self.is_draining:
            raise UnavailableError("the server is draining or shutting down", retry_after_s=5.0)
        if not self.can_serve():
            raise UnavailableError("no workers are ready: " + "; ".join(f"{w.id} is {w.state}" for w in self._workers))
        stream = RequestStream(request, self._end_early, self._clock())
        stream.rank = (request.priority, next(self._arrivals))
        insort(self._queue, stream, key=_RANK)
        self._dispatch_queue()
        if len(self._queue) > self._config.max_queue and stream.state is RequestState.QUEUED:
            self._queue.remove(stream)
            raise OverloadedError(f"{len(self._queue)} requests are waiting already", retry_after_s=1.0)
        return stream

    def streams(self) -> list[RequestStream]:
        """Those that have not ended, the queued first."""
        return [*self._queue, *self._by_stream]

    async def drain(self) -> None:
        """Admit nothing more and wait until the last stream has ended."""
        self.is_draining = True
        while self._queue or self._by_stream:
            self._emptied.clear()
            await self._emptied.wait()

    def is_using(self, worker: WorkerInfo) -> bool:
        """The worker has, or may still have, something of a request."""
        return any(_involves(dispatch, worker) for dispatch in self._dispatches.values())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what only the end of a dispatch's part, or the coming or going of a worker or a pair, can bring about."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def fail_all(self, message: str, reason: FailReason) -> None:
        """End every stream with an error; what workers hold is freed as for an abort."""
        for stream in self.streams():
            stream.fail(message, reason, self._clock())
            self._end(stream)

    # ---------------------------------------------------------------- what the supervisor tells

    def on_ready(self, worker: WorkerInfo) -> None:
        """The worker can serve, alone or as soon as its pairs are proven."""
        self._pairs.on_ready(worker)
        self.on_change()

    def on_change(self) -> None:
        """A worker or a pair can serve now."""
        self._changed.set()
        self._routes.on_change()
        self._dispatch_queue()

    def on_down(self, worker: WorkerInfo) -> None:
        """The worker is dead: its streams go on elsewhere, and what the other worker holds for them can be freed."""
        self._pairs.on_down(worker)
        self._changed.set()
        for dispatch in list(self._dispatches.values()):
            if not _involves(dispatch, worker):
                continue
            self._retry(dispatch, f"worker {worker.id} died: {worker.cause}", FailReason.WORKER_DIED)
            if worker is dispatch.prefill:
                self._prefill_is_done(dispatch)
                if dispatch.handoff is HandoffState.PUSHING:
                    dispatch.move(HandoffEvent.QUIESCE)
                if dispatch.handoff is HandoffState.QUIESCING:
                    dispatch.move(HandoffEvent.QUIESCED)
            dispatch.is_decode_gone = dispatch.is_decode_gone or worker is dispatch.decode
            self._close(dispatch)
        self._dispatch_queue()
        self._expire_queue()

    def _expire_queue(self) -> None:
        """While nobody can serve, fail what has waited ``queue_s``, and look again when the next will have."""
        now, limit_s = self._clock(), self._config.queue_s
        while self._queue and not self.can_serve():
            left_s = min(stream.entered[-1][1] for stream in self._queue) + limit_s - now
            if left_s > 0:
                asyncio.get_running_loop().call_later(left_s, self._expire_queue)
                return
            stream = min(self._queue, key=lambda stream: stream.entered[-1][1])
            stream.fail(f"no worker could serve it for {limit_s:g} s", FailReason.TIMEOUT, now)
            self._end(stream)

    def on_message(self, worker: WorkerInfo, message: Message) -> None:
        if isinstance(message, Tokens):
            self._tokens(message)
        elif isinstance(message, Stats):
            self._overdue.look(chain(self._pairs.debts(), self._debts()), self._clock())
        elif not self._pairs.take(worker, message):
            self._take(worker, message)
        self._dispatch_queue()  # whatever the message was, it may have made room, or have queued a stream again

    def _take(self, worker: WorkerInfo, message: Message) -> None:
        if not isinstance(message, Reserved | Refused | Prefilled | Pushed | Rejected | Quiesced):
            return
        dispatch = self._dispatches.get(message.dispatch)
        match message:
            case Reserved() if dispatch and dispatch.handoff in _WAITS_FOR_BLOCKS:
                self._reserved(dispatch, message)
            case Refused() if dispatch and dispatch.handoff in _WAITS_FOR_BLOCKS:
                self._refused(dispatch, message)
            case Prefilled() if dispatch and dispatch.has_prefill_part and not dispatch.is_prefilled:
                self._prefilled(dispatch, message)
            case Pushed() if dispatch and dispatch.handoff in _IS_WRITTEN and dispatch.is_prefilled:
                self._pushed(dispatch, message)
            case Rejected() if dispatch and dispatch.handoff is HandoffState.COMMITTED:
                self._rejected(dispatch, message)
            case Quiesced() if dispatch:
                self._quiesced(dispatch, worker)
            case _:  # late, or told twice
                self.num_late_messages += 1

    def _debts(self) -> Iterator[Debt]:
        """The answers that are awaited about every dispatch, each with what changes while its worker works on it."""
        for dispatch in self._dispatches.values():
            prefill, decode = dispatch.prefill, dispatch.decode
            num_tokens = len(dispatch.stream.tokens) if dispatch.is_current else -1
            match dispatch.handoff:
                case HandoffState.OFFERED:
                    yield Debt(dispatch.id, decode, "blocks", grace_s=self._config.reserve_s)
                case HandoffState.PUSHING if dispatch.is_prefilled:
                    yield Debt(dispatch.id, prefill, "its bytes", num_tokens)
                case None | HandoffState.PUSHING | HandoffState.COMMITTED:
                    worker = decode if dispatch.handoff is HandoffState.COMMITTED else prefill
                    yield Debt(dispatch.id, worker, "tokens", (num_tokens, worker.stats.steps if worker.stats else 0))
                case HandoffState.QUIESCING:
                    yield Debt(dispatch.id, prefill, "Quiesced")
                case HandoffState.RELEASING:
                    yield Debt(dispatch.id, decode, "its blocks")

    # ---------------------------------------------------------------- a request's way

    def _dispatch_queue(self) -> None:
        """Start what there is room for, in order of rank: who is first is waited for, so that long prompts get their turn."""
        while self._queue:
            stream = self._queue[0]
            decodes = stream.request.params.max_tokens - len(stream.tokens) > 1
            route = self._routes.choose(len(stream.request.prompt) + len(stream.tokens), decodes=decodes)
            if route is None:
                return
            self._start(self._queue.pop(0), route)

    def _start(self, stream: RequestStream, route: Route) -> None:
        prefill, decode = route
        tokens, num_prompt = stream.all_tokens, len(stream.request.prompt)
        handoff = None if route.is_alone else HandoffState.OFFERED
        dispatch = _Dispatch(next(self._mint), stream, len(tokens), prefill, decode, handoff)
        self._dispatches[dispatch.id] = dispatch
        self._by_stream[stream] = dispatch
        self._routes.load(decode).num_requests += 1
        stream.attempts.append(Attempt(prefill.id, decode.id))
        if route.is_alone:
            self._begin_prefill(dispatch)
            stream.move(RequestEvent.PREFILL, self._clock())
            prefill.send(Prefill(dispatch.id, tokens, num_prompt, stream.params, None, stream.request.priority))
        else:
            dispatch.is_reserving = True
            self._routes.load(decode).reserve_tokens += dispatch.num_tokens
            stream.move(RequestEvent.RESERVE, self._clock())
            pair = self._pairs.between(prefill, decode)
            is_received = pair is not None and pair.is_two_sided
            limit_s, priority = self._config.reserve_s, stream.request.priority
            decode.send(Reserve(dispatch.id, tokens, num_prompt, stream.params, limit_s, is_received, priority))

    def _reserved(self, dispatch: _Dispatch, message: Reserved) -> None:
        dispatch.move(HandoffEvent.RESERVED)
        if dispatch.handoff is HandoffState.RELEASING:  # the word to release it is on its way
            self._end_reserve(dispatch)
            return
        self._begin_prefill(dispatch)
        stream, decode = dispatch.stream, dispatch.decode
        stream.move(RequestEvent.PREFILL, self._clock())
        dispatch.move(HandoffEvent.PUSH)
        target = Target(decode.id, decode.epoch, message.blocks, message.num_cached_blocks, message.key)
        request = stream.request
        dispatch.prefill.send(
            Prefill(dispatch.id, stream.all_tokens, len(request.prompt), stream.params, target, request.priority)
        )
        self._end_reserve(dispatch)

    def _refused(self, dispatch: _Dispatch, message: Refused) -> None:
        dispatch.move(HandoffEvent.REFUSED)
        if dispatch.is_current:
            self._fail(dispatch, f"{dispatch.decode.id}: {message.reason}", FailReason.NO_BLOCKS)
        self._close(dispatch)

    def _prefilled(self, dispatch: _Dispatch, message: Prefilled) -> None:
        stream, now = dispatch.stream, self._clock()
        dispatch.is_prefilled = True
        if dispatch.handoff is None:
            self._prefill_is_done(dispatch)
        if not dispatch.is_current:
            return
        if not stream.tokens:
            stream.num_cached_tokens = message.num_cached_tokens
            stream.prompt_logprobs = message.prompt_logprobs
        self.num_generated_tokens += message.output is not None
        if message.output is None or message.output.finish_reason is not None:
            self._finish(dispatch, message.output)
            return
        stream.deliver(message.output)
        stream.move(RequestEvent.FIRST_TOKEN, now)
        if dispatch.handoff is None:
            stream.move(RequestEvent.COMMIT, now)
            dispatch.committed_at = now

    def _pushed(self, dispatch: _Dispatch, message: Pushed) -> None:
        self._prefill_is_done(dispatch)
        dispatch.move(HandoffEvent.PUSHED)
        stream = dispatch.stream
        pair = self._pairs.between(dispatch.prefill, dispatch.decode)
        self._metrics.observe_transfer(pair.transport if pair else "", message.nbytes, message.seconds)
        if message.error is not None:
            self._retry(dispatch, f"KV hand-over failed: {message.error}", FailReason.HANDOFF)
        if not dispatch.is_current:
            self._close(dispatch)
            return
        dispatch.move(HandoffEvent.COMMIT)
        dispatch.committed_at = self._clock()
        stream.move(RequestEvent.COMMIT, dispatch.committed_at)
        dispatch.decode.send(Commit(dispatch.id, stream.tokens[-1], message.digests))

    def _rejected(self, dispatch: _Dispatch, message: Rejected) -> None:
        reason = FailReason(message.reason)
        if reason is FailReason.CORRUPTED:
            self._metrics.observe_corrupted_block()
        self._retry(dispatch, f"{dispatch.prefill.id} → {dispatch.decode.id}: {message.detail}", reason)
        self._close(dispatch)

    def _tokens(self, message: Tokens) -> None:
        """The hot path: one call per decode step, one iteration per streamed token."""
        dispatches = self._dispatches
        self.num_generated_tokens += len(message.outputs)
        for output in message.outputs:
            dispatch = dispatches.get(output.dispatch)
            if dispatch is None or not dispatch.is_current:
                self.num_late_messages += 1
                self.num_generated_tokens -= 1
                continue
            if dispatch.committed_at is not None:
                dispatch.stream.first_decodes_s.append(self._clock() - dispatch.committed_at)
                dispatch.committed_at = None
            if output.finish_reason is None:
                dispatch.stream.deliver(output)
            else:
                self._finish(dispatch, output)

    def _finish(self, dispatch: _Dispatch, output: TokenOutput | None) -> None:
        """The worker has ended the sequence by itself; ``output`` is its last token, if it had one."""
        stream, now = dispatch.stream, self._clock()
        if output is not None and output.finish_reason == FinishReason.ERROR:
            message = "no token could be sampled: the model's output was not a number, or the grammar became too complex"
            stream.fail(message, FailReason.BROKEN_OUTPUT, now)
        else:
            if output is not None:
                stream.deliver(output)
            stream.finish_reason = FinishReason.LENGTH if output is None else output.finish_reason
            stream.move(RequestEvent.FINISH, now)
        self._detach(dispatch)
        if dispatch.handoff in (None, HandoffState.COMMITTED):  # else Pushed says when nothing is being written any more
            dispatch.move(HandoffEvent.RELEASED)
            self._drop(dispatch)

    def _quiesced(self, dispatch: _Dispatch, worker: WorkerInfo) -> None:
        """A worker holds nothing of an aborted dispatch any more."""
        if worker is not dispatch.decode:
            self._prefill_is_done(dispatch)
            if dispatch.handoff is HandoffState.QUIESCING:  # else its Pushed came first, and decode has been told
                dispatch.move(HandoffEvent.QUIESCED)
                self._close(dispatch)
        elif dispatch.handoff is None or dispatch.handoff is HandoffState.RELEASING:
            dispatch.move(HandoffEvent.RELEASED)
            self._drop(dispatch)

    # ---------------------------------------------------------------- endings

    def _end_early(self, stream: RequestStream, event: RequestEvent) -> None:
        stream.move(event, self._clock())
        self._end(stream)
        self._dispatch_queue()

    def _end(self, stream: RequestStream) -> None:
        """A stream has ended early: start freeing what workers hold for it."""
        if dispatch := self._by_stream.get(stream):
            self._detach(dispatch)
            self._close(dispatch)
        else:
            self._queue.remove(stream)
            self._ended(stream)

    def _retry(self, dispatch: _Dispatch, message: str, reason: FailReason) -> None:
        """An attempt is lost: queue its stream again, at its old place, or fail it after too many attempts."""
        stream = dispatch.stream
        if not dispatch.is_current:
            return
        if stream.num_attempts >= self._config.max_attempts:
            self._fail(dispatch, f"{message} (attempt {stream.num_attempts})", reason)
            return
        log.info(
            "request retried", request=stream.request.id, attempt=stream.num_attempts, tokens=len(stream.tokens), cause=message
        )
        self._metrics.observe_failover(reason)
        stream.attempts[-1].lost_for = reason
        dispatch.is_current = False
        del self._by_stream[stream]
        stream.move(RequestEvent.RETRY, self._clock())
        insort(self._queue, stream, key=_RANK)

    def _fail(self, dispatch: _Dispatch, message: str, reason: FailReason) -> None:
        dispatch.stream.fail(message, reason, self._clock())
        self._detach(dispatch)

    def _close(self, dispatch: _Dispatch) -> None:
        """Free what is left of a dispatch whose stream has ended, in the order that the hand-over's table allows."""
        match dispatch.handoff:
            case None:
                if dispatch.is_decode_gone:
                    self._drop(dispatch)
                else:
                    dispatch.prefill.send(Abort(dispatch.id))
            case HandoffState.PUSHING:
                dispatch.move(HandoffEvent.QUIESCE)
                dispatch.prefill.send(Abort(dispatch.id))
            case HandoffState.QUIESCING:
                pass  # prefill has been told
            case HandoffState.RELEASED:
                self._drop(dispatch)
            case _:
                if dispatch.handoff is not HandoffState.RELEASING:
                    dispatch.move(HandoffEvent.RELEASE)
                if dispatch.is_decode_gone:
                    dispatch.move(HandoffEvent.RELEASED)
                    self._drop(dispatch)
                else:
                    dispatch.decode.send(Abort(dispatch.id))

    def _end_reserve(self, dispatch: _Dispatch) -> None:
        """Decode has answered, or will not: another may wait for its blocks."""
        if dispatch.is_reserving:
            dispatch.is_reserving = False
            self._routes.load(dispatch.decode).reserve_tokens -= dispatch.num_tokens

    def _begin_prefill(self, dispatch: _Dispatch) -> None:
        dispatch.is_at_prefill = True
        self._routes.load(dispatch.prefill).prefill_tokens += dispatch.num_tokens

    def _prefill_is_done(self, dispatch: _Dispatch) -> None:
        """Prefill computes and copies nothing of the dispatch any more: it has room for another."""
        dispatch.has_prefill_part = False
        self._changed.set()
        if dispatch.is_at_prefill:
            dispatch.is_at_prefill = False
            self._routes.load(dispatch.prefill).prefill_tokens -= dispatch.num_tokens

    def _detach(self, dispatch: _Dispatch) -> None:
        """The stream of a dispatch has ended; what workers hold for it may live on for a moment."""
        dispatch.is_current = False
        del self._by_stream[dispatch.stream]
        self._ended(dispatch.stream)

    def _ended(self, stream: RequestStream) -> None:
        self._metrics.observe_request(stream)
        (log.warning if stream.error is not None else log.info)("request ended", **summary(stream))
        if not self._queue and not self._by_stream:
            self._emptied.set()

    def _drop(self, dispatch: _Dispatch) -> None:
        """No worker holds anything of it: out of the books."""
        self._end_reserve(dispatch)
        self._prefill_is_done(dispatch)
        del self._dispatches[dispatch.id]
        self._routes.load(dispatch.decode).num_requests -= 1
