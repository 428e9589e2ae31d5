"""disagg.api.connection: what is no HTTP is refused in JSON as well, quietly, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from disagg.api import read
from tests.unit.api.fakes import Client, FakeRouter, async_test, says, serving, tokens, until

_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
_BODY = b'{"prompt": "a", "max_tokens": 2}'


async def spoken(client: Client, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of the first answer to what is sent; each part after the one before it has been taken in."""
    reader, writer = await asyncio.open_connection(*client.address)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            for _ in range(20):
                await asyncio.sleep(0)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    finally:
        writer.close()


MALFORMED = {
    "no request line": [b"\r\n\r\nnonsense\r\n\r\n"],
    "nothing but zeros": [b"\0" * 50 + b"\r\n\r\n"],
    "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100],
    "an unknown method": [b"BREW /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"],
    "an unknown version": [b"GET /livez HTTP/9.9\r\nHost: x\r\n\r\n"],
    "a header without a colon": [b"GET /livez HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n"],
    "a header's name with a space": [b"GET /livez HTTP/1.1\r\nHo st: x\r\n\r\n"],
    "a length below nothing": [_HEAD + b"Content-Length: -1\r\n\r\n{}"],
    "a length that is no number": [_HEAD + b"Content-Length: 1x\r\n\r\n{}"],
    "two lengths": [_HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x"],
    "a length and chunks": [_HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
    "a chunk whose size is no number": [_CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n"],
    "garbage right behind a request": [b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGARBAGE\x00\x01\r\n\r\n"],
}


@pytest.mark.parametrize("parts", MALFORMED.values(), ids=MALFORMED)
@async_test
async def test_what_is_no_http_is_refused_in_json(parts: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    """400 in OpenAI's envelope with a request id; nothing of what was sent; no stack trace, not in the log either."""
    router = FakeRouter(says("ab"))
    with caplog.at_level(logging.INFO):
        async with serving(router) as client:
            status, headers, body = await spoken(client, *parts)
            answer = await client.complete(prompt="a", max_tokens=2)
    error = json.loads(body)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert set(error) == {"message", "type", "param", "code"}
    assert len(headers["x-request-id"]) == 32
    assert "Traceback" not in body.decode()
    assert "b'" not in error["message"]
    assert caplog.records == []
    assert answer["choices"][0]["text"] == "ab"
    assert [code for _, code in client.metrics.requests] == [400, 200]


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /livez HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n" + b"".join(b"X%d: a\r\n" % i for i in range(1000)) + b"\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["one", "many", "path"],
)
@async_test
async def test_headers_that_are_too_large_are_a_431(raw: bytes) -> None:
    """One header, all together, or the path: refused with a sentence that says what to do, and none of it is sent back."""
    async with serving(FakeRouter()) as client:
        status, _, body = await spoken(client, raw)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (431, "headers_too_large")
    assert "aaa" not in error["message"]


@async_test
async def test_http_1_0_is_served() -> None:
    """By a client that knows no Host: header and no keep-alive: the whole answer, then the end of the connection."""
    async with serving(FakeRouter(says("ab"))) as client:
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(_BODY)
        status, _, body = await spoken(client, head + _BODY)
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, "ab")


@async_test
async def test_garbage_behind_a_running_stream_waits_for_its_end() -> None:
    """The stream on the same connection ends as it should; the refusal comes after it and closes the connection."""
    router = FakeRouter()
    async with serving(router) as client:
        body = b'{"prompt": "a", "max_tokens": 2, "stream": true}'
        reader, writer = await asyncio.open_connection(*client.address)
        writer.write(_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: bool(router.streams))
        writer.write(b"GARBAGE\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0)
        router.deliver(router.streams[0], *tokens("ab"))
        text = (await reader.read()).decode()
        writer.close()
    stream, _, refusal = text.partition("data: [DONE]")
    assert stream.startswith("HTTP/1.1 200")
    assert "HTTP/1.0 400" in refusal
    assert refusal.endswith('"code":"malformed_request"}}')


@async_test
async def test_an_unknown_expectation_is_refused_in_json() -> None:
    """aiohttp refuses it before any of our own code sees the request."""
    async with serving(FakeRouter()) as client:
        status, headers, body = await spoken(client, _HEAD + b"Expect: magic\r\nContent-Length: 0\r\n\r\n")
    assert (status, set(json.loads(body)["error"])) == (417, {"message", "type", "param", "code"})
    assert headers["x-request-id"]


@pytest.mark.parametrize(
    "parts", [[_HEAD + b"Content-Length: 1000\r\n\r\n{"], [_CHUNKED + b"2\r\n{ \r\n", b"zz\r\n"]], ids=["silence", "a bad chunk"]
)
@async_test
async def test_a_body_that_does_not_come_is_a_408(parts: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that vanished in the middle of its request must not count as a running one of its key for ever.

    Nor one whose later chunk is no chunk: aiohttp does not tell who waits for the body.
    """
    monkeypatch.setattr(read, "BODY_S", 0.1)
    async with serving(FakeRouter()) as client:
        status, _, body = await spoken(client, *parts)
    assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")
