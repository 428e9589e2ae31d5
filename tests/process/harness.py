"""The real command in real processes, and what must be left of it: nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.process.network import Host

READY_S = 90.0
DEADLINE_S = 30.0


class Server:
    """A running ``disagg serve``, on this host or another."""

    def __init__(self, *arguments: str, host: Host | None = None) -> None:
        command = [sys.executable, "-m", "disagg", "serve", "--port", "0", "--log-format", "json", *arguments]
        self._host = host
        if host is not None:
            command = host.command(*command)
        with tempfile.TemporaryFile() as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            assert self.process.stdout is not None
            self.ready_line = self.process.stdout.readline()
            if not self.ready_line:
                self.process.stdout.close()
                code = self.process.wait(DEADLINE_S)
                log.seek(0)
                raise AssertionError(f"no ready line; exit code {code}; it logged:\n{log.read().decode()}")
        self.url = next(word for word in self.ready_line.split() if word.startswith(("http://", "https://")))
        self.headers: dict[str, str] = {}  # sent with every request
        self.tls: ssl.SSLContext | None = None  # whom to trust, where the URL is https
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        until(lambda: not alive(self.children), "no worker is left")

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = self.connect()
        try:
            text = json.dumps(body) if body is not None else None
            connection.request(method, path, text, {"Content-Type": "application/json", **self.headers})
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if "json" in answer.headers.get("Content-Type", "") else text
        finally:
            connection.close()

    def complete(self, prompt: Any, max_tokens: int = 8, **fields: Any) -> str:
        status, answer = self.request(
            "POST", "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        )
        assert status == 200, answer
        return answer["choices"][0]["text"]

    def status(self) -> dict[str, Any]:
        return self.request("GET", "/v1/disagg/status")[1]

    def worker(self, worker_id: str) -> dict[str, Any]:
        return next(worker for worker in self.status()["workers"] if worker["id"] == worker_id)

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if self.tls is None:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=DEADLINE_S)
        else:
            connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=DEADLINE_S, context=self.tls)
        if self._host is not None:
            with self._host.entered():
                connection.connect()
        return connection

    def stream(self, prompt: Any, max_tokens: int, **fields: Any) -> Stream:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **fields}
        return Stream(self.connect(), body, self.headers)

    def is_empty(self) -> bool:
        """Every block free or cached, nothing queued or running."""
        status = self.status()
        return not any(status["requests"].values()) and all(
            worker["blocks"]["free"] + worker["blocks"]["cached"] == worker["blocks"]["total"] > 0
            and not any(worker["requests"].values())
            for worker in status["workers"]
        )

    def wait_until_empty(self, limit_s: float) -> None:
        until(self.is_empty, f"everything empty within {limit_s} s", limit_s)

    def wait_until_ready(self) -> None:
        until(lambda: self.request("GET", "/readyz")[0] == 200, "ready")


class Node:
    """A running ``disagg worker``, which joins as soon as it can."""

    def __init__(self, *arguments: str, host: Host | None = None) -> None:
        command = [sys.executable, "-m", "disagg", "worker", "--log-format", "json", *arguments]
        if host is not None:
            command = host.command(*command)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_until_joined(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Joined "), f"{line!r}; exit code {self.process.poll()}"

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def end(self, number: int) -> tuple[int, str]:
        """Send the signal; return the exit code and what was logged."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


class Stream:
    """One open SSE stream."""

    def __init__(self, connection: http.client.HTTPConnection, body: dict[str, Any], headers: Mapping[str, str] = {}) -> None:
        self.connection = connection
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", **headers})
        self.answer = connection.getresponse()
        self.events: list[str] = []

    def next_event(self) -> str | None:
        """The next event's data, or None at the end of the body."""
        while line := self.answer.readline():
            if line.startswith(b"data: "):
                self.events.append(line[6:].strip().decode())
                return self.events[-1]
        return None

    def read_to_end(self) -> list[str]:
        while self.next_event() is not None:
            pass
        return self.events

    def text(self) -> str:
        events = [json.loads(event) for event in self.events if event != "[DONE]"]
        return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


@contextlib.contextmanager
def server(*arguments: str, host: Host | None = None) -> Iterator[Server]:
    running = Server(*arguments, host=host)
    try:
        yield running
    finally:
        running.close()


def null_server(*arguments: str) -> contextlib.AbstractContextManager[Server]:
    """A server without a model, on the null engine: it starts in a second."""
    return server("--model", "null", "--kv-memory", "64MiB", *arguments)


def terminate(running: Server, number: int = signal.SIGTERM) -> int:
    """Send the signal and return the exit code."""
    running.process.send_signal(number)
    return running.process.wait(DEADLINE_S)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def until(condition: Callable[[], bool], what: str, limit_s: float = DEADLINE_S) -> None:
    """Wait for a condition of another process, which has no event to wait on."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)
