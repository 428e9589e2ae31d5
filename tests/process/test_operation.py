"""A server as it is operated: keys, TLS, a service manager, an admin socket; when it is ready, and how it ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.drain import ask
from tests.process.harness import DEADLINE_S, Server, null_server, terminate, until

KEY, LATER_KEY = "first-0123456789abcdef", "later-0123456789abcdef"
LONG = 100_000  # tokens: a stream that a test ends itself
CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -addext subjectAltName=IP:127.0.0.1"
)


class Operated:
    """One server with everything that an operator can give it, and the places where it is given."""

    def __init__(self, folder: Path, manager: socket.socket) -> None:
        self.folder = folder
        self.keys, self.cert, self.key = folder / "keys", folder / "cert.pem", folder / "key.pem"
        self.socket = folder / "run" / "admin.sock"
        self.server: Server
        self._manager = manager
        self._heard: list[str] = []
        self._status = ""
        self._told: list[tuple[str, bool]] = []
        self.keys.write_text(f"first:{KEY}\n")
        self.keys.chmod(0o600)
        self.make_certificate("first")

    def make_certificate(self, name: str) -> None:
        made = [self.folder / f"{name}.{kind}" for kind in ("cert", "key")]
        command = [*CERTIFICATE.split(), "-subj", f"/CN={name}", "-out", str(made[0]), "-keyout", str(made[1])]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
        for path, place in zip(made, (self.cert, self.key)):
            path.rename(place)

    def heard(self, line: str) -> bool:
        """Whether the service manager has been sent this line since ``forget``."""
        self._listen()
        return line in self._heard

    def told(self) -> list[str]:
        """Each STATUS= beside which the watchdog was fed since ``forget``."""
        self._listen()
        return [status for status, is_fed in self._told if is_fed]

    def forget(self) -> None:
        self._listen()
        self._heard.clear()
        self._told.clear()

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                lines = self._manager.recv(4096).decode().split("\n")
                self._heard += lines
                self._status = next((line for line in lines if line.startswith("STATUS=")), self._status)
                self._told.append((self._status, "WATCHDOG=1" in lines))

    def shown_name(self) -> str:
        """The name in the certificate that a new connection is shown."""
        connection = self.server.connect()
        connection.connect()
        with connection.sock as tls:
            assert isinstance(tls, ssl.SSLSocket)
            subject: Any = tls.getpeercert()["subject"]
        return dict(pair for (pair,) in subject)["commonName"]

    def trust(self) -> None:
        """Whatever certificate lies there now, beside those that were trusted before."""
        assert self.server.tls is not None
        self.server.tls.load_verify_locations(self.cert)

    def asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(ask(str(self.socket), method, path, json.dumps(body).encode() if body else None))

    def drain(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "disagg", "drain", "--socket", str(self.socket), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """One server for this whole file; each test leaves it ready and empty."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command for certificates")
    folder = tmp_path_factory.mktemp("operated")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager,
        pytest.MonkeyPatch.context() as patch,
    ):
        manager.bind(str(folder / "notify"))
        (folder / "run").mkdir()
        result = Operated(folder, manager)
        patch.setenv("NOTIFY_SOCKET", str(folder / "notify"))
        patch.setenv("WATCHDOG_USEC", "400000")
        patch.setenv("RUNTIME_DIRECTORY", str(folder / "run"))
        tls = ("--tls-cert", str(result.cert), "--tls-key", str(result.key))
        with null_server("--kv-memory", "4MiB", "--api-key-file", str(result.keys), *tls, "--max-restarts", "100") as server:
            result.server = server
            server.headers = {"Authorization": f"Bearer {KEY}"}
            server.tls = ssl.create_default_context(cafile=str(result.cert))
            yield result


def is_full(requests: dict[str, int]) -> bool:
    return requests["decoding"] > 1 and requests["queued"] > 0


def unready_reasons(server: Server) -> list[str]:
    """Why it is not ready; empty while it is."""
    status, answer = server.request("GET", "/readyz")
    assert (status == 503) == bool(answer["reasons"])
    return answer["reasons"]


def test_a_service_manager_is_told_when_it_is_ready(operated: Operated) -> None:
    """READY=1 together with the ready line, then the watchdog is fed; no worker has the manager's address."""
    until(lambda: operated.heard("READY=1"), "READY=1 was sent")
    until(lambda: operated.heard("WATCHDOG=1"), "the watchdog is fed")
    assert operated.heard("STATUS=Serving null")
    for worker in operated.server.children:
        assert "NOTIFY_SOCKET" not in worker.environ()


def test_a_stranger_learns_whether_it_is_well_and_nothing_else(operated: Operated) -> None:
    """Health is open; generation, metrics and the status want a key, which never stands in the command line of anybody."""
    server = operated.server
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "headers", {})
        answers = {
            path: server.request("GET", path)[0] for path in ("/livez", "/readyz", "/health", "/metrics", "/v1/disagg/status")
        }
        assert answers == {"/livez": 200, "/readyz": 200, "/health": 200, "/metrics": 401, "/v1/disagg/status": 401}
        assert server.request("POST", "/v1/completions", {"prompt": "x"})[0] == 401
    assert len(server.complete("x", 5)) == 5
    assert 'disagg_key_requests_total{key="first"}' in server.request("GET", "/metrics")[1]


def test_keys_and_certificate_are_read_again_and_no_stream_is_cut(operated: Operated) -> None:
    """SIGHUP: new connections see the new certificate, new keys work, open connections stay. A broken file changes nothing."""
    server, pid = operated.server, operated.server.process.pid
    assert operated.shown_name() == "first"
    kept = server.connect()
    kept.request("GET", "/livez")
    assert kept.getresponse().read()
    socket_kept = kept.sock
    stream = server.stream("reloaded", LONG)
    assert stream.next_event()

    operated.make_certificate("second")
    operated.trust()
    operated.keys.write_text(f"first:{KEY}\nlater:{LATER_KEY}\n")
    operated.forget()
    os.kill(pid, signal.SIGHUP)
    until(lambda: operated.shown_name() == "second", "the new certificate is shown")
    assert operated.heard("RELOADING=1")
    until(lambda: operated.heard("READY=1"), "it has told that it is done")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "headers", {"X-Api-Key": LATER_KEY})
        assert server.request("GET", "/v1/models")[0] == 200
    kept.request("GET", "/livez")
    assert kept.getresponse().status == 200
    assert kept.sock is socket_kept
    kept.close()

    operated.keys.write_text("")
    operated.make_certificate("third")
    operated.trust()
    os.kill(pid, signal.SIGHUP)
    until(lambda: operated.shown_name() == "third", "a broken key file does not hold up the certificate")
    assert server.request("GET", "/v1/models")[0] == 200

    operated.key.write_text("no key")
    operated.forget()
    os.kill(pid, signal.SIGHUP)
    until(lambda: operated.heard("READY=1"), "it has looked at the broken files")
    assert operated.shown_name() == "third"
    assert server.request("GET", "/v1/models")[0] == 200
    assert stream.next_event()
    stream.close()
    server.wait_until_empty(1.0)
    operated.keys.write_text(f"first:{KEY}\n")
    operated.make_certificate("fourth")
    operated.trust()


def test_an_operator_ends_one_request_and_its_client_is_told(operated: Operated) -> None:
    """Over the admin socket, which only the server's user can open: an error event and [DONE]; the other stream goes on."""
    assert stat.S_IMODE(operated.socket.stat().st_mode) == 0o600
    streams = [operated.server.stream(f"stream {index}", LONG) for index in range(2)]
    ids = [json.loads(stream.next_event() or "")["id"] for stream in streams]
    assert {request["id"] for request in operated.asked("GET", "/requests")["requests"]} == {f"{id}-0" for id in ids}
    assert operated.asked("POST", "/abort", {"id": ids[0]})["aborted"] == 1
    *_, error, done = streams[0].read_to_end()
    assert (json.loads(error)["error"]["code"], done) == ("aborted", "[DONE]")
    assert streams[1].next_event()
    with pytest.raises(http.client.HTTPException, match="404"):
        operated.asked("POST", "/abort", {"id": ids[0]})
    for stream in streams:
        stream.close()
    operated.server.wait_until_empty(1.0)


def test_drained_by_command_it_stays_and_can_be_resumed(operated: Operated) -> None:
    """Not ready, 503 for new requests, the running stream to its end; --wait returns with it; --resume makes it ready again."""
    server = operated.server
    stream = server.stream("drained", LONG)
    assert stream.next_event()
    draining = operated.drain("--wait")
    until(lambda: unready_reasons(server) == ["draining"], "not ready")
    assert operated.asked("GET", "/v1/disagg/status")["draining"]
    assert server.request("POST", "/v1/completions", {"prompt": "late"})[0] == 503
    assert stream.next_event()
    assert draining.poll() is None, "it returned before the stream had ended"
    stream.close()
    out, _ = draining.communicate(timeout=DEADLINE_S)
    assert (draining.returncode, out) == (0, "Drained: nothing is running.\n")
    out, _ = operated.drain("--resume").communicate(timeout=DEADLINE_S)
    assert out == "Serving again.\n"
    assert unready_reasons(server) == []
    assert len(server.complete("again", 5)) == 5


@contextlib.contextmanager
def idle(operated: Operated) -> Iterator[None]:
    yield


@contextlib.contextmanager
def long_prefill(operated: Operated) -> Iterator[None]:
    prompts = [[65 + index] * 100_000 for index in range(24)]  # for as long as the manager may take to be told
    with busy(operated, prompts, 4, lambda counts: counts["prefilling"] + counts["queued"] > 0):
        yield


@contextlib.contextmanager
def full_pool(operated: Operated) -> Iterator[None]:
    """Streams decode while another waits for blocks that they have."""
    size = operated.server.worker("decode-0")["blocks"]["total"] * 16 // 3
    with busy(operated, [[65 + index] * size for index in range(4)], 40_000, is_full):
        yield


@contextlib.contextmanager
def busy(
    operated: Operated, prompts: list[list[int]], max_tokens: int, is_busy: Callable[[dict[str, int]], bool]
) -> Iterator[None]:
    """With these streams, and still in the same condition when the test has looked; the operator ends them."""
    server = operated.server
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        opened = [pool.submit(server.stream, prompt, max_tokens) for prompt in prompts]
        until(lambda: is_busy(server.status()["requests"]), "it is busy")
        try:
            yield
            assert is_busy(server.status()["requests"])
        finally:
            for request in operated.asked("GET", "/requests")["requests"]:
                with contextlib.suppress(http.client.HTTPException):  # it has just ended
                    operated.asked("POST", "/abort", {"id": request["id"]})
            for stream in opened:
                stream.result(DEADLINE_S).close()
    server.wait_until_empty(DEADLINE_S)


@contextlib.contextmanager
def signalled(operated: Operated, worker_id: str, number: int) -> Iterator[None]:
    os.kill(operated.server.worker(worker_id)["pid"], number)
    yield
    operated.server.wait_until_ready()


@contextlib.contextmanager
def draining(operated: Operated) -> Iterator[None]:
    operated.asked("POST", "/drain", {"wait_s": 0})
    yield
    operated.asked("POST", "/resume")


Condition = Callable[[Operated], contextlib.AbstractContextManager[None]]
# Condition, reasons of /readyz and /health, STATUS= beside which the watchdog is fed.
READINESS: dict[str, tuple[Condition, str, str]] = {
    "idle": (idle, "", "Serving null"),
    "a long prefill": (long_prefill, "", "Serving null"),
    "a full pool": (full_pool, "", "Serving null"),
    "a stopped worker": (
        lambda operated: signalled(operated, "decode-0", signal.SIGSTOP),
        "decode-0 is down: hung: .*",
        "Not ready: decode-0 is (down|starting).*",
    ),
    "a dead worker": (
        lambda operated: signalled(operated, "prefill-0", signal.SIGKILL),
        "prefill-0 is down: .*",
        "Not ready: prefill-0 is (down|starting).*",
    ),
    "draining": (draining, "draining", "Not ready: draining"),
}


@pytest.mark.parametrize(("condition", "reason", "status"), READINESS.values(), ids=READINESS)
def test_every_probe_tells_how_it_stands(operated: Operated, condition: Condition, reason: str, status: str) -> None:
    """Busy is ready; what is stopped, dead or draining is not, until it is replaced or resumed. /livez is 200 in any case.

    The watchdog is fed in all of them: the server itself turns, and ends or replaces its workers without being restarted.
    """
    server = operated.server
    server.wait_until_ready()
    operated.forget()
    until(lambda: operated.told()[-1:] == ["STATUS=Serving null"], "the manager has been told that it serves")
    operated.forget()
    seen: list[tuple[int, int, int, str]] = []

    def look() -> bool:
        livez, readyz, health = (server.request("GET", path) for path in ("/livez", "/readyz", "/health"))
        seen.append((livez[0], readyz[0], health[0], "; ".join(readyz[1]["reasons"])))
        return bool(re.fullmatch(reason, seen[-1][-1])) and readyz[0] == health[0]

    with condition(operated):
        until(look, f"ready, or not because of {reason!r}")
        until(lambda: any(re.fullmatch(f"STATUS={status}", said) for said in operated.told()), f"it is fed beside {status!r}")
        code = 503 if reason else 200
        assert seen[-1][:3] == (200, code, code), seen
        assert {livez for livez, *_ in seen} == {200}


def test_it_ends_as_a_service_should(operated: Operated) -> None:
    """SIGTERM with a stream: STOPPING=1, the stream to its end, exit code 0, and no socket left behind."""
    stream = operated.server.stream("the last", 3000)
    assert stream.next_event()
    operated.forget()
    assert terminate(operated.server) == 0
    assert stream.read_to_end()[-1] == "[DONE]"
    stream.close()
    assert operated.heard("STOPPING=1")
    assert not operated.socket.exists()


def test_what_would_expose_it_is_refused_before_anything_starts() -> None:
    """Off loopback without keys: one clear line that says what to do, exit code 2."""
    command = [sys.executable, "-m", "disagg", "serve", "--model", "null", "--port", "0", "--host", "0.0.0.0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2
    assert "everybody who can reach it could use it" in ended.stderr
    assert "--api-key-file" in ended.stderr
    assert "Traceback" not in ended.stderr
