"""``disagg status``: what a running server says of itself, as a table for people and an exit code for scripts."""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence

import msgspec

TIMEOUT_S = 5.0


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


class Pair(msgspec.Struct):
    prefill: str
    decode: str
    transport: str
    gb_per_s: float | None


class Status(msgspec.Struct):
    """The part of ``GET /v1/disagg/status`` that the table shows; fields of newer servers are ignored."""

    run_id: str
    mode: str
    model: str
    draining: bool
    workers: list[Worker]
    pairs: list[Pair]
    requests: dict[str, int]


class Readiness(msgspec.Struct):
    """The body of ``GET /readyz``."""

    reasons: list[str] = []


def run(url: str, *, as_json: bool) -> int:
    """Ask the server at ``url``, print its answer and return 0: ready, 1: not ready, 2: it could not be asked."""
    url = url.rstrip("/")
    try:
        code, body = _get(f"{url}/v1/disagg/status")
        if code != 200:
            raise ValueError(f"HTTP {code} {http.client.responses.get(code, '')}".strip())
        status = msgspec.json.decode(body, type=Status)
        code, readiness = _get(f"{url}/readyz")
        reasons = msgspec.json.decode(readiness, type=Readiness).reasons
    except (OSError, http.client.HTTPException, msgspec.DecodeError, ValueError) as error:
        sys.stderr.write(f"disagg: error: no status from {url}: {error}\n")
        return 2
    is_ready = code == 200
    if as_json:
        document = {"ready": is_ready, "reasons": reasons, **msgspec.json.decode(body)}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    else:
        sys.stdout.write("\n".join(_lines(url, is_ready, reasons, status)) + "\n")
    return 0 if is_ready else 1


def _get(url: str) -> tuple[int, bytes]:
    """HTTP status and body. Raises OSError, HTTPException or ValueError (a malformed URL) when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:  # an answer as well: 503 from /readyz has its reasons in the body
        with error:
            return error.code, error.read()


def _lines(url: str, is_ready: bool, reasons: Sequence[str], status: Status) -> Iterable[str]:
    state = "ready" if is_ready else "not ready" + (f" ({'; '.join(reasons)})" if reasons else "")
    yield f"{url}  {state}{', draining' if status.draining else ''}"
    yield f"model {status.model}, mode {status.mode}, run {status.run_id}"
    yield "requests  " + "  ".join(f"{name} {count}" for name, count in status.requests.items())
    yield ""
    header = ["worker", "role", "state", "pid", "device", "epoch", "restarts", "waiting", "running", "blocks"]
    yield from _table(header, [_worker_row(worker) for worker in status.workers])
    if status.pairs:
        yield ""
        rows = [[p.prefill, p.decode, p.transport, "-" if p.gb_per_s is None else f"{p.gb_per_s:.1f}"] for p in status.pairs]
        yield from _table(["prefill", "decode", "transport", "GB/s"], rows)


def _worker_row(worker: Worker) -> list[str]:
    counts = {name: count for name, count in worker.blocks.items() if name == "total" or count}
    blocks = "  ".join(f"{name} {count}" for name, count in counts.items())
    numbers = (worker.epoch, worker.restarts, worker.requests.get("waiting", 0), worker.requests.get("running", 0))
    return [worker.id, worker.role, worker.state, str(worker.pid or "-"), worker.device, *map(str, numbers), blocks]


def _table(header: list[str], rows: list[list[str]]) -> Iterable[str]:
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows)]
    for row in (header, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
