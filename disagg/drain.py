"""``disagg drain`` and ``disagg flip``: what an operator asks of a running server, over its admin socket.

Drain: admit nothing more (or, with --resume, admit again). The server goes on running, so that a load balancer can be emptied, or
a host inspected, before it is ended. Flip: give one worker another role.
"""

from __future__ import annotations

import http.client
import os
import socket
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from disagg.errors import ConfigError

TIMEOUT_S = 5.0
WAIT_S = 3600.0
OFF = "off"
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Answer(msgspec.Struct):
    draining: bool = False
    drained: bool = False
    requests: dict[str, int] = {}


class Flipped(msgspec.Struct):
    worker: str
    role: str
    is_ready: bool


def admin_socket(setting: str, port: int, environ: Mapping[str, str]) -> str:
    """The path of the admin socket of the server on ``port``; empty = it has none.

    ``setting``: a path, off, or auto: in the service manager's runtime directory, else in the user's, else none.
    """
    if setting != "auto":
        return "" if setting == OFF else setting
    if directory := environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]:
        return f"{directory}/admin.sock"
    directory = environ.get("XDG_RUNTIME_DIR", "")
    return f"{directory}/disagg-{port}.sock" if directory else ""


def run(*, url: str, path: str, waits: bool, resumes: bool, environ: Mapping[str, str]) -> int:
    """Ask, print the answer and return 0: done, 1: streams are still running, 2: it could not be asked."""
    try:
        path = path or _socket_of(url, environ)
        if resumes:
            ask(path, "POST", "/resume")
            sys.stdout.write("Serving again.\n")
            return 0
        wait_s = WAIT_S if waits else 0.0
        body = ask(path, "POST", "/drain", msgspec.json.encode({"wait_s": wait_s}), timeout_s=wait_s + TIMEOUT_S)
        answer = msgspec.json.decode(body, type=Answer)
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        sys.stderr.write(f"disagg: error: no answer from {path}: {error}\n")
        return 2
    left = ", ".join(f"{count} {state}" for state, count in answer.requests.items() if count)
    sys.stdout.write("Drained: nothing is running.\n" if answer.drained else f"Draining: {left or 'about to end'}.\n")
    return 0 if answer.drained or not waits else 1


def flip(*, url: str, path: str, worker: str, role: str, wait_s: float, environ: Mapping[str, str]) -> int:
    """Ask, print the answer and return 0: done, 1: refused, or not ready yet, 2: it could not be asked."""
    try:
        path = path or _socket_of(url, environ)
        body = msgspec.json.encode({"worker": worker, "role": role, "wait_s": wait_s})
        status, text = _exchange(path, "POST", "/flip", body, timeout_s=wait_s + WAIT_S)
        if status == 409:
            sys.stderr.write(f"disagg: error: {msgspec.json.decode(text)['error']['message']}\n")
            return 1
        answer = msgspec.json.decode(_good(status, text), type=Flipped)
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        sys.stderr.write(f"disagg: error: no answer from {path}: {error}\n")
        return 2
    sys.stdout.write(f"{answer.worker} is {answer.role}{'' if answer.is_ready else ', but not ready yet: see disagg status'}.\n")
    return 0 if answer.is_ready else 1


def ask(path: str, method: str, target: str, body: bytes | None = None, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """The body of a good answer. Raises OSError or HTTPException, also for any other answer."""
    return _good(*_exchange(path, method, target, body, timeout_s=timeout_s))


def _exchange(path: str, method: str, target: str, body: bytes | None, *, timeout_s: float) -> tuple[int, bytes]:
    """HTTP status and body."""
    connection = _UnixConnection(path, timeout_s)
    try:
        connection.request(method, target, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _good(status: int, text: bytes) -> bytes:
    if status != 200:
        raise http.client.HTTPException(f"HTTP {status}: {text.decode(errors='replace')}")
    return text


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _socket_of(url: str, environ: Mapping[str, str]) -> str:
    """Where the server with this URL has its socket by default. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        port = 0
    if not port:
        raise ConfigError(f"{url!r} is no URL such as http://127.0.0.1:8000")
    user = {name: value for name, value in environ.items() if name == "XDG_RUNTIME_DIR"}
    for path in (admin_socket("auto", port, user), "/run/disagg/admin.sock"):
        if path and os.path.exists(path):
            return path
    raise ConfigError(f"no admin socket of {url} is known here: name it with --socket (the server logs its path when it starts)")
