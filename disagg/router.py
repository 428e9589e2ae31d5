"""Admits requests, chooses workers, and walks each request through its states.

    submit ─▶ queue ─▶ choose ─▶ Reserve ─▶ Reserved ─▶ Prefill ─▶ Prefilled ─▶ Pushed ─▶ Commit ─▶ Tokens … ─▶ finished
                          └ colocated, or one token only: Prefill without a target ─▶ Prefilled ─▶ Tokens …

A request's state (what its client sees) and its dispatch (what workers hold for it) end separately: the client's stream ends at
once, while the dispatch stays in the books until every worker has said that nothing of it is left. Decode's blocks are asked
back only when the writer has quiesced or is dead (``disagg.handoff.protocol``).

Decisions are made here and nowhere else; no I/O but ``WorkerInfo.send``. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import structlog

from disagg.config import SchedulerConfig
from disagg.errors import OverloadedError, UnavailableError
from disagg.handoff.protocol import HANDOFF_TABLE, HandoffEvent, HandoffState
from disagg.messages import (
    Abort,
    Commit,
    Message,
    Prefill,
    Prefilled,
    Pushed,
    Quiesced,
    Refused,
    Reserve,
    Reserved,
    Target,
    Tokens,
)
from disagg.pairs import Pairs
from disagg.request import FailReason, Request, RequestEvent, RequestState, advance
from disagg.stream import RequestStream
from disagg.supervisor import Role, WorkerInfo

log = structlog.get_logger(__name__)


class RouterMetrics(Protocol):
    def observe_request(self, stream: RequestStream) -> None:
        """A request has ended, in whatever way; its state and times are final."""
        ...

    def observe_transfer(self, transport: str, nbytes: int, seconds: float) -> None: ...


@dataclass(eq=False, slots=True)
class _Dispatch:
    """One attempt of a request: who works on it. ``handoff`` is None when the prompt is computed where it is decoded."""

    id: int
    stream: RequestStream
    prefill: WorkerInfo
    decode: WorkerInfo
    handoff: HandoffState | None
    has_prefill_part: bool = True  # prefill still computes, or copies, something of it
    is_decode_gone: bool = False  # decode died: its blocks went with it

    def move(self, event: HandoffEvent) -> None:
        if self.handoff is not None:
            self.handoff = advance(HANDOFF_TABLE, self.handoff, event)


@dataclass(slots=True)
class _Load:
    """What the router has given a worker and not got back."""

    prompt_tokens: int = 0  # of prompts not yet prefilled
    num_requests: int = 0


class Router:
    def __init__(
        self,
        workers: list[WorkerInfo],
        pairs: Pairs,
        config: SchedulerConfig,
        mint: Iterator[int],
        clock: Callable[[], float],
        metrics: RouterMetrics,
    ) -> None:
        self._workers = workers
        self._pairs = pairs
        self._config = config
        self._mint = mint
        self._clock = clock
        self._metrics = metrics
        self._queue: deque[RequestStream] = deque()
        self._dispatches: dict[int, _Dispatch] = {}
        self._by_stream: dict[RequestStream, _Dispatch] = {}
        self._loads = {worker.id: _Load() for worker in workers}
        self._emptied = asyncio.Event()
        self.is_draining = False
        self.num_late_messages = 0

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
        return bool(self._pairs.verified()) or any(w.is_ready and w.role is Role.MIXED for w in self._workers)

    def submit(self, request: Request) -> RequestStream:
        """Admit a request. Raises OverloadedError when the queue is full, UnavailableError when nobody can serve it."""
        if self.is_draining:
            raise UnavailableError("the server is shutting down", retry_after_s=5.0)
        if not self.can_serve():
            raise UnavailableError("no workers are ready: " + "; ".join(f"{w.id} is {w.state}" for w in self._workers))
        stream = RequestStream(request, self._abort, self._clock())
        self._queue.append(stream)
        self._dispatch_queue()
        if len(self._queue) > self._config.max_queue and self._queue[-1] is stream:
            self._queue.pop()
            raise OverloadedError(f"{len(self._queue)} requests are waiting already", retry_after_s=1.0)
        return stream

    async def drain(self) -> None:
        """Admit nothing more and wait until the last stream has ended."""
        self.is_draining = True
        while self._queue or self._by_stream:
            self._emptied.clear()
            await self._emptied.wait()

    def fail_all(self, message: str, reason: FailReason) -> None:
        """End every stream with an error; what workers hold is freed as for an abort."""
        for stream in list(self._queue) + list(self._by_stream):
            stream.fail(message, reason, self._clock())
            self._end(stream)

    # ---------------------------------------------------------------- what the supervisor tells

    def on_change(self) -> None:
        """A worker or a pair can serve now."""
        self._dispatch_queue()

    def on_down(self, worker: WorkerInfo) -> None:
        """The worker is dead: its requests fail, and what the other worker holds for them can be freed."""
        for dispatch in [d for d in self._dispatches.values() if worker in (d.prefill, d.decode)]:
            if dispatch.stream in self._by_stream:
                message = f"worker {worker.id} died: {worker.cause}"
                dispatch.stream.fail(message, FailReason.WORKER_DIED, self._clock())
                self._forget_stream(dispatch.stream)
            if worker is dispatch.prefill:
                self._prefill_is_done(dispatch)
                if dispatch.handoff is HandoffState.PUSHING:
                    dispatch.move(HandoffEvent.QUIESCE)
                if dispatch.handoff is HandoffState.QUIESCING:
                    dispatch.move(HandoffEvent.QUIESCED)
            dispatch.is_decode_gone = dispatch.is_decode_gone or worker is dispatch.decode
            self._close(dispatch)
        self._dispatch_queue()

    def on_message(self, worker: WorkerInfo, message: Message) -> None:
        if isinstance(message, Tokens):
            self._tokens(message)
            return
        dispatch = self._dispatches.get(getattr(message, "dispatch", -1))
        if dispatch is None:
            self.num_late_messages += 1
            return
        match message:
            case Reserved():
                self._reserved(dispatch, message)
            case Refused():
                self._refused(dispatch, message)
            case Prefilled():
                self._prefilled(dispatch, message)
            case Pushed():
                self._pushed(dispatch, message)
            case Quiesced():
                self._quiesced(dispatch, worker)

    # ---------------------------------------------------------------- a request's way

    def _dispatch_queue(self) -> None:
        while self._queue and (chosen := self._choose(self._queue[0].request)):
            self._start(self._queue.popleft(), *chosen)

    def _choose(self, request: Request) -> tuple[WorkerInfo, WorkerInfo] | None:
        """The least loaded workers that have room now, or None. Prefill's room is a step's worth of prompts ahead of it."""
        if request.params.max_tokens <= 1:  # nothing to decode: any worker that prefills can serve it alone
            candidates = [(pair.prefill, pair.prefill) for pair in self._pairs.verified()]
        else:
            candidates = [(pair.prefill, pair.decode) for pair in self._pairs.verified()]
        candidates += [(w, w) for w in self._workers if w.is_ready and w.role is Role.MIXED]
        candidates = [(prefill, decode) for prefill, decode in candidates if self._has_room(prefill, request)]
        return min(candidates, key=self._load_of, default=None)

    def _has_room(self, prefill: WorkerInfo, request: Request) -> bool:
        waiting = self._loads[prefill.id].prompt_tokens
        return not waiting or waiting + len(request.prompt) <= 2 * self._config.chunk_tokens

    def _load_of(self, pair: tuple[WorkerInfo, WorkerInfo]) -> tuple[int, int]:
        return (self._loads[pair[0].id].prompt_tokens, self._loads[pair[1].id].num_requests)

    def _start(self, stream: RequestStream, prefill: WorkerInfo, decode: WorkerInfo) -> None:
        is_alone = prefill is decode
        dispatch = _Dispatch(next(self._mint), stream, prefill, decode, None if is_alone else HandoffState.OFFERED)
        self._dispatches[dispatch.id] = dispatch
        self._by_stream[stream] = dispatch
        self._loads[prefill.id].prompt_tokens += len(stream.request.prompt)
        self._loads[decode.id].num_requests += 1
        request = stream.request
        if is_alone:
            stream.move(RequestEvent.PREFILL, self._clock())
            prefill.send(Prefill(dispatch.id, request.prompt, request.params, None))
        else:
            stream.move(RequestEvent.RESERVE, self._clock())
            decode.send(Reserve(dispatch.id, request.prompt, request.params, self._config.reserve_s))

    def _reserved(self, dispatch: _Dispatch, message: Reserved) -> None:
        dispatch.move(HandoffEvent.RESERVED)
        if dispatch.handoff is HandoffState.RELEASING:
            return  # the word to release it is on its way
        request, decode = dispatch.stream.request, dispatch.decode
        dispatch.stream.move(RequestEvent.PREFILL, self._clock())
        dispatch.move(HandoffEvent.PUSH)
        target = Target(decode.id, decode.epoch, message.blocks, message.num_cached_blocks)
        dispatch.prefill.send(Prefill(dispatch.id, request.prompt, request.params, target))

    def _refused(self, dispatch: _Dispatch, message: Refused) -> None:
        dispatch.move(HandoffEvent.REFUSED)
        if dispatch.stream in self._by_stream:
            dispatch.stream.fail(f"{dispatch.decode.id}: {message.reason}", FailReason.NO_BLOCKS, self._clock())
            self._forget_stream(dispatch.stream)
        self._close(dispatch)

    def _prefilled(self, dispatch: _Dispatch, message: Prefilled) -> None:
        stream, now = dispatch.stream, self._clock()
        if dispatch.handoff is None:
            self._prefill_is_done(dispatch)
        if stream.is_final:
            return
        stream.num_cached_tokens = message.num_cached_tokens
        stream.prompt_logprobs = message.prompt_logprobs
        if message.output is not None:
            stream.deliver(message.output)
        if message.output is None or message.output.finish_reason is not None:
            stream.move(RequestEvent.FINISH, now)
            self._forget_stream(stream)
            if dispatch.handoff is None:
                self._drop(dispatch)
            return  # with a hand-over, Pushed says when nothing is being written any more
        stream.move(RequestEvent.FIRST_TOKEN, now)
        if dispatch.handoff is None:
            stream.move(RequestEvent.COMMIT, now)

    def _pushed(self, dispatch: _Dispatch, message: Pushed) -> None:
        self._prefill_is_done(dispatch)
        dispatch.move(HandoffEvent.PUSHED)
        stream = dispatch.stream
        pair = next((p for p in self._pairs if p.prefill is dispatch.prefill and p.decode is dispatch.decode), None)
        self._metrics.observe_transfer(pair.transport if pair else "", message.nbytes, message.seconds)
        if message.error is not None and not stream.is_final:
            stream.fail(f"KV hand-over failed: {message.error}", FailReason.HANDOFF, self._clock())
            self._forget_stream(stream)
        if stream.is_final:
            self._close(dispatch)
            return
        dispatch.move(HandoffEvent.COMMIT)
        stream.move(RequestEvent.COMMIT, self._clock())
        dispatch.decode.send(Commit(dispatch.id, stream.tokens[0]))

    def _tokens(self, message: Tokens) -> None:
        """The hot path: one call per decode step, one iteration per streamed token."""
        dispatches = self._dispatches
        for output in message.outputs:
            dispatch = dispatches.get(output.dispatch)
            if dispatch is None or dispatch.stream.is_final:
                self.num_late_messages += 1
                continue
            stream = dispatch.stream
            stream.deliver(output)
            if output.finish_reason is not None:
                stream.move(RequestEvent.FINISH, self._clock())
                self._forget_stream(stream)
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

    def _abort(self, stream: RequestStream) -> None:
        stream.move(RequestEvent.ABORT, self._clock())
        self._end(stream)

    def _end(self, stream: RequestStream) -> None:
        """A stream has ended early: start freeing what workers hold for it."""
        dispatch = self._by_stream.get(stream)
        if dispatch is None:
            self._queue.remove(stream)
            self._ended(stream)
        else:
            self._forget_stream(stream)
            self._close(dispatch)
        self._dispatch_queue()

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

    def _prefill_is_done(self, dispatch: _Dispatch) -> None:
        """Prefill computes and copies nothing of the dispatch any more: it has room for another."""
        if dispatch.has_prefill_part:
            dispatch.has_prefill_part = False
            self._loads[dispatch.prefill.id].prompt_tokens -= len(dispatch.stream.request.prompt)
            self._dispatch_queue()

    def _forget_stream(self, stream: RequestStream) -> None:
        del self._by_stream[stream]
        self._ended(stream)

    def _ended(self, stream: RequestStream) -> None:
        self._metrics.observe_request(stream)
        if not self._queue and not self._by_stream:
            self._emptied.set()

    def _drop(self, dispatch: _Dispatch) -> None:
        """No worker holds anything of it: out of the books."""
        self._prefill_is_done(dispatch)
        del self._dispatches[dispatch.id]
        self._loads[dispatch.decode.id].num_requests -= 1
