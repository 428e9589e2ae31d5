"""disagg.status: the table and the exit codes, against a real HTTP server that says what it is told to."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from disagg import cli

WORKER = {
    "id": "prefill-0",
    "role": "prefill",
    "pid": 123,
    "epoch": 1,
    "state": "ready",
    "device": "cpu",
    "restarts": 0,
    "heartbeat_age_s": 0.2,
    "requests": {"waiting": 1, "running": 2},
    "blocks": {"total": 512, "free": 500, "reserved": 0, "filling": 0, "in_use": 0, "cached": 12},
    "decode_prefill_tokens": 0,
}
STATUS = {
    "run_id": "r1",
    "mode": "disagg",
    "model": "m",
    "draining": False,
    "workers": [WORKER, {**WORKER, "id": "decode-0", "role": "decode", "pid": None, "state": "down"}],
    "pairs": [
        {"prefill": "prefill-0", "decode": "decode-0", "transport": "shm", "gb_per_s": 4.125},
        {"prefill": "prefill-0", "decode": "decode-1", "transport": "shm", "gb_per_s": None},
    ],
    "requests": {"queued": 0, "prefilling": 3, "handing_off": 0, "decoding": 9},
}


class Server:
    """Answers each path with (status, JSON document), or what a function says at that moment. ``keys``: those that came."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {"/readyz": (200, {"status": "ready"}), "/v1/disagg/status": (200, STATUS)}
        self.keys: list[str | None] = []
        answers, keys = self.answers, self.keys

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                keys.append(self.headers["Authorization"])
                status, document = answers.get(self.path, (404, {}))
                body = document().encode() if callable(document) else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def test_a_ready_server_is_a_table_and_0(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Workers, blocks, requests and pairs, each in a column under its name."""
    assert cli.main(["status", "--url", server.url + "/"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{server.url}  ready"
    assert "prefilling 3" in lines[2]
    head, prefill, decode = lines[4:7]
    assert head.split()[:4] == ["worker", "role", "state", "pid"]
    assert " ".join(prefill.split()) == "prefill-0 prefill ready 123 cpu 1 0 1 2 total 512 free 500 cached 12"
    assert decode.split()[:4] == ["decode-0", "decode", "down", "-"]
    assert head.index("blocks") == prefill.index("total")
    assert [line.split() for line in lines[8:]] == [
        ["prefill", "decode", "transport", "GB/s"],
        ["prefill-0", "decode-0", "shm", "4.1"],
        ["prefill-0", "decode-1", "shm", "-"],
    ]


def test_a_server_that_is_not_ready_says_why_and_1(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The reasons of /readyz are on the first line."""
    server.answers["/readyz"] = (503, {"reasons": ["decode-0 is down", "draining"]})
    server.answers["/v1/disagg/status"] = (200, {**STATUS, "draining": True, "pairs": []})
    assert cli.main(["status", "--url", server.url]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"{server.url}  not ready (decode-0 is down; draining), draining"


def test_json_is_the_servers_answer_with_its_readiness(server: Server, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """--json loses nothing of what the server said."""
    server.answers["/readyz"] = (503, {"reasons": ["no"]})
    assert cli.main(["status", "--url", server.url, "--json"]) == 1
    assert json.loads(capfdbinary.readouterr().out) == {"ready": False, "reasons": ["no"], **STATUS}


@pytest.mark.parametrize("answer", [(401, {"error": {"message": "no key"}}), (200, {"workers": 3}), (200, []), (404, {})])
def test_another_kind_of_answer_is_one_line_and_2(
    server: Server, answer: tuple[int, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Something else that listens on the port is not taken for a server."""
    server.answers["/v1/disagg/status"] = answer
    assert cli.main(["status", "--url", server.url]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"disagg: error: no status from {server.url}")
    assert captured.err.count("\n") == 1


def test_nobody_there_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A closed port and a URL that is none are told in one line."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        assert cli.main(["status", "--url", f"http://127.0.0.1:{unused.getsockname()[1]}"]) == 2
    assert "refused" in capsys.readouterr().err
    assert cli.main(["status", "--url", "box:8000"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_nodes_have_a_table_of_their_own(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Where workers are on other nodes, the table says on which, and whether the node is there."""
    far = {**WORKER, "id": "decode-1", "role": "decode", "node": "box-2"}
    nodes = [{"name": "box-2", "connected": True, "address": "10.0.0.2:5000", "joined": 2, "late_messages": 0}]
    server.answers["/v1/disagg/status"] = (200, {**STATUS, "workers": [WORKER, far], "nodes": nodes, "degraded": True})
    assert cli.main(["status", "--url", server.url]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "(degraded)," in lines[1]
    assert lines[4][:3] == ["worker", "role", "node"]
    assert [line[2] for line in lines[5:7]] == ["-", "box-2"]
    assert ["box-2", "connected", "10.0.0.2:5000", "2"] in lines


def test_the_first_key_of_a_file_is_shown_to_the_server(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file may be the server's own, with names and comments; a refusal says what to do."""
    path = tmp_path / "keys"
    path.write_text("# ours\n\nme:0123456789abcdef\nyou:fedcba9876543210\n")
    path.chmod(0o600)
    assert cli.main(["status", "--url", server.url, "--api-key-file", str(path)]) == 0
    assert server.keys == ["Bearer 0123456789abcdef"] * 2
    server.answers["/v1/disagg/status"] = (401, {})
    assert cli.main(["status", "--url", server.url]) == 2
    assert "--api-key-file" in capsys.readouterr().err
