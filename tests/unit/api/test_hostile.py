"""Hostile input to the application: an error object or a harmless answer, nothing else, and then business as usual."""

from __future__ import annotations

import asyncio
from types import ModuleType

import aiohttp
import pytest

from tests.unit.api import hostile, hostile_messages, hostile_responses
from tests.unit.api.fakes import FakeRouter, async_test, says, serving
from tests.unit.api.hostile import NOT_WHOLE, RAW_REQUESTS, fault


@pytest.mark.parametrize("table", [hostile, hostile_responses, hostile_messages], ids=lambda table: table.__name__)
@async_test
async def test_no_body_breaks_the_server(table: ModuleType) -> None:
    """Every case is answered below 500, errors as short error objects; nothing that is refused was begun."""
    router = FakeRouter(says("x"))
    faults = {}
    async with serving(router) as client, aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        for case in table.CASES:
            before = len(router.streams)
            async with http.post(client.url + case.path, data=case.raw, headers=case.headers) as response:
                found = fault(response.status, await response.read(), case.path)
            if found is None and response.status >= 400 and len(router.streams) > before:
                found = "refused, and yet submitted"
            if found is not None:
                faults[f"{case.path} {case.name}"] = found
        answer = await client.complete(prompt="a")
    assert len(table.CASES) >= 150
    assert faults == {}
    assert answer["choices"][0]["text"] == "x"


@async_test
async def test_what_is_hardly_http_is_refused_or_cut_off() -> None:
    """Broken framing, oversized heads, other protocols: below 500 or a closed connection, and the next client is served."""
    statuses = {}
    async with serving(FakeRouter(says("x"))) as client:
        for name, raw in RAW_REQUESTS.items():
            reader, writer = await asyncio.open_connection(*client.address)
            writer.write(raw)
            if name in NOT_WHOLE:
                writer.write_eof()
            answer = await reader.read(1 << 20)
            writer.close()
            statuses[name] = int(answer.split(b" ", 2)[1]) if answer else None
        async with aiohttp.ClientSession() as other, other.get(f"{client.url}/livez") as response:
            assert response.status == 200
    assert {name for name, status in statuses.items() if status is None} == NOT_WHOLE
    assert {name: status for name, status in statuses.items() if status is not None and status >= 500} == {}
