"""What a service manager is told over $NOTIFY_SOCKET (sd_notify): ready, how it stands, that it lives, that it ends.

    STATUS=loading…, EXTEND_TIMEOUT_USEC ─▶ READY=1 ─▶ WATCHDOG=1, STATUS= … ─▶ RELOADING=1, READY=1 … ─▶ STOPPING=1

Without a service manager there is no socket and nothing is sent. The watchdog is fed only while the server makes progress:
a process that is alive but stuck is restarted as one that has died.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)

_INTERVAL_S = 2.0  # between looks, where no watchdog asks for shorter ones
_OF_THE_MOMENT = {"WATCHDOG", "EXTEND_TIMEOUT_USEC"}
_EXTENSION_S = 15.0  # how long a look is good for while loading or ending


@dataclass(frozen=True, slots=True)
class Condition:
    """How the server stands when it is looked at."""

    text: str  # one line for ``systemctl status``
    is_progressing: bool  # no worker is stuck
    is_passing: bool  # loading or ending: a phase for which the manager has a time limit


class ServiceManager:
    """The manager's socket. Never blocks and never raises once it exists: serving goes on whoever reads it."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Takes its variables out of ``environ``: they are for this process, and not for those that it starts."""
        address = environ.pop("NOTIFY_SOCKET", "")
        watchdog_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_watched = watchdog_us.isdigit() and pid in ("", str(os.getpid()))
        self.watchdog_s = int(watchdog_us) / 1e6 if is_watched else 0.0
        self._socket: socket.socket | None = None
        self._said = ""
        self._owed: list[str] = []
        self._is_heard = True
        if address.startswith(("/", "@")):
            self._address = address.replace("@", "\0", 1) if address[0] == "@" else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    @property
    def is_there(self) -> bool:
        return self._socket is not None

    def ready(self, text: str) -> None:
        self._send("READY=1", *self._status(text))

    def reloading(self) -> None:
        """``ready`` follows when it is done."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, text: str) -> None:
        self._send("STOPPING=1", *self._status(text))

    async def keep_told(self, look: Callable[[], Condition]) -> None:
        """Look and tell, at half of the watchdog's time, until cancelled."""
        interval_s = min(_INTERVAL_S, self.watchdog_s / 2) if self.watchdog_s else _INTERVAL_S
        while self.is_there:
            self.tell(look())
            await asyncio.sleep(interval_s)

    def tell(self, condition: Condition) -> None:
        lines = self._status(condition.text)
        if condition.is_progressing:
            if self.watchdog_s:
                lines.append("WATCHDOG=1")
            if condition.is_passing:
                lines.append(f"EXTEND_TIMEOUT_USEC={int(_EXTENSION_S * 1e6)}")
        self._send(*lines)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _status(self, text: str) -> list[str]:
        """Only what is new: each goes into the journal's index of the unit."""
        if text == self._said:
            return []
        self._said = text
        return ["STATUS=" + " ".join(text.split())]

    def _send(self, *lines: str) -> None:
        """What could not be sent (the manager is behind, or restarts) is owed until it can be, but for the watchdog's lines."""
        if self._socket is None or not (lines or self._owed):
            return
        named = {line.partition("=")[0]: line for line in (*self._owed, *lines)}  # the manager takes the first of a name
        try:
            self._socket.sendto("\n".join(named.values()).encode(), self._address)
            self._owed, self._is_heard = [], True
        except OSError as error:
            if self._is_heard:
                log.warning("service manager not told yet", lines=lines, reason=str(error))
            self._is_heard = False
            self._owed = [line for name, line in named.items() if name not in _OF_THE_MOMENT]
