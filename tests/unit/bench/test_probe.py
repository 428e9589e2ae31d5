"""The probe against small servers, each with a habit that must not falsify what it finds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench import probe

Serve = Callable[[web.Request, web.StreamResponse, dict[str, Any]], Any]


@asynccontextmanager
async def client(serve: Serve) -> AsyncIterator[probe.Probe]:
    """A probe of a server that answers every completion with what ``serve`` writes."""

    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await serve(request, response, await request.json())
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            yield probe.Probe(session, f"http://127.0.0.1:{runner.addresses[0][1]}", "some-model")
    finally:
        await runner.cleanup()


async def send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def chunk(completion_tokens: int | None = None) -> dict[str, Any]:
    usage = {"completion_tokens": completion_tokens} if completion_tokens else None
    return {"choices": [{"text": "x", "finish_reason": None}], "usage": usage}


async def in_pairs(request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
    """Two tokens in each event, and a count only at the end."""
    await response.prepare(request)
    for _ in range(body["max_tokens"] // 2):
        await send(response, chunk())
        await asyncio.sleep(0)
    await send(response, {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})


async def test_tokens_are_counted_where_events_hold_several() -> None:
    """A server that tells only at the end how many tokens its events held: the count is its own, not that of events."""
    async with client(in_pairs) as server:
        stream = await server.stream(32, 20)
        found = await server.decode(1, 20)
    assert stream.arrivals[-1][1] == 20
    assert found["tokens_per_event"] == 2


async def test_a_prompt_is_as_long_as_asked_for_and_never_the_same() -> None:
    """Every request has fresh token ids: two prompts share nothing that a prefix cache could keep."""
    prompts: list[list[int]] = []

    async def remember(request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        prompts.append(body["prompt"])
        await in_pairs(request, response, body)

    async with client(remember) as server:
        await server.prefill(100)
        await server.prefill(100)
    assert [len(prompt) for prompt in prompts] == [100, 100]
    assert prompts[0][:16] != prompts[1][:16]


async def test_an_error_in_the_stream_is_an_error() -> None:
    """An error event ends the measurement: tokens that never came are no figure."""

    async def fail(request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.prepare(request)
        await send(response, chunk())
        await send(response, {"error": {"message": "out of blocks"}})

    async with client(fail) as server:
        with pytest.raises(RuntimeError, match="out of blocks"):
            await server.stream(32, 20)


async def test_a_connection_closed_before_the_answer_is_tried_again() -> None:
    """Some servers close connections early: the request is repeated and the retry told."""
    attempts: list[int] = []

    async def close_first(request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            assert request.transport is not None
            request.transport.abort()
        else:
            await in_pairs(request, response, body)

    async with client(close_first) as server:
        stream = await server.stream(32, 20)
    assert (len(attempts), server.retries, stream.arrivals[-1][1]) == (2, 1, 20)


async def test_streams_beside_long_prompts_are_measured_until_the_last_of_these_ends() -> None:
    """Streams run until then, however many tokens that takes, and their stall while a long prompt is computed is seen."""
    is_free = asyncio.Event()
    is_free.set()

    async def stall(request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.prepare(request)
        if len(body["prompt"]) > 1000:  # nobody else gets a token meanwhile
            is_free.clear()
            await asyncio.sleep(0.1)
            is_free.set()
        for count in range(1, body["max_tokens"] + 1):
            await is_free.wait()
            await send(response, chunk(count))
            await asyncio.sleep(0.001)

    async with client(stall) as server:
        found = await server.interference(num_streams=2, long_prompt=3000, arrivals=2)
    assert found["itl_max_ms"] > 90  # type: ignore[operator]
    assert found["itl_p50_ms"] < found["itl_max_ms"]  # type: ignore[operator]
    assert found["long_ttft_s"] >= 0.1  # type: ignore[operator]


async def test_a_stream_that_ends_too_early_is_refused() -> None:
    """Were a server to cut the streams beside the long prompts short, its window would look calm."""

    has_long_prompt = asyncio.Event()

    async def cut(request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.prepare(request)
        if len(body["prompt"]) > 1000:
            has_long_prompt.set()
            await asyncio.sleep(60)  # until its client gives up
        for count in range(1, 11):
            await send(response, chunk(count))
        await has_long_prompt.wait()

    async with client(cut) as server:
        with pytest.raises(ExceptionGroup) as caught:
            await server.interference(num_streams=1, long_prompt=3000, arrivals=1)
    assert caught.group_contains(RuntimeError, match="ended before")
