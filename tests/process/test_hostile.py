"""Hostile input to a real server: nothing breaks, nothing is left, no worker notices."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from tests.process.harness import DEADLINE_S, Server, null_server
from tests.unit.api.hostile import CASES, RAW_REQUESTS, fault


def send_raw(running: Server, raw: bytes) -> bytes:
    """What the server says to ``raw`` until it or the request ends; nothing if it closes the connection at once."""
    parts = urlsplit(running.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=DEADLINE_S) as connection:
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1 << 16)
        except ConnectionError:
            return b""


def test_no_body_and_no_byte_sequence_breaks_the_server() -> None:
    """The whole table, then the server is as it was: same workers, every block free, ready, and the same text as before."""
    faults = {}
    with null_server() as running:
        expected = running.complete("as before", 16)
        for case in CASES:
            connection = running.connect()
            connection.request("POST", case.path, case.raw, case.headers)
            answer = connection.getresponse()
            if found := fault(answer.status, answer.read()):
                faults[f"{case.path} {case.name}"] = found
            connection.close()
        for name, raw in RAW_REQUESTS.items():
            if send_raw(running, raw)[9:10] == b"5":
                faults[name] = "status 5xx"
        assert faults == {}
        assert running.complete("as before", 16) == expected
        assert running.request("GET", "/readyz")[0] == 200
        assert [worker["restarts"] for worker in running.status()["workers"]] == [0, 0]
        running.wait_until_empty(1.0)
