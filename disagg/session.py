"""What crosses a link between two nodes, and how each side knows that it was the other who said it.

    both: Challenge (a nonce) ─▶ both: Proof (of the shared secret) ─▶ node: Offer ─▶ head: Welcome, or Refused and the end
    ─▶ head: Launch, Data, Kill;  node: Data, Exited;  both: Beat ─▶ Bye

Until the proof nothing but the two handshake messages is read, each of at most MAX_HANDSHAKE bytes. From then on every frame
carries a MAC over its content and its number, with a key for each direction that is drawn from the secret and both nonces: what
was changed, left out, repeated or put in by somebody on the way is refused. That keeps nothing secret; TLS does.

No sockets and no clock in here; ``disagg.link`` drives it. The bytes in Data are frames of a worker's channel
(``disagg.channel``), which only the head and the worker read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Iterator
from enum import StrEnum

import msgspec

from disagg import channel
from disagg.credentials import read_private
from disagg.errors import ConfigError, LinkError
from disagg.kv import KVLayout
from disagg.messages import Configure

VERSION = 1
"""Raise it when the handshake, the framing or any struct below changes."""

MAX_HANDSHAKE = 4 << 10
MAX_FRAME = channel.MAX_FRAME + (4 << 10)  # a worker's largest frame, and what Data adds
MIN_TOKEN = 16

_NONCE_SIZE = 32
_TAG_SIZE = 16
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=True):
    version: int
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=True):
    mac: bytes


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a node brings: workers as it has planned them, and what they must have in common with the head's."""

    name: str
    release: str  # disagg.__version__
    model: str  # its name, for people; ``layout`` has its fingerprint
    layout: KVLayout
    workers: list[Configure]


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The offer is taken; from here on both sides beat. ``lease_s``: the link ends after so many seconds of silence."""

    run_id: str
    lease_s: float


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``is_final``: the same offer would be refused again."""

    reason: str
    is_final: bool


class Launch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start the process of this worker; Data follows with its Configure."""

    worker: str
    epoch: int


class Kill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    worker: str
    epoch: int


class Data(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Bytes of a worker's channel. ``pool_of``: the pool of this worker, of the same node, goes to the process with them."""

    worker: str
    epoch: int
    data: bytes
    pool_of: str = ""


class Exited(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The process is gone, or could not be started. The last word about this epoch."""

    worker: str
    epoch: int
    cause: str


class Activity(msgspec.Struct, frozen=True, array_like=True):
    worker: str
    epoch: int
    pid: int
    cpu_s: float
    is_runnable: bool


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Proof of life, and how the node's processes are doing."""

    workers: list[Activity] = []


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=True):
    reason: str


LinkMessage = Offer | Welcome | Refused | Launch | Kill | Data | Exited | Beat | Bye

_encode = msgspec.msgpack.Encoder().encode
_decode_handshake = msgspec.msgpack.Decoder(Challenge | Proof).decode
_decode = msgspec.msgpack.Decoder(LinkMessage).decode


class Side(StrEnum):
    HEAD = "head"
    NODE = "node"

    @property
    def other(self) -> Side:
        return Side.NODE if self is Side.HEAD else Side.HEAD


def read_token(path: str) -> bytes:
    """The shared secret in a file. Raises ConfigError when there is none, or when any user of the host can read it."""
    if not path:
        raise ConfigError("cluster.token_file: name a file with the secret that all nodes share")
    token = read_private(path, "cluster.token_file").strip()
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"cluster.token_file: {path} holds {len(token)} bytes, at least {MIN_TOKEN} are needed: openssl rand -hex 32 > {path}"
        )
    return token


class Session:
    """One side of a link. Bytes go in by ``feed``; ``write`` is given those for the peer, the first of them at once."""

    def __init__(self, side: Side, secret: bytes, write: Callable[[bytes], None]) -> None:
        self._side = side
        self._secret = secret
        self._write = write
        self._buffer = bytearray()
        self._nonces = {side: secrets.token_bytes(_NONCE_SIZE)}
        self._keys: dict[Side, bytes] = {}  # by sender, once the peer has proven that it knows the secret
        self._num_sent = self._num_taken = 0
        self._write(_packed(_encode(Challenge(VERSION, self._nonces[side]))))

    @property
    def is_proven(self) -> bool:
        return bool(self._keys)

    def send(self, message: LinkMessage) -> None:
        assert self.is_proven, "nothing may be said to a stranger"
        payload = _encode(message)
        self._write(_packed(payload) + _tag(self._keys[self._side], self._num_sent, payload))
        self._num_sent += 1

    def feed(self, data: bytes) -> Iterator[LinkMessage]:
        """Every whole message so far. Raises LinkError, after which the session is of no more use."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if length > (MAX_FRAME if self.is_proven else MAX_HANDSHAKE):
                raise LinkError(
                    f"it sent a frame of {length} bytes: that is no message of this link (is TLS on at one side only?)"
                )
            end = _LENGTH.size + length + (_TAG_SIZE if self.is_proven else 0)
            if len(buffer) < end:
                return
            payload, tag = bytes(buffer[_LENGTH.size : _LENGTH.size + length]), bytes(buffer[_LENGTH.size + length : end])
            del buffer[:end]
            if self.is_proven:
                yield self._open(payload, tag)
            else:
                self._shake_hands(payload)

    def _open(self, payload: bytes, tag: bytes) -> LinkMessage:
        if not hmac.compare_digest(tag, _tag(self._keys[self._side.other], self._num_taken, payload)):
            raise LinkError(f"frame {self._num_taken} is not what the other side sent next: somebody on the way changes it")
        self._num_taken += 1
        try:
            return _decode(payload)
        except msgspec.MsgspecError as error:
            raise LinkError(f"frame {self._num_taken - 1} is no message: {error}") from error

    def _shake_hands(self, payload: bytes) -> None:
        try:
            message = _decode_handshake(payload)
        except msgspec.MsgspecError as error:
            raise LinkError(f"it sent no message of the handshake: {error}") from error
        other = self._side.other
        if isinstance(message, Challenge) and other not in self._nonces:
            if message.version != VERSION:
                raise LinkError(f"it speaks version {message.version} of the link, this side {VERSION}", is_final=True)
            if len(message.nonce) != _NONCE_SIZE:
                raise LinkError(f"it sent a nonce of {len(message.nonce)} bytes, not {_NONCE_SIZE}")
            self._nonces[other] = message.nonce
            self._write(_packed(_encode(Proof(self._derive("proof", self._side)))))
        elif isinstance(message, Proof) and other in self._nonces:
            if not hmac.compare_digest(message.mac, self._derive("proof", other)):
                raise LinkError("it has another token", is_final=True)
            self._keys = {side: self._derive("key", side) for side in Side}
        else:
            raise LinkError(f"{type(message).__name__} came out of turn")

    def _derive(self, purpose: str, side: Side) -> bytes:
        """HMAC of what this handshake alone has. The side keeps a peer from answering with what it was sent."""
        label = f"disagg link {VERSION} {purpose} {side}\0".encode()
        return hmac.digest(self._secret, label + self._nonces[Side.HEAD] + self._nonces[Side.NODE], "sha256")


def _packed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def _tag(key: bytes, number: int, payload: bytes) -> bytes:
    digest = hashlib.blake2b(_NUMBER.pack(number), digest_size=_TAG_SIZE, key=key)
    digest.update(payload)
    return digest.digest()
