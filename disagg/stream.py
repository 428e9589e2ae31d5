"""What a client of the router holds: one request's tokens as they come, its end, and the way to give it up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from disagg.errors import RequestFailedError
from disagg.messages import TokenLogprobs, TokenOutput
from disagg.request import REQUEST_TABLE, FailReason, FinishReason, Request, RequestEvent, RequestState, SamplingParams, advance


@dataclass(slots=True)
class Attempt:
    """Which workers were to serve a request, and why it had to begin again if it had to."""

    prefill: str
    decode: str
    lost_for: FailReason | None = None


class RequestStream:
    """Iterate it for lists of the outputs that have arrived; the last output carries a finish reason.

    Iterating raises RequestFailedError when the request cannot be finished. After ``abort`` it simply ends.
    ``num_cached_tokens`` and ``prompt_logprobs`` are valid from the first outputs (or the end) on.
    """

    def __init__(self, request: Request, on_end: Callable[[RequestStream, RequestEvent], None], now: float) -> None:
        self.request = request
        self.state = RequestState.QUEUED
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.tokens: list[int] = []  # generated so far
        self.entered = [(RequestState.QUEUED, now)]  # every state it has been in, and since when
        self.rank = (request.priority, 0)  # who waits goes first whose is lower; the router puts in when it came
        self.key_name = ""  # whose API key it came with, for the log
        self.trace_id = ""  # in hexadecimal, where requests are traced
        self.attempts: list[Attempt] = []
        self.first_decodes_s: list[float] = []  # of each attempt that came so far: seconds from its commit to its next token
        self.finish_reason: str | None = None  # a FinishReason, once it has finished
        self.error: RequestFailedError | None = None  # why it has failed
        self._on_end = on_end
        self._arrived: list[TokenOutput] = []
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"RequestStream({self.request.id}, {self.state}, {len(self.tokens)} tokens)"

    @property
    def is_final(self) -> bool:
        return not REQUEST_TABLE[self.state]

    @property
    def num_attempts(self) -> int:
        return len(self.attempts)

    @property
    def all_tokens(self) -> list[int]:
        """Prompt and generated tokens: what a next attempt has to compute."""
        return self.request.prompt + self.tokens

    @property
    def params(self) -> SamplingParams:
        """The request's, less what an attempt that begins after the first token need not do again."""
        params = self.request.params
        if self.tokens and params.num_prompt_logprobs is not None:
            return msgspec.structs.replace(params, num_prompt_logprobs=None)
        return params

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenOutput]:
        while not self._arrived:
            if self.error is not None:
                raise self.error
            if self.is_final:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived, self._arrived = self._arrived, []
        return arrived

    def abort(self, cause: str = "") -> None:
        """Free everything everywhere: the client is gone, or is told ``cause``. Harmless when the request has ended."""
        if not self.is_final:
            if cause:
                self.error = RequestFailedError(cause, reason=FailReason.ABORTED)
            self._on_end(self, RequestEvent.ABORT)

    def stop(self) -> None:
        """The answer is complete, which the worker cannot know (a stop string). Harmless when the request has ended."""
        if not self.is_final:
            self.finish_reason = FinishReason.STOP
            self._on_end(self, RequestEvent.FINISH)

    # ---------------------------------------------------------------- the router's side

    def move(self, event: RequestEvent, now: float) -> None:
        self.state = advance(REQUEST_TABLE, self.state, event)
        self.entered.append((self.state, now))
        if self.is_final:
            self._wake()

    def deliver(self, output: TokenOutput) -> None:
        self.tokens.append(output.token)
        self._arrived.append(output)
        self._wake()

    def fail(self, message: str, reason: FailReason, now: float) -> None:
        self.error = RequestFailedError(message, reason=reason)
        self.move(RequestEvent.FAIL, now)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
