"""The connection between two nodes: a session on a TCP socket, its deadlines, and how each side notices that the other is gone.

    connected ─▶ handshake ─▶ open ─▶ begin_lease ─▶ … ─▶ closed by its owner, or with the cause told to its owner

Once the lease has begun both sides beat. Silence for ``lease_s`` ends the link on each side by itself, so both know without a
word that nothing of it is in force any more.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Callable
from typing import Protocol, cast

from disagg.credentials import load_certificate
from disagg.errors import ConfigError, DisaggError, LinkError
from disagg.session import Beat, LinkMessage, Session, Side

HANDSHAKE_S = 5.0

_BEAT_S = 0.5
_LATE_BEATS = 3
_HIGH_WATER = 1 << 20
_MAX_UNSENT = 256 << 20
_FLUSH_S = 1.0


def tls_of_head(cert: str, key: str) -> ssl.SSLContext | None:
    """From PEM files; None without. Raises ConfigError."""
    if key and not cert:
        raise ConfigError("cluster.tls_key: there is no cluster.tls_cert to go with it")
    if not cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, cert, key, "cluster")
    return context


def tls_of_node(ca: str) -> ssl.SSLContext | None:
    """Trusts whom the PEM file names, and nobody else; None without. Raises ConfigError."""
    if not ca:
        return None
    try:
        return ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
    except OSError as error:
        raise ConfigError(f"cluster.tls_ca: cannot use {ca}: {error}") from error


class LinkOwner(Protocol):
    """Who uses links. All are called on the loop."""

    def on_open(self, link: Link) -> None:
        """The peer has proven that it knows the secret."""
        ...

    def on_message(self, link: Link, message: LinkMessage) -> None:
        """A DisaggError that is raised here closes the link."""
        ...

    def on_closed(self, link: Link, error: LinkError) -> None:
        """Once, unless the owner has closed the link itself. Nothing comes after it."""
        ...


class Link(asyncio.Protocol):
    """One side of a link, on its connection. It is closed, with the cause told to its owner, when

    the handshake and what follows it have not led to ``begin_lease`` within HANDSHAKE_S; when the peer breaks the rules; when
    nothing has come for ``lease_s``; when what was sent has not been read for as long; when the connection breaks.
    """

    def __init__(self, side: Side, secret: bytes, owner: LinkOwner) -> None:
        self._side = side
        self._secret = secret
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        # Runs from now on: of a connection whose TLS handshake fails, nothing else is ever heard.
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(HANDSHAKE_S, self._fail, _no_handshake())
        self._is_closed = False
        self._is_gone = asyncio.Event()  # the connection is; set from the start, until there is one
        self._is_gone.set()
        self._is_blocked = False  # the peer does not read
        self._num_silent = self._num_blocked = 0  # beats of ours since it last spoke, and since it last read
        self.peer = ""  # its address

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open" if self._session and self._session.is_proven else "in handshake"
        return f"Link({self._side} to {self.peer}: {state})"

    @property
    def is_late(self) -> bool:
        """Beats of the peer are missing, so what it said last may not be true any more."""
        return self._num_silent >= _LATE_BEATS

    @property
    def has_unsent(self) -> bool:
        """Something waits for the peer to read."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def send(self, message: LinkMessage) -> None:
        """Queue a message. A closed link swallows it, since its end has been told."""
        if self._is_closed or self._session is None or self._transport is None:
            return
        self._session.send(message)
        if self._transport.get_write_buffer_size() > _MAX_UNSENT:
            # Later, since whoever sends is in the middle of something, which its own news of the end must not interrupt.
            self._loop.call_soon(self._fail, LinkError(f"it does not read: {_MAX_UNSENT >> 20} MiB wait for it"))

    def begin_lease(self, lease_s: float, beat: Callable[[], Beat]) -> None:
        """The peer is a partner now: beat, and hold it to ``lease_s``.

        Silence is counted in beats of our own, so that a loop which was kept from running does not take that for the peer's.
        """
        interval_s = min(_BEAT_S, lease_s / 5)
        self._limit_transmission(lease_s)
        self._schedule(interval_s, self._beat, interval_s, math.ceil(lease_s / interval_s), lease_s, beat)

    def close(self) -> None:
        """What was sent still goes out, for at most _FLUSH_S. The owner hears nothing more. Closing twice is safe."""
        if not self._is_closed:
            self._close(says_goodbye=self._session is not None and self._session.is_proven)

    def _close(self, *, says_goodbye: bool) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is None:
            return
        if says_goodbye and self._transport.can_write_eof() and not self._transport.is_closing():
            # The peer closes when it has read everything. What it says meanwhile is read and dropped: a socket that is closed
            # over unread bytes resets the connection, and our last words would be lost with it.
            self._transport.write_eof()
        else:
            self._transport.close()
        self._timer = self._loop.call_later(_FLUSH_S, self._transport.abort)

    async def aclose(self) -> None:
        """Close, and wait until everything has left or _FLUSH_S is over: before an event loop ends, for instance."""
        self.close()
        await self._is_gone.wait()

    # ---------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_gone.clear()
        self.peer = _spelled(transport.get_extra_info("peername"))
        if self._is_closed:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._schedule(HANDSHAKE_S, self._fail, _no_handshake())
        self._session = Session(self._side, self._secret, self._transport.write)

    def data_received(self, data: bytes) -> None:
        session = self._session
        if self._is_closed or session is None:
            return
        try:
            was_proven = session.is_proven
            for message in session.feed(data):
                if not was_proven:
                    was_proven = True
                    self._owner.on_open(self)
                self._num_silent = 0
                self._owner.on_message(self, message)
                if self._is_closed:
                    return
            if session.is_proven and not was_proven:
                self._owner.on_open(self)
        except LinkError as error:
            self._fail(error)
        except DisaggError as error:
            self._fail(LinkError(str(error)))

    def pause_writing(self) -> None:
        self._is_blocked = True

    def resume_writing(self) -> None:
        self._is_blocked = False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._is_gone.set()
        if self._is_closed and self._timer is not None:
            self._timer.cancel()  # there is nothing left to abort
        reason = f"the connection broke: {error}" if error is not None else "it closed the connection"
        if self._session is None or not self._session.is_proven:
            reason += " during the handshake (is TLS on at one side only?)"
        self._fail(LinkError(reason))

    # ---------------------------------------------------------------- the lease

    def _beat(self, interval_s: float, num_allowed: int, lease_s: float, beat: Callable[[], Beat]) -> None:
        self._num_silent += 1
        self._num_blocked = self._num_blocked + 1 if self._is_blocked else 0
        if self._num_silent > num_allowed:
            self._fail(LinkError(f"no word for {lease_s:.1f} s"))
        elif self._num_blocked > num_allowed:
            self._fail(LinkError(f"it has not read for {lease_s:.1f} s"))
        else:
            self.send(beat())
            if not self._is_closed:
                self._schedule(interval_s, self._beat, interval_s, num_allowed, lease_s, beat)

    def _schedule(self, delay_s: float, call: Callable[..., None], *arguments: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, call, *arguments)

    def _limit_transmission(self, lease_s: float) -> None:
        """The kernel gives up by itself what was never acknowledged, rather than after its usual quarter of an hour."""
        assert self._transport is not None, "a lease before a connection"
        connection = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(lease_s * 1e3))

    def _fail(self, error: LinkError) -> None:
        if not self._is_closed:
            self._close(says_goodbye=False)
            self._owner.on_closed(self, error)


def _no_handshake() -> LinkError:
    return LinkError(f"no handshake within {HANDSHAKE_S:g} s")


def _spelled(address: tuple[str, int] | None) -> str:
    """ "" = it had gone again before anybody could look."""
    if address is None:
        return ""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
