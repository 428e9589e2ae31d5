"""``disagg status``: what a running server says of itself, as a table for people and an exit code for scripts."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec

from disagg.remote import Asked, NoAnswerError, Remote, Worker


def run(server: Remote, *, as_json: bool) -> int:
    """Ask the server, print its answer and return 0: ready, 1: not ready, 2: it could not be asked."""
    try:
        asked = server.ask()
    except NoAnswerError as error:
        sys.stderr.write(f"disagg: error: no status from {server.url}: {error}\n")
        return 2
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(asked.document)) + b"\n")
    else:
        sys.stdout.write("\n".join(_lines(server.url, asked)) + "\n")
    return 0 if asked.is_ready else 1


def _lines(url: str, asked: Asked) -> Iterable[str]:
    status = asked.status
    state = "ready" if asked.is_ready else "not ready" + (f" ({'; '.join(asked.reasons)})" if asked.reasons else "")
    yield f"{url}  {state}{', draining' if status.draining else ''}"
    yield f"model {status.model}, mode {status.mode}{' (degraded)' if status.degraded else ''}, run {status.run_id}"
    yield "requests  " + "  ".join(f"{name} {count}" for name, count in status.requests.items())
    yield ""
    has_nodes = bool(status.nodes) or any(worker.node for worker in status.workers)
    node = ["node"] if has_nodes else []
    header = ["worker", "role", *node, "state", "pid", "device", "epoch", "restarts", "waiting", "running", "blocks"]
    yield from _table(header, [_worker_row(worker, has_nodes) for worker in status.workers])
    if status.nodes:
        yield ""
        rows = [[n.name, "connected" if n.connected else "away", n.address or "-", str(n.joined)] for n in status.nodes]
        yield from _table(["node", "state", "address", "joined"], rows)
    if status.pairs:
        yield ""
        rows = [[p.prefill, p.decode, p.transport, "-" if p.gb_per_s is None else f"{p.gb_per_s:.1f}"] for p in status.pairs]
        yield from _table(["prefill", "decode", "transport", "GB/s"], rows)


def _worker_row(worker: Worker, has_nodes: bool) -> list[str]:
    counts = {name: count for name, count in worker.blocks.items() if name == "total" or count}
    blocks = "  ".join(f"{name} {count}" for name, count in counts.items())
    node = [worker.node or "-"] if has_nodes else []
    numbers = (worker.epoch, worker.restarts, worker.requests.get("waiting", 0), worker.requests.get("running", 0))
    role = worker.role if worker.next_role in (None, worker.role) else f"{worker.role} → {worker.next_role}"
    return [worker.id, role, *node, worker.state, str(worker.pid or "-"), worker.device, *map(str, numbers), blocks]


def _table(header: list[str], rows: list[list[str]]) -> Iterable[str]:
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows)]
    for row in (header, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
