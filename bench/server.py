"""A server under test: the real command, started and ended by the benchmark that measures it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

READY_S = 120.0
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class RunningServer:
    url: str
    pid: int  # of the parent

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        """The value of one sample, by its full name with labels."""
        for line in self.get("/metrics").splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


@contextlib.contextmanager
def running_server(*arguments: str, on_record: Callable[[dict[str, Any]], None] = lambda record: None) -> Iterator[RunningServer]:
    """``disagg serve`` on a free port with ``arguments``; ended with SIGTERM. ``on_record`` gets its log until it is ready."""
    command = [sys.executable, "-m", "disagg", "serve", "--port", "0", "--log-format", "json", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            record = json.loads(line) if line.startswith("{") else {"event": line.strip()}
            on_record(record)
            if record["event"] == "ready":
                break
            if record.get("level") == "error":
                print(line, end="", file=sys.stderr)
        else:
            raise SystemExit(f"the server did not start: exit code {process.wait()}")
        # Nobody reads the rest: leave it to a file descriptor of its own, so that the server never waits for us.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield RunningServer(record["url"], process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        drain.wait(timeout=10)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of one process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK"), int(fields[12]) / os.sysconf("SC_CLK_TCK")


def where() -> dict[str, Any]:
    """Machine, versions and commit: what a figure needs beside it."""
    model = next((x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    changed = ["git", "status", "--porcelain", "--", ":/", ":!/bench/results"]
    dirty = subprocess.run(changed, capture_output=True, text=True, cwd=Path(__file__).parent).stdout
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit.stdout.strip() + (" + changes" if dirty else ""),
    }


def report(name: str, result: dict[str, Any], path: str | None) -> None:
    """Print ``result`` and, with a path (or "-" for bench/results/NAME.json), keep it."""
    text = json.dumps({"benchmark": name, "where": where(), **result}, indent=1)
    print(text)
    if path:
        target = RESULTS / f"{name}.json" if path == "-" else Path(path)
        target.write_text(text + "\n")
