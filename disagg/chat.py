"""``disagg chat``: a conversation in the terminal, with a running server or with one started just for it.

A server of its own is a child process, ``disagg serve`` on a free port. Its log tells how far each worker has loaded and, when
all is ready, the URL. It never outlives the conversation: every way out of ``local_server`` ends it, and should this process be
killed the kernel does.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from disagg.errors import DisaggError, StartupError

READ_TIMEOUT_S = 120.0  # a live stream is never silent for as long: the server sends comments between tokens
STOP_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1
_PRIVATE = (  # whatever a configuration file says for the server that is meant for others
    "--host=127.0.0.1",
    "--api-key-file=",
    "--tls-cert=",
    "--tls-key=",
    "--admin-socket=off",
    "--max-streams-per-key=0",
    "--requests-per-minute=0",
    "--cluster-listen=",
    "--log-format=json",
    "--log-level=info",
)
_HELP = "/reset  forget the conversation    /quit  leave (or Ctrl-D)    Ctrl-C  stop the answer; at the prompt, leave"
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Not sent to a terminal: a model must not be able to move its cursor or set its title."""


class ChatError(DisaggError):
    """The server refused the request, failed in the middle of its answer, or cannot be reached."""


def run(
    *,
    url: str | None,
    key: str,
    serve_arguments: Sequence[str],
    model: str | None,
    system: str | None,
    options: Mapping[str, Any],
) -> int:
    """Talk until the user leaves; return the exit code.

    ``url``: a running server, which is shown ``key`` unless that is empty; or None to start one with ``serve_arguments``.
    ``options`` go into each request as they are.
    When stdin is no terminal its whole content is one question. Raises StartupError when the server does not start.
    """
    screen, notices = Console(highlight=False), Console(stderr=True, highlight=False)
    is_interactive = sys.stdin.isatty()
    question = "" if is_interactive else sys.stdin.read().strip()
    if not is_interactive and not question:
        raise ChatError("nothing was asked: standard input is empty")
    with contextlib.ExitStack() as stack:
        server = None if url else stack.enter_context(local_server(serve_arguments, notices))
        client = Client(server.url if server else url or "", key)
        conversation = Conversation(client, system, options, model or client.first_model())
        if is_interactive:
            return _converse(conversation, screen, notices, server)
        _show_answer(conversation, question, screen)
    return 0


# ------------------------------------------------------------------------------------------------ the conversation


@dataclass
class Answer:
    """One streamed answer, as far as it has come."""

    text: str = ""
    ttft_s: float = 0.0
    seconds: float = 0.0  # from the request to the last token
    num_tokens: int = 0

    def summary(self) -> str:
        decode_s = self.seconds - self.ttft_s
        rate = f"{(self.num_tokens - 1) / decode_s:.1f} tok/s, " if self.num_tokens > 1 and decode_s > 0 else ""
        return f"{rate}TTFT {self.ttft_s * 1000:.0f} ms, {self.num_tokens} tokens"


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    """One event of a stream; an error instead of a stream has the same envelope."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class Client:
    """The two calls of the OpenAI API that a conversation needs, over ``http.client``."""

    def __init__(self, url: str, key: str = "") -> None:
        """Raises ChatError for something that is no http or https URL."""
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"{url!r} is no URL such as http://127.0.0.1:8000")
        self._connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._netloc, self._path = parts.netloc, parts.path
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def first_model(self) -> str:
        with self._response("GET", "/v1/models", None) as response:
            models = msgspec.json.decode(response.read(), type=_Models).data
        if not models:
            raise ChatError(f"{self.url} has no model")
        return models[0].id

    def stream(self, body: Mapping[str, Any]) -> Generator[_Chunk, None, None]:
        """The chunks of a streamed chat completion. Closing the iterator closes the connection, which aborts the request."""
        with self._response("POST", "/v1/chat/completions", body) as response:
            for line in response:
                payload = line.removeprefix(b"data: ").strip() if line.startswith(b"data: ") else b""
                if payload == b"[DONE]":
                    return
                if payload:
                    chunk = msgspec.json.decode(payload, type=_Chunk)
                    if chunk.error:
                        raise ChatError(chunk.error.message)
                    yield chunk
        raise ChatError("the connection ended in the middle of the answer")

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection_type(self._netloc, timeout=READ_TIMEOUT_S)
        payload = None if body is None else msgspec.json.encode(body)
        try:
            connection.request(method, self._path + path, payload, self._headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise ChatError(_refusal(response.status, response.read()))
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"{self.url}: {error}") from error
        except msgspec.DecodeError as error:
            raise ChatError(f"{self.url} does not speak the OpenAI API") from error
        finally:
            connection.close()


def _refusal(status: int, body: bytes) -> str:
    """The message in OpenAI's error envelope, or just the status."""
    try:
        error = msgspec.json.decode(body, type=_Chunk).error
    except msgspec.DecodeError:
        error = None
    hint = " (--api-key-file FILE)" if status == 401 else ""
    return f"HTTP {status}: {error.message if error else http.client.responses.get(status, 'no reason given')}{hint}"


class Conversation:
    """The messages so far, and how to ask for the next one."""

    def __init__(self, client: Client, system: str | None, options: Mapping[str, Any], model: str) -> None:
        self._client = client
        self._options = {**options, "model": model}
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = [*self._system]

    def reset(self) -> None:
        self.messages = [*self._system]

    def ask(self, question: str, show: Callable[[str], None]) -> Answer:
        """Stream the answer to ``show``, piece by piece, and remember both.

        Ctrl-C (KeyboardInterrupt) ends the answer; what has come of it is kept. A question that got no answer is forgotten,
        so that it can be asked again. Raises ChatError.
        """
        answer, start = Answer(), time.perf_counter()
        self.messages.append({"role": "user", "content": question})
        body = {**self._options, "messages": self.messages, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with contextlib.closing(self._client.stream(body)) as chunks, contextlib.suppress(KeyboardInterrupt):
                for chunk in chunks:
                    for choice in chunk.choices:
                        piece = choice.delta.content
                        if piece:
                            answer.seconds = time.perf_counter() - start
                            answer.ttft_s = answer.ttft_s or answer.seconds
                            answer.num_tokens += 1  # an estimate, until the usage comes
                            answer.text += piece
                            show(piece)
                    if chunk.usage:
                        answer.num_tokens = chunk.usage.completion_tokens
        except ChatError:
            self.messages.pop()
            raise
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()
        return answer


def _converse(conversation: Conversation, screen: Console, notices: Console, server: LocalServer | None) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() its history and line editing; Python can be built without it
    notices.print(_HELP, style="dim")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            screen.print()
            return 0
        match line:
            case "":
                pass
            case "/quit":
                return 0
            case "/reset":
                conversation.reset()
            case _ if line.startswith("/"):
                notices.print(_HELP, style="dim")
            case _:
                try:
                    answer = _show_answer(conversation, line, screen)
                    notices.print(answer.summary(), style="dim")
                except ChatError as error:
                    notices.print(f"error: {error}", style="red", markup=False)
                    if server and server.child.poll() is not None:
                        raise ChatError(f"the server has ended: {server.last_error}") from error


def _show_answer(conversation: Conversation, question: str, screen: Console) -> Answer:
    def show(piece: str) -> None:
        screen.file.write(piece.translate(_CONTROLS) if screen.is_terminal else piece)  # as it is: no markup, no wrapping
        screen.file.flush()

    try:
        return conversation.ask(question, show)
    finally:
        show("\n")


# ------------------------------------------------------------------------------------------------ a server of its own


@dataclass
class LocalServer:
    """The child process and what its log has told so far."""

    child: subprocess.Popen[str]
    progress: Progress
    url: str = ""
    last_error: str = ""
    bars: dict[str, TaskID] = field(default_factory=dict)
    settled: threading.Event = field(default_factory=threading.Event)  # it is ready, or it has ended

    def read_log(self, log: TextIO) -> None:
        """Follow the log to its end: somebody has to, or the server would block on a full pipe."""
        with log:
            for line in log:
                event = _parse(line)
                if event.get("level") in ("error", "critical"):
                    self.last_error = ": ".join(
                        str(event[key]) for key in ("event", "cause", "reason", "error") if event.get(key)
                    )
                elif "event" not in event and line.strip():
                    self.last_error = line.strip().removeprefix(
                        "disagg: error: "
                    )  # the command's own last words, or a traceback's
                elif event.get("event") == "loading":
                    self._advance(event)
                elif event.get("event") == "ready":
                    self.url = event["url"]
                    self.settled.set()
        self.settled.set()

    def _advance(self, event: Mapping[str, Any]) -> None:
        worker = event["worker"]
        if worker not in self.bars:
            self.bars[worker] = self.progress.add_task(worker, total=1.0, what="")
        self.progress.update(self.bars[worker], completed=event["fraction"], what=event["what"])


def _parse(line: str) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return event if isinstance(event, dict) else {}


@contextlib.contextmanager
def local_server(serve_arguments: Sequence[str], notices: Console) -> Iterator[LocalServer]:
    """A ready server on a free port, for the length of the context. Raises StartupError with the reason when it ends early."""
    command = [sys.executable, "-m", "disagg", "serve", "--port=0", *serve_arguments, *_PRIVATE]
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP):
            stack.callback(signal.signal, number, signal.signal(number, _exit))
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # the terminal's Ctrl-C stops an answer, not the server
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        assert child.stderr is not None
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"), TimeElapsedColumn())
        progress = Progress(*columns, console=notices, transient=True, disable=not notices.is_terminal)
        server = LocalServer(child, progress)
        reader = threading.Thread(target=server.read_log, args=(child.stderr,), name="server log", daemon=True)
        stack.callback(reader.join, STOP_TIMEOUT_S)
        stack.enter_context(_ending(child))
        reader.start()
        if notices.is_terminal:
            notices.print("starting a server …", style="dim")
        with progress:
            server.settled.wait()
        if not server.url:
            raise StartupError(f"the server did not start: {server.last_error or f'exit code {child.wait()}'}")
        yield server


@contextlib.contextmanager
def _ending(child: subprocess.Popen[str]) -> Iterator[None]:
    """End ``child`` on the way out: SIGTERM, and SIGKILL when it has not gone within STOP_TIMEOUT_S."""
    try:
        yield
    finally:
        child.terminate()
        try:
            child.wait(STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C: now
            child.kill()
            child.wait()


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
