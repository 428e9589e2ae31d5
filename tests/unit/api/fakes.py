"""A router without workers, and the real application on a real socket around it.

``FakeRouter`` plays a script for each request: batches of tokens, delivered one batch per turn of the loop as the real router
delivers what arrives. Without a script the test holds the stream in its hand and delivers by itself. The vocabulary is the null
model's: an id below 256 is that byte, so tests write text as tokens.
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from disagg.api.app import Services, build_app
from disagg.api.connection import Runner
from disagg.config import ServerConfig
from disagg.messages import TokenLogprobs, TokenOutput
from disagg.model import ModelFiles
from disagg.request import FailReason, FinishReason, Request, RequestEvent
from disagg.stream import RequestStream
from disagg.text.chat_template import load_chat_template
from disagg.text.tokenizer import load_tokenizer

FILES = ModelFiles(kind="null", path=Path("null"), name="null")
TOKENIZER = load_tokenizer(FILES)
(EOS,) = TOKENIZER.eos_token_ids
MODEL = "org/null"
DEADLINE_S = 20.0

Batch = Sequence[TokenOutput]
Script = Callable[[Request], Iterable["Batch | FailReason"]]


def tokens(text: str | bytes, finish: str | None = FinishReason.LENGTH, *, logprobs: bool = False) -> list[TokenOutput]:
    """One output per byte of ``text``; the last carries ``finish``."""
    outputs = []
    for position, byte in enumerate(text.encode() if isinstance(text, str) else text):
        entry = TokenLogprobs(logprob=-0.5 - position, top=[(byte, -0.5 - position), (ord("~"), -9.0)]) if logprobs else None
        outputs.append(TokenOutput(dispatch=0, token=byte, logprobs=entry))
    if finish is not None:
        last = outputs[-1]
        outputs[-1] = TokenOutput(dispatch=0, token=last.token, finish_reason=finish, logprobs=last.logprobs)
    return outputs


def end(token: int = EOS) -> TokenOutput:
    """The output that a stop token makes."""
    return TokenOutput(dispatch=0, token=token, finish_reason=FinishReason.STOP, logprobs=TokenLogprobs(logprob=-0.1, top=[]))


def says(text: str) -> Script:
    """Every request gets ``text``, one token at a time, then end-of-sequence; or less, where its max_tokens end it."""

    def script(request: Request) -> Iterable[Batch]:
        outputs = [*tokens(text, None, logprobs=request.params.num_logprobs is not None), end()]
        limit = request.params.max_tokens
        if limit < len(outputs):
            outputs = tokens(text.encode()[:limit], logprobs=request.params.num_logprobs is not None)
        return ([output] for output in outputs)

    return script


class FakeRouter:
    """Takes every request unless ``refusal`` is set, and plays ``script`` to it."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.refusal: Exception | None = None
        self.accepts = 0  # so many requests are taken before the refusal
        self.num_cached_tokens = 0
        self.streams: list[RequestStream] = []
        self.aborted: list[RequestStream] = []
        self.stopped: list[RequestStream] = []

    def submit(self, request: Request) -> RequestStream:
        if self.refusal is not None and len(self.streams) >= self.accepts:
            raise self.refusal
        stream = RequestStream(request, self._end, 0.0)
        stream.move(RequestEvent.PREFILL, 0.0)
        stream.num_cached_tokens = self.num_cached_tokens
        if request.params.num_prompt_logprobs is not None:
            stream.prompt_logprobs = [
                TokenLogprobs(logprob=-float(i), top=[(token, -float(i)), (ord("~"), -float("inf"))])
                for i, token in enumerate(request.prompt)
            ][1:]
        self.streams.append(stream)
        if request.params.max_tokens == 0:
            stream.move(RequestEvent.FINISH, 0.0)
        elif self.script is not None:
            self._play(stream, iter(self.script(request)))
        return stream

    def _play(self, stream: RequestStream, script: Any) -> None:
        step = next(script, None)
        if stream.is_final or step is None:
            return
        if isinstance(step, FailReason):
            stream.fail("a worker was lost", step, 0.0)
            return
        self.deliver(stream, *step)
        asyncio.get_running_loop().call_soon(self._play, stream, script)

    def deliver(self, stream: RequestStream, *outputs: TokenOutput) -> None:
        for output in outputs:
            stream.deliver(output)
        if outputs and outputs[-1].finish_reason is not None:
            stream.move(RequestEvent.FINISH, 0.0)

    def _end(self, stream: RequestStream, event: RequestEvent) -> None:
        stream.move(event, 0.0)
        (self.aborted if event is RequestEvent.ABORT else self.stopped).append(stream)


@dataclass
class FakeMetrics:
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    requests: list[tuple[str, int]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    def observe_ttft(self, seconds: float) -> None:
        self.ttft.append(seconds)

    def observe_itl(self, seconds: float) -> None:
        self.itl.append(seconds)

    def observe_e2e(self, seconds: float) -> None:
        self.e2e.append(seconds)

    def count_request(self, route: str, code: int) -> None:
        self.requests.append((route, code))

    def count_finished(self, reason: str) -> None:
        self.finished.append(reason)


def make_services(router: FakeRouter, **changes: Any) -> Services:
    fields: dict[str, Any] = {
        "router": router,
        "tokenizer": TOKENIZER,
        "chat_template": load_chat_template(FILES, TOKENIZER),
        "model_name": MODEL,
        "max_model_len": 256,
        "vocab_size": TOKENIZER.vocab_size,
        "created": 1_700_000_000,
        "config": ServerConfig(max_body_bytes=1 << 20, keepalive_s=60.0),
        "registry": CollectorRegistry(),
        "status": lambda: {"run_id": "r1"},
        "not_ready": list,
        "metrics": FakeMetrics(),
    }
    return Services(**(fields | changes))


class Client:
    """Speaks HTTP to the application, and knows how to read its streams."""

    def __init__(self, http: aiohttp.ClientSession, services: Services, address: tuple[str, int]) -> None:
        self.http = http
        self.address = address
        self.url = "http://{}:{}".format(*address)
        self.services = services

    @property
    def metrics(self) -> FakeMetrics:
        return self.services.metrics

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], Any]:
        """(status, headers, JSON) of a whole answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(path, data=data, headers=headers) as response:
            return response.status, response.headers, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(path) as response:
            return response.status, await response.json()

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, _, answer = await self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    async def chat(self, **body: Any) -> dict[str, Any]:
        status, _, answer = await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body})
        assert status == 200, answer
        return answer

    async def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error object of an answer that must have ``status``."""
        got, _, answer = await self.post(path, body)
        assert got == status, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert 0 < len(answer["error"]["message"]) <= 300
        return answer["error"]

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, parsed, checked for their framing and their end; ``[DONE]`` is left out."""
        async with self.http.post(path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            text = (await response.read()).decode()
        return parse_events(text)

    async def complete_events(self, **body: Any) -> list[Any]:
        return await self.events("/v1/completions", **body)

    async def chat_events(self, **body: Any) -> list[Any]:
        return await self.events("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **body)


def parse_events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    assert lines.count("data: [DONE]") == 1
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@asynccontextmanager
async def serving(router: FakeRouter, **changes: Any) -> AsyncIterator[Client]:
    """The application as ``serve`` runs it, on 127.0.0.1 and a free port."""
    services = make_services(router, **changes)
    runner = Runner(build_app(services), keepalive_timeout=120.0, shutdown_timeout=1.0)
    await runner.setup()
    try:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # connections inherit it: slow readers show soon
        await web.SockSite(runner, listener).start()
        address = listener.getsockname()
        async with aiohttp.ClientSession("http://{}:{}".format(*address)) as http:
            yield Client(http, services, address)
    finally:
        await runner.cleanup()
    assert all(stream.is_final for stream in router.streams), "a stream was left behind"


async def until(condition: Callable[[], bool]) -> None:
    """Wait for ``condition``, turning the loop; the test's deadline bounds it."""
    while not condition():  # noqa: ASYNC110 - the fakes have no event for each condition a test may have
        await asyncio.sleep(0)


def async_test(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own, with a deadline."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run
