"""The operator's listener: who can open it, what it answers, and what is left of it."""

from __future__ import annotations

import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from disagg.api.admin import AdminListener
from disagg.errors import StartupError
from disagg.operations import Operations
from disagg.request import Request, SamplingParams
from disagg.stream import RequestStream
from tests.unit.api.fakes import FakeRouter, async_test, make_services


class Router(FakeRouter):
    """As far as Operations know the real one: its last stream ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_draining = False

    def open(self) -> list[RequestStream]:
        return [stream for stream in self.streams if not stream.is_final]

    async def drain(self) -> None:
        self.is_draining = True
        for stream in self.open():
            async for _ in stream:
                pass


@asynccontextmanager
async def admin(router: Router, path: Path, **changes: Any) -> AsyncIterator[aiohttp.ClientSession]:
    router_seen: Any = type("Seen", (), {"streams": router.open, "drain": router.drain, "is_draining": False})()
    status = lambda: {"draining": router.is_draining, "requests": {"decoding": len(router.open())}}  # noqa: E731
    operations = Operations(router_seen, lambda: 0.0, on_resumed=lambda: setattr(router, "is_draining", False))
    flipper: Any = None  # tests/sim/test_flip.py
    listener = AdminListener(str(path), make_services(router, status=status, **changes), operations, flipper)
    await listener.listen()
    try:
        async with aiohttp.ClientSession("http://admin", connector=aiohttp.UnixConnector(str(path))) as http:
            yield http
    finally:
        await listener.aclose()


def submit(router: Router, request_id: str) -> RequestStream:
    return router.submit(Request(id=request_id, prompt=[1], params=SamplingParams(max_tokens=9)))


async def post(http: aiohttp.ClientSession, path: str, body: Any = None) -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


@async_test
async def test_only_its_user_can_open_it_and_its_name_goes_with_it(tmp_path: Path) -> None:
    """Mode 0600 on the socket; after the end there is no file."""
    path = tmp_path / "admin.sock"
    async with admin(Router(), path) as http:
        mode = path.stat().st_mode
        assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
        async with http.get("/v1/disagg/status") as response:
            assert (response.status, (await response.json())["draining"]) == (200, False)
        async with http.get("/readyz") as response:
            assert response.status == 200
    assert not path.exists()


@async_test
async def test_a_name_that_is_taken_is_refused_and_one_that_is_left_over_is_not(tmp_path: Path) -> None:
    """Another server answers there, or another kind of file: StartupError. Nobody answers any more: it is replaced."""
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with admin(Router(), path) as http:
        with pytest.raises(StartupError, match="another server uses it"):
            async with admin(Router(), path):
                pass
        async with http.get("/readyz") as response:
            assert response.status == 200
    path.write_text("precious")
    with pytest.raises(StartupError, match="something else has that name"):
        async with admin(Router(), path):
            pass
    assert path.read_text() == "precious"
    with pytest.raises(StartupError, match="cannot listen on the admin socket"):
        async with admin(Router(), tmp_path / "missing" / "admin.sock"):
            pass


@async_test
async def test_one_request_is_ended_by_its_id(tmp_path: Path) -> None:
    """All its choices and no other; an unknown id is a 404, a body that is none a 400, all in JSON."""
    router = Router()
    mine = [submit(router, f"cmpl-1-{index}") for index in range(2)]
    other = submit(router, "cmpl-12-0")
    async with admin(router, tmp_path / "s") as http:
        async with http.get("/requests") as response:
            listed = (await response.json())["requests"]
        assert [request["id"] for request in listed] == ["cmpl-1-0", "cmpl-1-1", "cmpl-12-0"]
        assert await post(http, "/abort", {"id": "cmpl-1"}) == (200, {"id": "cmpl-1", "aborted": 2})
        assert router.aborted == mine
        assert "operator" in str(mine[0].error)
        for body, status in (({"id": "cmpl-1"}, 404), ({"id": "cmpl"}, 404), ({}, 400), ([], 400), ({"id": 1}, 400)):
            code, answer = await post(http, "/abort", body)
            assert (code, set(answer)) == (status, {"error"})
        assert not other.is_final
        assert (await post(http, "/drain", {"wait_s": -1}))[0] == 400
        assert (await post(http, "/flip", {"worker": "prefill-0", "role": "decode", "wait_s": 1e9}))[0] == 400
        assert (await post(http, "/nothing"))[0] == 404
        other.abort()


@async_test
async def test_drain_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    """Not at all by default; until the last stream has ended; or until somebody resumes."""
    router = Router()
    stream = submit(router, "cmpl-1-0")
    async with admin(router, tmp_path / "s") as http:
        code, answer = await post(http, "/drain")
        assert (code, answer["draining"], answer["drained"], answer["requests"]) == (200, True, False, {"decoding": 1})
        assert (await post(http, "/resume"))[0] == 200
        assert not router.is_draining
        stream.abort()
        assert (await post(http, "/drain", {"wait_s": 60}))[1]["drained"]
