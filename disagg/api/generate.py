"""The core that all endpoints share which generate: submit every choice, follow the streams, answer whole or as a stream.

One task serves a request with one choice; with more, one task per choice, all writing to the same response as tokens come.
However it ends, every stream that has not finished is aborted: a client that leaves frees its blocks at once.

What an answer looks like is the endpoint's own matter, its ``Dialect``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import structlog
from aiohttp import web

from disagg.api.answers import json_answer
from disagg.api.choice import Choice
from disagg.api.errors import Failure, failure_of
from disagg.api.services import ARRIVED, KEY_NAME, REQUEST_ID, SERVICES, TRACE, Services
from disagg.api.sse import EventStream
from disagg.api.validate import Work
from disagg.errors import RequestFailedError

log = structlog.get_logger(__name__)


class Dialect(Protocol):
    """How one endpoint writes one answer: whole (``keep`` and then ``whole``) or as events (``write`` and then ``ending``).

    ``keep`` or ``write`` is called for each batch of a choice's tokens with the text that they add, even if that is none; the
    last time with ``choice.finish_reason`` set. All of them are called from one event loop, and do no I/O.
    """

    keepalive: bytes
    """What a stream sends that has been silent for long."""

    def keep(self, choice: Choice, text: str) -> None: ...

    def whole(self) -> dict[str, Any]:
        """The body of the whole answer."""
        ...

    def write(self, choice: Choice, text: str) -> bytes:
        """The events that ``text`` makes: none if there is nothing to say yet. The first ones begin the stream."""
        ...

    def ending(self) -> bytes:
        """The events behind those of the last choice's end; they leave in one write."""
        ...

    def failure(self, failure: Failure, request_id: str) -> bytes:
        """The events that end a stream which cannot go on. It may have said nothing yet."""
        ...


Writer = Callable[[Services, Work, Sequence[Choice]], Dialect]
"""Makes the dialect of one answer. The choices have not begun yet."""


async def serve(http: web.Request, work: Work, writer: Writer) -> web.StreamResponse:
    """Do the ``work`` that an endpoint has read from a body, and answer.

    Raises InvalidRequestError, OverloadedError, UnavailableError or RequestFailedError as long as no event has been sent.
    """
    services = http.app[SERVICES]
    if work.form is not None and services.forms is not None:
        await services.forms.check(work.form)
    choices: list[Choice] = []
    try:
        for index, request in enumerate(work.requests):
            echo = None if work.echo is None else work.echo[index // work.num_drawn]
            stream = services.router.submit(request)
            stream.key_name = http.get(KEY_NAME, "")
            if (trace := http.get(TRACE)) is not None:
                trace.follow(stream)
            choices.append(Choice(index, stream, services.tokenizer, work.options, echo=echo))
        answer = _Answer(services, choices, writer(services, work, choices), arrived=http[ARRIVED])
        return await (answer.stream(http) if work.is_streamed else answer.complete())
    finally:
        for choice in choices:
            if choice.finish_reason is None:
                choice.stream.abort()
                services.metrics.count_finished("error" if choice.has_failed else "abort")


class _Answer:
    def __init__(self, services: Services, choices: list[Choice], dialect: Dialect, *, arrived: float) -> None:
        self._metrics = services.metrics
        self._keepalive_s = services.config.keepalive_s
        self._choices = choices
        self._dialect = dialect
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()

    async def complete(self) -> web.Response:
        async def keep(choice: Choice, text: str) -> None:
            self._dialect.keep(choice, text)

        await self._follow_all(keep)
        return json_answer(self._dialect.whole())

    async def stream(self, http: web.Request) -> web.StreamResponse:
        dialect = self._dialect
        num_open = len(self._choices)
        ending = b""

        async with EventStream(http, keepalive_s=self._keepalive_s, keepalive=dialect.keepalive) as events:

            async def send(choice: Choice, text: str) -> None:
                nonlocal num_open, ending
                written = dialect.write(choice, text)
                if choice.finish_reason is not None:
                    num_open -= 1
                    if num_open == 0:
                        ending = written  # leaves together with what ends the stream
                        return
                if written:
                    await events.send(written)

            try:
                await self._follow_all(send)
            except ConnectionError:
                raise
            except Exception as error:
                if not events.has_begun:
                    raise
                if not isinstance(error, RequestFailedError):
                    log.exception("stream broke", request=http[REQUEST_ID], path=http.path)
                return await events.finish(dialect.failure(failure_of(error), http[REQUEST_ID]))
            return await events.finish(ending + dialect.ending())

    async def _follow_all(self, deliver: Callable[[Choice, str], Awaitable[None]]) -> None:
        if len(self._choices) == 1:
            await self._follow(self._choices[0], deliver)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self._choices:
                    group.create_task(self._follow(choice, deliver))
        except ExceptionGroup as failures:  # a client is told of one failure, whichever choice it was
            raise failures.exceptions[0] from failures

    async def _follow(self, choice: Choice, deliver: Callable[[Choice, str], Awaitable[None]]) -> None:
        """Read one choice's stream to its end, and hand on its text, even if empty, for each batch that arrives."""
        loop, metrics, stream = self._loop, self._metrics, choice.stream
        previous: float | None = None
        try:
            async for outputs in stream:
                now = loop.time()
                if previous is None:
                    metrics.observe_ttft(now - self._arrived)
                else:
                    metrics.observe_itl(now - previous)
                previous = now
                text = choice.push(outputs)
                if choice.finish_reason is not None:
                    if outputs[-1].finish_reason is None:  # a stop string: the worker does not know it
                        stream.stop()
                    break
                await deliver(choice, text)
            else:
                text = choice.close()
        except RequestFailedError:
            choice.has_failed = True
            raise
        metrics.observe_e2e(loop.time() - self._arrived)
        metrics.count_finished(str(choice.finish_reason))
        await deliver(choice, text)
