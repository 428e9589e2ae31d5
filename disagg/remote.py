"""A running server as ``disagg status`` and ``disagg top`` see it: by HTTP, with nothing but the standard library.

Only what they show is read; fields of newer servers are ignored.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from disagg.credentials import read_private
from disagg.errors import ConfigError, DisaggError

TIMEOUT_S = 5.0


class NoAnswerError(DisaggError):
    """No server of ours answers at the URL. The message says what happened instead."""


class Worker(msgspec.Struct):
    id: str
    role: str
    state: str
    pid: int | None
    epoch: int
    device: str
    restarts: int
    requests: dict[str, int]
    blocks: dict[str, int]
    node: str = ""  # "" = the server's own
    next_role: str | None = None  # the one that it is being given


class Node(msgspec.Struct):
    name: str
    connected: bool
    address: str | None = None
    joined: int = 0


class Pair(msgspec.Struct):
    prefill: str
    decode: str
    transport: str
    gb_per_s: float | None


class Status(msgspec.Struct):
    """The body of ``GET /v1/disagg/status``."""

    run_id: str
    mode: str
    model: str
    draining: bool
    workers: list[Worker]
    pairs: list[Pair]
    requests: dict[str, int]
    nodes: list[Node] = []
    uptime_s: float = 0.0
    degraded: bool = False


class Readiness(msgspec.Struct):
    """The body of ``GET /readyz``."""

    reasons: list[str] = []


class Asked(msgspec.Struct):
    """What a server said of itself. ``document``: its status as it came, with whether it is ready and why not."""

    is_ready: bool
    reasons: list[str]
    status: Status
    document: dict[str, Any]


class Remote(msgspec.Struct, frozen=True):
    url: str  # without a slash at its end
    key: str = ""

    @classmethod
    def at(cls, url: str, key_file: Path | None = None) -> Remote:
        """``key_file``: API keys as the server reads them; the first is used. Raises ConfigError."""
        return cls(url.rstrip("/"), first_key(key_file) if key_file is not None else "")

    def ask(self) -> Asked:
        """Raises NoAnswerError when nobody is there, or somebody else."""
        body = self.fetch("/v1/disagg/status")
        code, readiness = self._get("/readyz")
        try:
            status = msgspec.json.decode(body, type=Status)
            reasons = msgspec.json.decode(readiness, type=Readiness).reasons
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NoAnswerError(str(error)) from error
        document = {"ready": code == 200, "reasons": reasons, **msgspec.json.decode(body)}
        return Asked(code == 200, reasons, status, document)

    def fetch(self, path: str) -> bytes:
        """The body of a 200. Raises NoAnswerError."""
        code, body = self._get(path)
        if code == 401:
            raise NoAnswerError("it wants an API key: --api-key-file FILE")
        if code != 200:
            raise NoAnswerError(f"HTTP {code} {http.client.responses.get(code, '')}".strip())
        return body

    def _get(self, path: str) -> tuple[int, bytes]:
        """HTTP status and body."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            request = urllib.request.Request(self.url + path, headers=headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:  # an answer as well: 503 from /readyz has its reasons in the body
            with error:
                return error.code, error.read()
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: the URL is none
            raise NoAnswerError(str(error)) from error


def first_key(path: Path) -> str:
    """Of a file as the server reads it. Raises ConfigError."""
    for raw in read_private(str(path), "--api-key-file").decode("ascii", "replace").splitlines():
        line = raw.strip()
        if line and not line.startswith("#"):
            key = line.rpartition(":")[2].strip()
            if not key.isascii():
                raise ConfigError(f"--api-key-file: the first key in {path} has characters that no key has")
            return key
    raise ConfigError(f"--api-key-file: {path} has no key in it")
