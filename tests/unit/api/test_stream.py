"""Streams: framing, order, failures, silence, slow and vanished clients."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest

from disagg.api.sse import event, json_text
from disagg.config import ServerConfig
from disagg.request import FailReason, Request, RequestEvent
from tests.unit.api.fakes import FakeRouter, async_test, end, parse_events, says, serving, tokens, until

COMPLETION = {"prompt": "x", "stream": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices)


@async_test
async def test_a_completion_stream_is_the_whole_answer_in_pieces() -> None:
    """Pieces add up to the text; one id, created and model; the only finish reason is in the last chunk."""
    async with serving(FakeRouter(says("wörld"))) as client:
        events = await client.complete_events(prompt="x")
    assert text_of(events) == "wörld"
    assert [event["choices"][0]["text"] for event in events] == ["w", "ö", "r", "l", "d", ""]
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 5 + ["stop"]
    assert all("usage" not in event for event in events)


@async_test
async def test_a_chat_stream_begins_with_the_role() -> None:
    """The first chunk of each choice carries the role alone; exactly one chunk per choice has a finish reason."""
    async with serving(FakeRouter(says("hey"))) as client:
        events = await client.chat_events(n=2)
    for index in (0, 1):
        chunks = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in chunk["delta"] for chunk in chunks[1:])
        assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["stop"]
        assert chunks[-1]["finish_reason"] == "stop"
        assert text_of(events, index) == "hey"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


@async_test
async def test_an_answer_of_one_token_is_complete() -> None:
    """max_tokens 1: role, the token with its finish reason, usage, end."""
    async with serving(FakeRouter(says("hey"))) as client:
        role, token, usage = await client.chat_events(max_tokens=1, stream_options={"include_usage": True})
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (token["choices"][0]["delta"], token["choices"][0]["finish_reason"]) == ({"content": "h"}, "length")
    assert usage["usage"]["completion_tokens"] == 1


@async_test
async def test_choices_interleave_as_their_tokens_come() -> None:
    """A choice that is slow does not hold back another."""
    router = FakeRouter()
    async with serving(router) as client:
        request = asyncio.create_task(client.http.post("/v1/completions", json={**COMPLETION, "n": 2}))
        await until(lambda: len(router.streams) == 2)
        slow, fast = router.streams
        router.deliver(fast, *tokens("fast"))
        async with await request as response:
            first = await response.content.readuntil(b"\n\n")
            assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == "fast"
            router.deliver(slow, *tokens("slow"))
            rest = parse_events((await response.read()).decode())
    assert [event["choices"][0]["text"] for event in rest] == ["slow"]


@async_test
async def test_usage_comes_last_and_only_on_demand() -> None:
    """include_usage: null in every chunk, then a chunk without choices; continuous_usage_stats: running in every chunk."""
    async with serving(FakeRouter(says("ab"))) as client:
        events = await client.complete_events(prompt="xyz", n=2, stream_options={"include_usage": True})
        running = await client.chat_events(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert (events[-1]["usage"]["prompt_tokens"], events[-1]["usage"]["completion_tokens"]) == (3, 6)
    assert [event["usage"]["completion_tokens"] for event in running] == [1, 1, 2, 3, 3]
    assert running[-1]["choices"] == []


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@async_test
async def test_the_end_leaves_in_one_write(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk, usage, [DONE] and the end of the body are one write to the transport."""
    writes: list[bytes] = []
    original = asyncio.selector_events._SelectorSocketTransport.write

    def write(transport: Any, data: bytes) -> None:
        writes.append(bytes(data))
        original(transport, data)

    monkeypatch.setattr(asyncio.selector_events._SelectorSocketTransport, "write", write)
    async with serving(FakeRouter(says("ab"))) as client:
        await client.events(path, **body, stream_options={"include_usage": True})
    (last,) = [data for data in writes if b"[DONE]" in data]
    assert last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b'"finish_reason":"stop"' in last
    assert b'"choices":[]' in last


@async_test
async def test_closing_at_done_is_no_abort() -> None:
    """Official clients close the socket when they read [DONE]: the request has finished and nothing is aborted."""
    router = FakeRouter(says("ab"))
    async with serving(router) as client:
        async with client.http.post("/v1/completions", json=COMPLETION) as response:
            await response.content.readuntil(b"data: [DONE]\n\n")
            response.close()
        await until(lambda: bool(client.metrics.requests))
    assert router.aborted == []
    assert client.metrics.finished == ["stop"]
    assert client.metrics.requests == [("/v1/completions", 200)]


@async_test
async def test_headers_let_streams_through_proxies() -> None:
    """No caching, no buffering, the client's request id."""
    async with (
        serving(FakeRouter(says("ab"))) as client,
        client.http.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "mine-1"}) as response,
    ):
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["X-Request-Id"] == "mine-1"


@async_test
async def test_the_role_comes_with_the_first_token_even_without_text() -> None:
    """A first token that is part of a character still begins a chat stream; before it nothing is sent."""
    router = FakeRouter()
    first, second = tokens("ö", None)
    async with serving(router) as client:
        request = asyncio.create_task(client.http.post("/v1/chat/completions", json=CHAT))
        await until(lambda: bool(router.streams))
        assert not request.done()
        router.deliver(router.streams[0], first)
        async with await request as response:
            opening = await response.content.readuntil(b"\n\n")
            assert json.loads(opening.removeprefix(b"data: "))["choices"][0]["delta"]["role"] == "assistant"
            router.deliver(router.streams[0], second, end())
            events = parse_events((await response.read()).decode())
    assert text_of(events) == "ö"


@pytest.mark.parametrize(
    ("reason", "status", "header"),
    [
        (FailReason.WORKER_DIED, 503, ("Retry-After", "1")),
        (FailReason.TIMEOUT, 503, ("Retry-After", "1")),
        (FailReason.NO_BLOCKS, 503, ("Retry-After", "1")),
        (FailReason.SHUTDOWN, 503, ("Retry-After", "1")),
        (FailReason.HANDOFF, 500, ("x-should-retry", "false")),
    ],
)
@pytest.mark.parametrize("extra", [{}, {"stream": True}, {"stream": True, "n": 3}])
@async_test
async def test_failure_before_the_first_token_is_a_status(
    reason: FailReason, status: int, header: tuple[str, str], extra: dict[str, Any]
) -> None:
    """Streamed or not: the real HTTP status, in JSON, with what the client may do about it."""
    async with serving(FakeRouter(lambda request: [reason])) as client:
        got, headers, body = await client.post("/v1/completions", {"prompt": "x", **extra})
    assert (got, headers[header[0]], body["error"]["code"]) == (status, header[1], reason)
    assert body["error"]["type"] == "server_error"
    assert client.metrics.requests == [("/v1/completions", status)]
    assert "error" in client.metrics.finished


@pytest.mark.parametrize("n", [1, 2])
@async_test
async def test_failure_after_the_first_token_is_an_event(n: int) -> None:
    """What was sent stays, then one error event, then [DONE]; other choices of the request are aborted."""

    def script(request: Request) -> list[Any]:
        return [tokens("a", None), FailReason.WORKER_DIED] if request.id.endswith("-0") else [tokens("b", None)]

    router = FakeRouter(script)
    async with serving(router) as client:
        *events, failure = await client.complete_events(prompt="x", n=n)
    assert text_of(events) == "a"
    assert failure == {"error": {"message": "a worker was lost", "type": "server_error", "param": None, "code": "worker_died"}}
    assert router.aborted == router.streams[1:]


@async_test
async def test_a_bug_in_one_stream_is_an_event_and_hurts_no_other() -> None:
    """An unforeseen exception after the first token still ends in an error event and [DONE], and tells nothing of the inside."""
    router = FakeRouter()
    async with serving(router) as client:
        requests = [asyncio.create_task(client.complete_events(prompt="x")) for _ in range(2)]
        await until(lambda: len(router.streams) == 2)
        broken, healthy = router.streams
        router.deliver(broken, *tokens("a", None))
        router.deliver(healthy, *tokens("a", None))
        await until(lambda: len(client.metrics.ttft) == 2)
        broken.move(RequestEvent.FINISH, 0.0)  # it ends without saying why: a bug of the router's
        router.deliver(healthy, *tokens("b"))
        answers = [await request for request in requests]
    (failed,) = [answer for answer in answers if "error" in answer[-1]]
    (whole,) = [answer for answer in answers if "error" not in answer[-1]]
    assert failed[-1]["error"]["message"] == "internal error"
    assert text_of(failed[:-1]) == "a"
    assert text_of(whole) == "ab"


@async_test
async def test_a_silent_stream_is_kept_alive() -> None:
    """After keepalive_s of silence a comment is sent, before the first token too; a failure is then an event."""
    router = FakeRouter()
    config = ServerConfig(keepalive_s=0.01)
    async with (
        serving(router, config=config) as client,
        client.http.post("/v1/chat/completions", json=CHAT) as response,
    ):
        for _ in range(2):
            assert await response.content.readuntil(b"\n\n") == b": keepalive\n\n"
        router.streams[0].fail("lost", FailReason.WORKER_DIED, 0.0)
        rest = await response.read()
    assert rest.replace(b": keepalive\n\n", b"").startswith(b'data: {"error"')
    assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}, {"stream": True, "n": 3}, {"n": 3}])
@pytest.mark.parametrize("after_tokens", [0, 1])
@async_test
async def test_a_client_that_leaves_frees_everything(body: dict[str, Any], after_tokens: int) -> None:
    """Before or after the first token, streamed or not: every stream of the request is aborted."""
    router = FakeRouter()
    async with serving(router) as client:
        async with aiohttp.ClientSession(client.url) as leaving:
            request = asyncio.create_task(leaving.post("/v1/completions", json={"prompt": "x", **body}))
            await until(lambda: len(router.streams) == body.get("n", 1))
            for stream in router.streams[:after_tokens]:
                router.deliver(stream, *tokens("a", None))
            if after_tokens and body.get("stream"):
                (await request).close()
            request.cancel()
        await until(lambda: len(router.aborted) == len(router.streams))
        await until(lambda: bool(client.metrics.requests))
    assert client.metrics.finished == ["abort"] * len(router.streams)


@async_test
async def test_one_clients_leaving_ends_no_other_stream() -> None:
    """Two clients use the same X-Request-Id: one leaves, the other's stream goes on to its end."""
    router = FakeRouter()
    headers = {"X-Request-Id": "same"}
    async with serving(router) as client:
        leaving = asyncio.create_task(client.http.post("/v1/completions", json=COMPLETION, headers=headers))
        await until(lambda: len(router.streams) == 1)
        staying = asyncio.create_task(client.http.post("/v1/completions", json=COMPLETION, headers=headers))
        await until(lambda: len(router.streams) == 2)
        leaving.cancel()
        await until(lambda: bool(router.aborted))
        router.deliver(router.streams[1], *tokens("stays"))
        async with await staying as response:
            events = parse_events((await response.read()).decode())
    assert text_of(events) == "stays"
    assert router.aborted == router.streams[:1]


@async_test
async def test_a_slow_reader_is_held_to_bounded_memory_and_loses_nothing() -> None:
    """While a client does not read, its handler waits and another stream runs to its end; later it gets everything."""
    num_tokens = 6000

    def script(request: Request) -> list[Any]:
        return [[output] for output in tokens("s" * num_tokens, logprobs=request.params.num_logprobs is not None)]

    router = FakeRouter()
    async with serving(router, max_model_len=2 * num_tokens) as client:
        body = json.dumps({**COMPLETION, "max_tokens": num_tokens, "logprobs": 1, "return_token_ids": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, client.address)
            await loop.sock_sendall(slow, head + body)
            await until(lambda: bool(router.streams))
            router.script = script
            router._play(router.streams[0], iter(script(router.streams[0].request)))
            assert text_of(await client.complete_events(prompt="x", max_tokens=num_tokens)) == "s" * num_tokens
            await until(lambda: router.streams[0].is_final)
            num_read_by_both = 1 + len(client.metrics.itl)
            assert num_read_by_both < 2 * num_tokens - 1000, "the slow reader's handler did not wait"
            received = b""
            while data := await loop.sock_recv(slow, 1 << 20):
                received += data
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    events = [json.loads(line.removeprefix(b"data: ")) for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert text_of(events) == "s" * num_tokens


@pytest.mark.parametrize("text", ["plain", 'quo"te\n', "ö\u2028\u2029\x85\x0b\x1c", "\ue000text\ue000", "🦙"])
def test_events_hold_no_line_end_of_any_kind(text: str) -> None:
    """Clients that split at Unicode line ends see one line per event, and JSON gives the text back."""
    for encoded in (json_text(text), event({"t": text}).removeprefix(b"data: ").removesuffix(b"\n\n")):
        assert len(encoded.decode().splitlines()) == 1
        assert json.loads(encoded) in (text, {"t": text})
