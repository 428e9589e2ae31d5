"""The core that both endpoints share: submit every choice, follow the streams, answer whole or as a stream.

One task serves a request with one choice; with more, one task per choice, all writing to the same response as tokens come.
However it ends, every stream that has not finished is aborted: a client that leaves frees its blocks at once.

A stream of 256 clients passes here for every token of each of them, so a chunk's JSON is made once per choice and only the
text is encoded per token; what is rarer (log-probabilities, token ids, running usage) takes the plain way through a dict.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web

from disagg.api.answers import json_answer
from disagg.api.choice import Choice, LoggedToken
from disagg.api.errors import failure_of
from disagg.api.read import read
from disagg.api.services import ARRIVED, KEY_NAME, REQUEST_ID, SERVICES, Services
from disagg.api.sse import EventStream, event, json_text
from disagg.api.validate import Work
from disagg.errors import RequestFailedError
from disagg.lifetime import timings
from disagg.text.tokenizer import Tokenizer

log = structlog.get_logger(__name__)

_MARK = "\ue000text\ue000"
"""Stands for the text where a chunk is cut into head and tail: private-use characters, so no model's name holds it."""


Calls = Sequence[dict[str, Any]]
"""What is told of tool calls (``disagg.api.tools``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one endpoint writes what the core produced: an answer's ``choices[i]`` and a chunk's."""

    object: str
    chunk_object: str
    whole: Callable[[str, Calls], dict[str, Any]]  # the complete text and tool calls
    piece: Callable[[str, Calls], dict[str, Any]]  # a part of them
    opening: dict[str, Any] | None  # what a choice's stream begins with
    logprobs: Callable[[Tokenizer, Sequence[LoggedToken], int], dict[str, Any]]  # the int: how many of the best
    has_prompt_ids_in_choice: bool  # return_token_ids: prompt_token_ids in each choice, or beside them


async def serve(http: web.Request, plan: Callable[[bytes, Services], Work], shape: Shape) -> web.StreamResponse:
    """Read the body, ``plan`` its requests, and answer.

    Raises InvalidRequestError, OverloadedError, UnavailableError or RequestFailedError as long as no event has been sent.
    """
    work = await read(http, plan)
    if work.form is not None and (checker := http.app[SERVICES].forms) is not None:
        await checker.check(work.form)
    return await _generate(http, work, shape)


async def _generate(http: web.Request, work: Work, shape: Shape) -> web.StreamResponse:
    services = http.app[SERVICES]
    choices: list[Choice] = []
    try:
        for index, request in enumerate(work.requests):
            echo = None if work.echo is None else work.echo[index // work.num_drawn]
            stream = services.router.submit(request)
            stream.key_name = http.get(KEY_NAME, "")
            choices.append(Choice(index, stream, services.tokenizer, work.options, echo=echo))
        answer = _Answer(services, work, shape, choices, arrived=http[ARRIVED])
        return await (answer.stream(http) if work.is_streamed else answer.complete())
    finally:
        for choice in choices:
            if choice.finish_reason is None:
                choice.stream.abort()
                services.metrics.count_finished("error" if choice.has_failed else "abort")


class _Answer:
    def __init__(self, services: Services, work: Work, shape: Shape, choices: list[Choice], *, arrived: float) -> None:
        self._services = services
        self._metrics = services.metrics
        self._work = work
        self._shape = shape
        self._choices = choices
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()
        self._created = int(time.time())

    async def complete(self) -> web.Response:
        texts: list[list[str]] = [[] for _ in self._choices]

        async def keep(choice: Choice, text: str) -> None:
            texts[choice.index].append(text)

        await self._follow_all(keep)
        body = self.body(
            self._shape.object,
            [
                {"index": index, **self._shape.whole("".join(texts[choice.index]), choice.take_calls()), **self._details(choice)}
                for index, choice in enumerate(self._best())
            ],
        )
        self.add_prompt_ids(body)
        self._add_timings(body, self._choices[0])
        body["usage"] = self._usage()
        return json_answer(body)

    def _best(self) -> list[Choice]:
        """The choices to answer with: of each prompt the ``n`` with the highest log-probability per token, best first."""
        num_drawn, n = self._work.num_drawn, self._work.n
        if num_drawn == n:
            return self._choices
        groups = [self._choices[start : start + num_drawn] for start in range(0, len(self._choices), num_drawn)]
        ranked = [sorted(group, key=lambda choice: -choice.logprob / max(choice.num_tokens, 1)) for group in groups]
        return [choice for group in ranked for choice in group[:n]]

    async def stream(self, http: web.Request) -> web.StreamResponse:
        writers = [_ChunkWriter(self, choice) for choice in self._choices]
        num_open = len(writers)
        ending = b""

        async with EventStream(http, keepalive_s=self._services.config.keepalive_s) as events:

            async def send(choice: Choice, text: str) -> None:
                nonlocal num_open, ending
                chunks = writers[choice.index].write(text)
                if choice.finish_reason is not None:
                    num_open -= 1
                    if num_open == 0:
                        ending = chunks  # leaves together with what ends the stream
                        return
                if chunks:
                    await events.send(chunks)

            try:
                await self._follow_all(send)
            except ConnectionError:
                raise
            except Exception as error:
                if not events.has_begun:
                    raise
                if not isinstance(error, RequestFailedError):
                    log.exception("stream broke", request=http[REQUEST_ID], path=http.path)
                return await events.finish(event(failure_of(error).body()))
            if self._work.include_usage:
                ending += event({**self.body(self._shape.chunk_object, []), "usage": self._usage()})
            return await events.finish(ending)

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

    def body(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._work.id,
            "object": object,
            "created": self._created,
            "model": self._services.model_name,
            "choices": choices,
        }

    def chunk(self, choice: Choice, text: str, calls: Calls = ()) -> dict[str, Any]:
        entry = {"index": choice.index, **self._shape.piece(text, calls), **self._details(choice)}
        body = self.body(self._shape.chunk_object, [entry])
        if choice.finish_reason is not None:
            self._add_timings(body, choice)
        return self._with_usage(body)

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk that a choice begins with, where the endpoint has one."""
        if self._shape.opening is None:
            return None
        entry = {"index": choice.index, **self._shape.opening, "logprobs": None, "finish_reason": None}
        return self._with_usage(self.body(self._shape.chunk_object, [entry]))

    def add_prompt_ids(self, body: dict[str, Any]) -> None:
        """``return_token_ids`` also gives the prompt: once in an answer, and in the first chunk of each choice."""
        if not self._work.options.return_token_ids:
            return
        for entry in body["choices"]:
            first = entry["index"] // self._work.n * self._work.num_drawn  # of the same prompt
            place = entry if self._shape.has_prompt_ids_in_choice else body
            place["prompt_token_ids"] = self._choices[first].stream.request.prompt

    def _add_timings(self, body: dict[str, Any], choice: Choice) -> None:
        """Where the time went, for a client that asked; it has only one choice then."""
        if self._work.has_timings:
            body["timings"] = timings(choice.stream, choice.num_tokens)

    @property
    def has_plain_chunks(self) -> bool:
        """Whether chunks differ in nothing but their text."""
        work = self._work
        return not (work.continuous_usage or work.options.return_token_ids or work.num_logprobs is not None)

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._work.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._work.include_usage:
            chunk["usage"] = None
        return chunk

    def _details(self, choice: Choice) -> dict[str, Any]:
        """The fields that stand beside a choice's text, in answers and chunks alike."""
        num_top = self._work.num_logprobs
        details: dict[str, Any] = {
            "logprobs": None
            if num_top is None
            else self._shape.logprobs(self._services.tokenizer, choice.take_logged(), num_top),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._work.options.return_token_ids:
            details["token_ids"] = choice.take_token_ids()
        return details

    def _usage(self) -> dict[str, Any]:
        """Each prompt counts once, whatever n is; its cached tokens are those its first choice found."""
        firsts = [choice.stream for choice in self._choices[:: self._work.num_drawn]]
        num_prompt = sum(len(stream.request.prompt) for stream in firsts)
        num_generated = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens for stream in firsts)},
        }


class _ChunkWriter:
    """The events of one choice. Between its first and its last they are head + text + tail wherever that is all that changes."""

    def __init__(self, answer: _Answer, choice: Choice) -> None:
        self._answer = answer
        self._choice = choice
        self._has_begun = False
        self._is_plain = answer.has_plain_chunks
        if self._is_plain:
            self._head, _, self._tail = event(answer.chunk(choice, _MARK)).partition(json_text(_MARK))

    def write(self, text: str) -> bytes:
        """The events that ``text`` makes: none if there is nothing to say yet."""
        calls = self._choice.take_calls()
        if self._has_begun and self._is_plain and self._choice.finish_reason is None and not calls:
            return self._head + json_text(text) + self._tail if text else b""
        events = b""
        has_begun, self._has_begun = self._has_begun, True
        if not has_begun and (opening := self._answer.opening(self._choice)) is not None:
            self._answer.add_prompt_ids(opening)
            events = event(opening)
        if text or calls or self._choice.finish_reason is not None or not self._is_plain:
            chunk = self._answer.chunk(self._choice, text, calls)
            if not has_begun and not events:
                self._answer.add_prompt_ids(chunk)
            events += event(chunk)
        return events
