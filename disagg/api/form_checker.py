"""Has forms tried out by a process of its own (``disagg.grammar_process``), and remembers what was found.

    form ─▶ known? ─▶ the quick lane: QUICK_S of processor time ─▶ the slow lane: CPU_S ─▶ known from now on

Nearly all forms pass in the quick lane, within milliseconds, so those that take long wait for each other and hold up nobody else.
A client that leaves frees its place in a lane only when its form has been tried: by coming and leaving nobody gets more of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections import OrderedDict
from functools import partial
from typing import cast

from disagg.api.structured import Form, refused
from disagg.errors import OverloadedError, UnavailableError

QUICK_S = 0.01
CPU_S = 0.3
"""Of processor time, so that a busy host does not refuse what an idle one takes. A worker's streams pause for as long, once."""

_WAIT_S = 15.0  # for everything: the vocabulary, both lanes
_LOAD_S = 60.0
_HANG_S = 10.0  # without an answer: far above what one may take, for a host where the process hardly gets to run
_NUM_REMEMBERED = 1024
_TOO_SLOW = "takes too long to compile; ask for something simpler"

Answer = asyncio.Future[str | None]


class FormChecker:
    """``model``: what the process reads its vocabulary from. It is started with ``start`` or by the first form."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._lanes = ((asyncio.Semaphore(), QUICK_S, None), (asyncio.Semaphore(), CPU_S, _TOO_SLOW))
        self._starting = asyncio.Lock()
        self._process: _GrammarProcess | None = None
        self._is_closed = False
        self._faults: OrderedDict[bytes, str] = OrderedDict()  # by the grammar's digest; "" where it passed

    async def start(self) -> None:
        """Begin to load the vocabulary, so that the first form need not wait for it."""
        await self._running()

    async def check(self, form: Form) -> None:
        """Raises InvalidRequestError for a form that no answer can have.

        And OverloadedError or UnavailableError when it cannot be looked at now.
        """
        for part in form.parts:
            await self.check(part)
        key = hashlib.blake2b(form.grammar.encode("utf-8", "replace")).digest()
        try:
            async with asyncio.timeout(_WAIT_S):
                fault = await self._fault(key, form.grammar)
        except TimeoutError:
            raise OverloadedError("too many forms of answers are waiting to be compiled", retry_after_s=1.0) from None
        except ConnectionError as error:
            raise UnavailableError(f"forms of answers cannot be compiled now: {error}") from error
        if fault:
            raise refused(form.param, fault)

    async def aclose(self) -> None:
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
            await self._process.has_ended.wait()

    async def _fault(self, key: bytes, grammar: str) -> str:
        """What is wrong with ``grammar``, "" if nothing is. Raises ConnectionError."""
        if key in self._faults:
            self._faults.move_to_end(key)
            return self._faults[key]
        for lane, cpu_s, fault_of_the_slow in self._lanes:
            answer: Answer | None = None
            await lane.acquire()
            try:
                if key in self._faults:  # by now: clients often come with one form all at once
                    return self._faults[key]
                process = await self._running()
                await asyncio.shield(process.is_ready)
                answer = process.ask(grammar, cpu_s)
                answer.add_done_callback(partial(self._learn, key, lane, fault_of_the_slow))
            finally:
                if answer is None:
                    lane.release()
            if (fault := await asyncio.shield(answer)) is not None:
                return fault
        return _TOO_SLOW

    def _learn(self, key: bytes, lane: asyncio.Semaphore, fault_of_the_slow: str | None, answer: Answer) -> None:
        """Before whoever waits for the lane goes on, and also when the one who asked has left."""
        lane.release()
        if answer.exception() is not None:
            return
        fault = fault_of_the_slow if answer.result() is None else answer.result()
        if fault is not None:
            self._faults[key] = fault
            if len(self._faults) > _NUM_REMEMBERED:
                self._faults.popitem(last=False)

    async def _running(self) -> _GrammarProcess:
        async with self._starting:
            if self._is_closed:
                raise ConnectionError("the server is ending")
            if self._process is None or self._process.has_ended.is_set():
                command = [sys.executable, "-P", "-m", "disagg.grammar_process", self._model, str(os.getpid())]
                try:
                    _, self._process = await asyncio.get_running_loop().subprocess_exec(
                        _GrammarProcess,
                        *command,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=None,
                        start_new_session=True,  # the terminal's signals are for the server
                    )
                except OSError as error:
                    raise ConnectionError(f"no process can be started: {error}") from error
            return self._process


class _GrammarProcess(asyncio.SubprocessProtocol):
    """One life of the process. Whatever is still owed when it ends raises ConnectionError."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.is_ready: Answer = self._loop.create_future()
        self.has_ended = asyncio.Event()
        self._answers: dict[int, Answer] = {}
        self._num_asked = 0
        self._rest = b""
        self._transport: asyncio.SubprocessTransport | None = None
        self._kill_if_overdue(self.is_ready, _LOAD_S)

    def ask(self, grammar: str, cpu_s: float) -> Answer:
        """What is wrong with ``grammar``, "" for nothing; None when ``cpu_s`` of processor time are not enough to tell."""
        assert self._transport is not None
        answer: Answer = self._loop.create_future()
        if self.has_ended.is_set():
            _break(answer)
            return answer
        self._num_asked += 1
        self._answers[self._num_asked] = answer
        self._kill_if_overdue(answer, _HANG_S)
        pipe = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        pipe.write(json.dumps([self._num_asked, grammar, cpu_s]).encode() + b"\n")
        return answer

    def kill(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)  # uvloop's is none by inheritance

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self.is_ready.done():
                self.is_ready.set_result("")
                continue
            number, fault = json.loads(line)
            self._answers.pop(number).set_result(fault)

    def process_exited(self) -> None:
        self.has_ended.set()
        for owed in (self.is_ready, *self._answers.values()):
            if not owed.done():
                _break(owed)
        if self._transport is not None:
            self._transport.close()

    def _kill_if_overdue(self, owed: Answer, limit_s: float) -> None:
        timer = self._loop.call_later(limit_s, self.kill)
        owed.add_done_callback(lambda _: timer.cancel())


def _break(owed: Answer) -> None:
    owed.set_exception(ConnectionError("the process that does it has ended; the next one is being started"))
    owed.exception()  # has been seen: whoever asked may have left
