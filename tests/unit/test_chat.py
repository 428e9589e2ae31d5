"""disagg.chat: a streamed conversation with a real HTTP server that follows a script, and the life of a server of its own."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from disagg import chat, cli
from disagg.errors import StartupError

QUIET = Console(file=io.StringIO())


def chunk(text: str | None = None, **fields: Any) -> bytes:
    return (
        b"data: "
        + json.dumps({"choices": [{"delta": {"content": text}}] if text is not None else [], **fields}).encode()
        + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"
USAGE = chunk(usage={"completion_tokens": 2})


class Server:
    """Streams ``events`` for each completion; keeps the requests; ``gone`` is set when a client leaves before the end."""

    def __init__(self) -> None:
        self.events: list[bytes] = [chunk(""), b": keepalive\n\n", chunk("Hel"), chunk("lo"), USAGE, DONE]
        self.status = 200
        self.endless = False
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.gone = threading.Event()
        server = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.keys.append(self.headers["Authorization"])
                self.answer(200, b'{"data": [{"id": "tiny"}]}')

            def do_POST(self) -> None:
                server.keys.append(self.headers["Authorization"])
                server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if server.status != 200:
                    self.answer(server.status, server.events[0])
                    return
                self.send_response(200)
                self.end_headers()
                for event in server.events:
                    self.wfile.write(event)
                try:
                    while server.endless:
                        self.wfile.write(b": keepalive\n\n")
                except OSError:
                    server.gone.set()

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.endless = False
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def conversation(server: Server, system: str | None = None, **options: Any) -> chat.Conversation:
    return chat.Conversation(chat.Client(server.url), system, options, "tiny")


# ------------------------------------------------------------------------------------------------ the conversation


def test_an_answer_streams_and_joins_the_conversation(server: Server) -> None:
    """Each piece is shown as it comes; question and answer are part of the next request; usage gives the number of tokens."""
    talk, shown = conversation(server, "Be brief.", temperature=0.0), list[str]()
    answer = talk.ask("Hi", shown.append)
    assert shown == ["Hel", "lo"]
    assert (answer.text, answer.num_tokens) == ("Hello", 2)
    assert 0 < answer.ttft_s <= answer.seconds
    talk.ask("Again", shown.append)
    assert server.requests[1] == {
        "model": "tiny",
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Again"},
        ],
    }
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_ctrl_c_closes_the_connection_and_keeps_what_has_come(server: Server) -> None:
    """The server notices that its client has gone; the conversation goes on from the partial answer."""
    server.events, server.endless = [chunk("Once")], True

    def interrupt(_piece: str) -> None:
        raise KeyboardInterrupt

    talk = conversation(server)
    assert talk.ask("A long story", interrupt).text == "Once"
    assert talk.messages[-1] == {"role": "assistant", "content": "Once"}
    assert server.gone.wait(10)


@pytest.mark.parametrize(
    ("status", "events", "message"),
    [
        (200, [chunk("Hel"), b'data: {"error": {"message": "worker died"}}\n\n', DONE], "worker died"),
        (200, [chunk("Hel")], "in the middle of the answer"),
        (200, [b"data: {\n\n"], "does not speak the OpenAI API"),
        (200, [b'data: {"choices": 3}\n\n'], "does not speak the OpenAI API"),
        (429, [b'{"error": {"message": "queue is full"}}'], "HTTP 429: queue is full"),
        (502, [b"<html>"], "HTTP 502: Bad Gateway"),
        (401, [b'{"error": {"message": "no such key"}}'], r"HTTP 401: no such key \(--api-key-file FILE\)"),
    ],
)
def test_a_failed_answer_says_why_and_leaves_no_trace(server: Server, status: int, events: list[bytes], message: str) -> None:
    """Refusals, error events, broken streams and foreign servers are ChatErrors; the question can be asked again."""
    server.status, server.events = status, events
    talk = conversation(server)
    with pytest.raises(chat.ChatError, match=message):
        talk.ask("Hi", lambda piece: None)
    assert talk.messages == []


@pytest.mark.parametrize("url", ["box:8000", "ftp://box", "http://"])
def test_a_url_is_checked(url: str) -> None:
    """What is no http URL is refused with an example."""
    with pytest.raises(chat.ChatError, match="no URL such as"):
        chat.Client(url)


def test_the_rate_leaves_the_first_token_out() -> None:
    """tok/s is decode's: the first token's time is the TTFT. One token has no rate."""
    assert chat.Answer("x", ttft_s=1.0, seconds=2.0, num_tokens=11).summary() == "10.0 tok/s, TTFT 1000 ms, 11 tokens"
    assert chat.Answer("x", ttft_s=1.0, seconds=1.0, num_tokens=1).summary() == "TTFT 1000 ms, 1 tokens"


# ------------------------------------------------------------------------------------------------ the terminal


def test_a_piped_question_gets_exactly_the_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """stdout has the answer and a newline, nothing else: it can be piped on."""
    server.events[2] = chunk("[b]Hel\x1b")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why?\nReally?\n"))
    assert cli.main(["chat", "--url", server.url + "/v1/"]) == 0
    assert capsys.readouterr() == ("[b]Hel\x1blo\n", "")
    assert server.requests[0]["messages"] == [{"role": "user", "content": "Why?\nReally?"}]


def test_the_first_key_of_a_file_is_shown_to_a_server_that_wants_one(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With each request, from a file as ``status`` takes it. One that holds no key is an error before the first request."""
    path = tmp_path / "keys"
    path.write_text("# ours\nme:0123456789abcdef\nyou:fedcba9876543210\n")
    path.chmod(0o600)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why?"))
    assert cli.main(["chat", "--url", server.url, "--api-key-file", str(path)]) == 0
    assert server.keys == ["Bearer 0123456789abcdef"] * 2
    path.write_text("me:0123456789äbcdef\n")
    assert cli.main(["chat", "--url", server.url, "--api-key-file", str(path)]) == 2
    assert "characters that no key has" in capsys.readouterr().err
    assert len(server.keys) == 2


def test_an_empty_question_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started for nothing."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert cli.main(["chat"]) == 1
    assert "nothing was asked" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def answering(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """Stands in for input(): each line in turn, then Ctrl-D."""
    rest = iter([*lines, EOFError])

    def read(_prompt: str) -> str:
        line = next(rest)
        if isinstance(line, str):
            return line
        raise line

    return read


def test_the_prompt_goes_on_until_the_user_leaves(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands are not sent to the model, an error does not end the conversation, /reset forgets, Ctrl-D leaves with 0."""
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", answering("Hi", "", "/what", "/help", "/reset", "Again"))
    assert cli.main(["chat", "--url", server.url]) == 0
    assert [request["messages"] for request in server.requests] == [
        [{"role": "user", "content": text}] for text in ("Hi", "Again")
    ]
    captured = capsys.readouterr()
    assert captured.out.count("Hello") == 2
    assert captured.err.count("TTFT") == 2
    assert captured.err.count("/reset") == 3

    server.status, server.events = 429, [b'{"error": {"message": "[queue] is full"}}']
    monkeypatch.setattr("builtins.input", answering("Hi", "/quit", "never sent"))
    assert cli.main(["chat", "--url", server.url]) == 0
    assert "[queue] is full" in capsys.readouterr().err
    assert len(server.requests) == 3


def test_ctrl_c_at_the_prompt_leaves(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs that it could stop, so it means: leave."""
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", answering(KeyboardInterrupt))
    assert cli.main(["chat", "--url", server.url]) == 0
    assert server.requests == []


def test_a_model_cannot_steer_the_terminal(server: Server) -> None:
    """On a terminal escape sequences are dropped from what a model says; newlines, tabs and other scripts stay."""
    server.events = [chunk("a\x1b[2Jb\x07\u009b\n\tö你"), DONE]
    screen = Console(file=io.StringIO(), force_terminal=True)
    chat._show_answer(conversation(server), "Hi", screen)
    assert screen.file.getvalue() == "a[2Jb\n\tö你\n"  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ a server of its own

READY = '{"level": "info", "event": "ready", "url": "http://127.0.0.1:1"}'


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes ``disagg serve`` the given shell script; its log goes to stderr."""

    def use(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return use


def say(*lines: str) -> str:
    return "\n".join(f"echo '{line}' >&2" for line in lines) + "\n"


def test_a_server_is_ready_when_its_log_says_so(program: Callable[[str], None]) -> None:
    """Loading events become bars, foreign lines are passed over, the URL is the one that was announced."""
    loading = [f'{{"event": "loading", "worker": "w{i}", "fraction": 0.5, "what": "weights"}}' for i in range(2)]
    program(say("a warning of some library", *loading, READY) + "exec sleep 60")
    with chat.local_server([], QUIET) as server:
        assert server.url == "http://127.0.0.1:1"
        assert set(server.bars) == {"w0", "w1"}
        assert server.child.poll() is None
    assert server.child.returncode == -signal.SIGTERM


def test_the_flags_are_handed_on_and_the_log_stays_readable(program: Callable[[str], None], tmp_path: Path) -> None:
    """A free port unless one was asked for; JSON at info level, and nothing that keeps us out, whatever was asked for."""
    program(f'echo "$@" > {tmp_path}/argv\n' + say(READY))
    with chat.local_server(["--port=9", "--log-format=console"], QUIET) as server:
        server.child.wait(10)
    argv = (tmp_path / "argv").read_text().split()
    assert argv[:6] == ["-m", "disagg", "serve", "--port=0", "--port=9", "--log-format=console"]
    assert {"--log-format=json", "--log-level=info", "--host=127.0.0.1", "--api-key-file="} <= set(argv[6:])


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (['{"level": "error", "event": "worker down", "worker": "w", "cause": "no memory"}'], "worker down: no memory"),
        (["Traceback", "disagg: error: port 80 is taken"], "did not start: port 80 is taken"),
        ([], "exit code 3"),
    ],
)
def test_a_server_that_does_not_start_says_why(program: Callable[[str], None], log: list[str], message: str) -> None:
    """Its last error is the message, whichever form it had."""
    program(say(*log) + "exit 3")
    with pytest.raises(StartupError, match=message), chat.local_server([], QUIET):
        pass


def test_a_server_that_ignores_sigterm_is_killed(program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving never hangs and leaves nothing behind."""
    monkeypatch.setattr(chat, "STOP_TIMEOUT_S", 0.05)
    program("trap '' TERM\n" + say(READY) + "while :; do read line < /dev/zero; done")
    with pytest.raises(KeyboardInterrupt), chat.local_server([], QUIET) as server:
        raise KeyboardInterrupt
    assert server.child.returncode == -signal.SIGKILL


def test_sigterm_to_the_chat_ends_its_server(program: Callable[[str], None]) -> None:
    """A signal that would end this process at once first ends the child; afterwards signals are as before."""
    program(say(READY) + "exec sleep 60")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, chat.local_server([], QUIET) as server:
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert server.child.returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_server_that_dies_ends_the_conversation(
    program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Server
) -> None:
    """There is nobody left to talk to: its last error is shown and the exit code is 1."""
    program(say(READY.replace("http://127.0.0.1:1", server.url), "out of memory"))
    server.status, server.events = 500, [b"{}"]
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", answering(*["Hi"] * 10_000))
    assert cli.main(["chat"]) == 1
    assert "the server has ended" in capsys.readouterr().err
