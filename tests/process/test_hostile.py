"""Hostile input to a real server: nothing breaks, nothing is left, no worker notices."""

from __future__ import annotations

import http.client
import socket
from urllib.parse import urlsplit

from tests.process.harness import DEADLINE_S, Server, null_server
from tests.unit.api import hostile_messages, hostile_responses
from tests.unit.api.hostile import CASES, NOT_WHOLE, RAW_REQUESTS, fault


def fault_of_raw(running: Server, raw: bytes, *, is_whole: bool) -> str | None:
    """As ``fault``. Of a request that is not whole, the end is seen and no answer expected."""
    parts = urlsplit(running.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=DEADLINE_S) as connection:
        connection.sendall(raw)
        if not is_whole:
            connection.shutdown(socket.SHUT_WR)
            return None if connection.recv(1) == b"" else "it answered half a request"
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return fault(answer.status, answer.read())


def test_no_body_and_no_byte_sequence_breaks_the_server() -> None:
    """The whole table, then the server is as it was: same workers, every block free, ready, and the same text as before."""
    faults = {}
    with null_server() as running:
        expected = running.complete("as before", 16)
        for case in (*CASES, *hostile_responses.CASES, *hostile_messages.CASES):
            connection = running.connect()
            connection.request("POST", case.path, case.raw, case.headers)
            answer = connection.getresponse()
            if found := fault(answer.status, answer.read(), case.path):
                faults[f"{case.path} {case.name}"] = found
            connection.close()
        for name, raw in RAW_REQUESTS.items():
            if found := fault_of_raw(running, raw, is_whole=name not in NOT_WHOLE):
                faults[name] = found
        assert faults == {}
        assert running.complete("as before", 16) == expected
        assert running.request("GET", "/readyz")[0] == 200
        assert [worker["restarts"] for worker in running.status()["workers"]] == [0, 0]
        running.wait_until_empty(1.0)
