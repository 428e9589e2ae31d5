"""This server beside others: each one started in turn, in one sitting, and measured with the same probe.

    python bench/peers.py --peers FOLDER [--only NAME …] [--repeat 3]    measures and writes bench/results/peers.*
    python bench/peers.py --render                                          writes tables and plots again, from the JSON

bench/peers.toml names the servers, and the targets that this one has against them; how to set the others up is told there.
The machine is never quite the same twice: only ratios within one sitting count, and nothing else may run beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import string
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import peers_plots
import peers_report
import probe
import psutil
from footprint import footprint, tree
from server import RESULTS, where

from disagg.model import find_model

HERE = Path(__file__).parent
SETTLED_S, IDLE_S = 3.0, 3.0
HARDWARE = "hardware"  # stands among the servers: what the machine could do at most


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server of the sitting. ``$NAME`` in command and environment is a placeholder, so that results hold no path."""

    name: str
    url: str
    command: str
    environment: dict[str, str] = {}
    ready: list[str] = []  # addresses that answer 200 when it is; the first answered request decides in any case
    timeout_s: float = 300.0
    version: str = ""  # command that prints it
    phases: tuple[str, ...] = probe.PHASES
    is_ours: bool = False


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``ours`` must be at least ``at_least`` times better in ``figure`` than each of ``against``."""

    figure: str  # the path of a figure in a server's record, such as decode.16.tokens_per_s
    ours: str
    against: list[str]
    at_least: float


class Sitting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server: list[Server]
    target: list[Target]


def read_sitting(path: Path) -> Sitting:
    """Raises ValueError for anything that is not as it must be, also a target that names no server."""
    sitting = msgspec.toml.decode(path.read_bytes(), type=Sitting)
    known = {server.name for server in sitting.server} | {HARDWARE}
    for target in sitting.target:
        if unknown := {target.ours, *target.against} - known:
            raise ValueError(f"{path}: the target for {target.figure} names no server: {', '.join(sorted(unknown))}")
    return sitting


def expand(text: str, places: Mapping[str, str]) -> str:
    """Fill in the placeholders. Raises ValueError for one that is unknown."""
    try:
        return string.Template(text).substitute(places)
    except KeyError as error:
        raise ValueError(f"{text}: {error} has no value") from error


@contextlib.contextmanager
def started(server: Server, places: Mapping[str, str], log: Path, grace_s: float = 30.0) -> Iterator[subprocess.Popen[bytes]]:
    """The server in a session of its own, its output in ``log``; then all it started is gone, by force after ``grace_s``."""
    environment = {name: expand(value, places) for name, value in server.environment.items()}
    with log.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(expand(server.command, places)),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        processes = list(tree(process.pid))
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, timeout=grace_s)
        for left in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        psutil.wait_procs(alive, timeout=grace_s)


def answers(url: str, body: bytes | None = None) -> bool:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until_ready(server: Server, process: subprocess.Popen[bytes], deadline: float) -> str:
    """→ the name of its model, when a first token has come. Raises RuntimeError."""
    for url in [*server.ready, server.url + "/v1/models"]:
        while not answers(url):
            _still_starting(process, deadline)
    model = probe.served_model(server.url)
    body = json.dumps({"model": model, "prompt": [1000], "max_tokens": 1}).encode()
    while not answers(server.url + "/v1/completions", body):
        _still_starting(process, deadline)
    return model


def _still_starting(process: subprocess.Popen[bytes], deadline: float) -> None:
    if process.poll() is not None:
        raise RuntimeError(f"it ended while starting, with code {process.returncode}")
    if time.perf_counter() > deadline:
        raise RuntimeError("it was not ready in time")
    time.sleep(0.05)


def measure(server: Server, places: Mapping[str, str], log: Path, repeat: int, plan: probe.Plan) -> dict[str, Any]:
    """The record of one server: how it was started, what it takes at rest and afterwards, and every run."""
    record: dict[str, Any] = {**msgspec.to_builtins(server), "runs": []}
    if server.version:
        command = shlex.split(expand(server.version, places))
        record["version"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    begun = time.perf_counter()
    with started(server, places, log) as process:
        model = wait_until_ready(server, process, begun + server.timeout_s)
        record["ready_s"] = round(time.perf_counter() - begun, 2)
        time.sleep(SETTLED_S)
        before = footprint(process.pid)
        time.sleep(IDLE_S)
        rest = footprint(process.pid)
        record |= {"processes": rest.num_processes, "rest_mib": rest.pss_mib}
        record["idle_cores"] = round((rest.cpu_s - before.cpu_s) / IDLE_S, 2)
        measured = time.perf_counter()
        for _ in range(repeat):
            record["runs"].append(asyncio.run(probe.run(server.url, model, plan)))
        busy = footprint(process.pid)
        record["busy_mib"] = busy.pss_mib
        record["busy_cores"] = round((busy.cpu_s - rest.cpu_s) / (time.perf_counter() - measured), 2)
    return record


def sit(args: argparse.Namespace, sitting: Sitting, plan: probe.Plan, kept: Path) -> dict[str, Any]:
    """Measure one server after the other, keeping the result so far. One that fails is in it with its error."""
    model_dir = args.peers / "model"
    if not (model_dir / "config.json").is_file():
        subprocess.run([sys.executable, str(HERE / "export_model.py"), str(model_dir)], check=True)
    places = {"PEERS": str(args.peers), "MODEL": str(find_model("smollm2").path), "MODEL_DIR": str(model_dir)}
    places |= {"PYTHON": sys.executable, "BENCH": str(HERE)}
    limits = subprocess.run([sys.executable, str(HERE / "limits.py")], capture_output=True, check=True).stdout
    result: dict[str, Any] = {
        "benchmark": "peers",
        "where": where(),
        "nice": os.nice(0),
        "repeat": args.repeat,
        "plan": asdict(plan),
    }
    result["servers"] = [{"name": HARDWARE, "runs": [json.loads(limits)]}]
    logs = Path(tempfile.mkdtemp(prefix="peers-"))
    for server in sitting.server:
        if args.only and server.name not in args.only:
            continue
        log, begun = logs / f"{server.name.replace(' ', '_')}.log", time.perf_counter()
        try:
            record = measure(server, places, log, args.repeat, replace(plan, phases=server.phases))
        except (RuntimeError, OSError, aiohttp.ClientError, subprocess.SubprocessError, ExceptionGroup) as error:
            record = {**msgspec.to_builtins(server), "runs": [], "error": f"{type(error).__name__}: {error}"}
        result["servers"].append(record)
        kept.write_text(json.dumps(result, indent=1) + "\n")
        print(
            f"{server.name}: {record.get('error', 'measured')} after {time.perf_counter() - begun:.0f} s, log {log}", flush=True
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=Path, default=HERE / "peers.toml")
    parser.add_argument("--peers", type=Path, help="folder in which the other servers are set up: $PEERS")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these servers only")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--arrivals", type=int, default=probe.Plan.arrivals, help="long prompts in the interference phase")
    parser.add_argument("--render", action="store_true", help="run nothing: write tables and plots from the JSON")
    parser.add_argument("--output", type=Path, default=RESULTS / "peers", help="path of the results, without suffix")
    args = parser.parse_args()
    sitting, kept = read_sitting(args.servers), args.output.with_suffix(".json")
    if args.render:
        result = json.loads(kept.read_text())
    else:
        if args.peers is None:
            parser.error("--peers is needed to run them")
        args.peers = args.peers.absolute()
        probe.take_priority()
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no server is left behind
        result = sit(args, sitting, probe.Plan(arrivals=args.arrivals), kept)
    text = peers_report.markdown(result, msgspec.to_builtins(sitting.target))
    args.output.with_suffix(".md").write_text(text)
    peers_plots.draw(result, args.output)
    print(text)


if __name__ == "__main__":
    main()
