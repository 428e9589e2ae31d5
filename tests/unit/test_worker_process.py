"""The loop of a worker process, around a real worker, on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from disagg import worker_process
from disagg.channel import ChannelClosed
from disagg.cores import Cores, Occupancy, Turns
from disagg.engine.null import NullEngine
from disagg.messages import HEARTBEAT_S, Abort, Message, Prefill, Reserve
from disagg.request import SamplingParams
from disagg.worker import Worker
from tests.sim.world import Memory, make_layout, worker_settings

STEP_S = 0.01
END_S = 5.0
PARAMS = SamplingParams(max_tokens=150)
STREAM = Prefill(1, [1, 2, 3], 3, PARAMS, None)
HAND_OVER = Reserve(1, [1, 2, 3], 3, PARAMS, END_S)

Script = Sequence[tuple[float, Message]]


class Parent:
    """The worker's connection, and its clock: it goes on while the worker waits, and by STEP_S between two looks."""

    num_received = 0

    def __init__(self, script: Script) -> None:
        self._script = [*script, (END_S, None)]
        self._now_s = 0.0

    def monotonic(self) -> float:
        return 1000.0 + self._now_s

    def send(self, message: Message) -> None:
        pass

    def receive(self, timeout_s: float, wake_fd: int) -> list[tuple[Message, list[int]]]:
        at_s, message = self._script[0]
        latest_s = self._now_s + max(timeout_s, STEP_S)
        if latest_s < at_s:
            self._now_s = latest_s
            return []
        self._now_s = max(self._now_s, at_s)
        if message is None:
            raise ChannelClosed
        del self._script[0]
        return [(message, [])]


class Compiler:
    """When it was started, in seconds."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self.started_s: float | None = None

    def start(self) -> None:
        if self.started_s is None:
            self.started_s = self._parent.monotonic() - 1000.0


def started_s(script: Script, monkeypatch: pytest.MonkeyPatch) -> float | None:
    parent: Any = Parent(script)
    compiler: Any = Compiler(parent)
    settings, layout = worker_settings("d0", "decode"), make_layout()
    pool, transports, _ = Memory().build(settings, layout, 64)
    worker = Worker(settings, NullEngine(layout), pool, transports, parent.send, parent.monotonic)
    monkeypatch.setattr(worker_process, "time", parent)
    turns = Turns(Occupancy(), Cores([], []), 0.0)
    with pytest.raises(ChannelClosed):
        worker_process._run(parent, worker, transports, lambda: None, turns, compiler)
    return compiler.started_s


@pytest.mark.parametrize(
    ("script", "begin_s", "end_s"),
    [
        pytest.param([], HEARTBEAT_S, HEARTBEAT_S, id="nothing"),
        pytest.param([(0.1, STREAM)], 1.5 + HEARTBEAT_S, 1.7 + HEARTBEAT_S, id="a stream"),
        pytest.param([(0.1, STREAM), (1.0, Abort(1))], 1.0 + HEARTBEAT_S, 1.1 + HEARTBEAT_S, id="a stream that is aborted"),
        pytest.param([(0.1, HAND_OVER), (3.0, Abort(1))], 3.0, 3.0 + HEARTBEAT_S, id="a hand-over whose bytes never come"),
    ],
)
def test_the_vocabulary_is_read_when_the_worker_is_idle(
    script: Script, begin_s: float, end_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the interpreter, so not while anything is under way, and not before a heartbeat's time has passed without work."""
    found_s = started_s(script, monkeypatch)
    assert found_s is not None
    assert begin_s - STEP_S < found_s < end_s + 3 * STEP_S


def test_a_worker_that_is_never_idle_reads_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that follow each other within less than a heartbeat keep it busy, as one that goes on does."""
    short = SamplingParams(max_tokens=3)
    script = [(0.1 + 0.8 * HEARTBEAT_S * number, Prefill(number, [1, 2, 3], 3, short, None)) for number in range(25)]
    assert script[-1][0] > END_S - HEARTBEAT_S
    assert started_s(script, monkeypatch) is None
