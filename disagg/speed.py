"""How fast this host moves KV, measured in a second: a copy in one process, and a hand-over into another's pool.

The hand-over is the real one: a child makes a pool as a worker does and passes its descriptor, the shared-memory transport pushes
blocks into it, and the child says what has arrived.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time

import numpy as np

from disagg.errors import HandoffError
from disagg.handoff.host_pool import create_pool, populate
from disagg.handoff.shm import ShmTransport
from disagg.handoff.transport import Completed
from disagg.kv import KVLayout

_NBYTES = 64 << 20
_ROUNDS = 3
_CHILD_S = 30.0
_LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16", model="doctor")  # 2 MiB blocks


def copy_rate() -> float:
    """GB/s of the fastest of a few copies between two arrays that are larger than any cache."""
    source, target = np.ones(_NBYTES, dtype=np.uint8), np.zeros(_NBYTES, dtype=np.uint8)
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - started)
    return _NBYTES / min(seconds) / 1e9


def handoff_rate() -> float:
    """GB/s of the fastest of a few hand-overs to a child process. Raises HandoffError when the bytes do not arrive intact."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(_CHILD_S)
        program = "import sys; from disagg.speed import receive; receive(int(sys.argv[1]))"
        child = subprocess.Popen([sys.executable, "-P", "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            return _push(ours)
        except (OSError, ValueError) as error:
            raise HandoffError(f"no answer from a child process within {_CHILD_S:g} s: {error}") from error
        finally:
            ours.close()  # the child ends with it
            try:
                child.wait(_CHILD_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _push(peer: socket.socket) -> float:
    num_blocks = _NBYTES // _LAYOUT.block_nbytes
    blocks = list(range(num_blocks))
    fd, mapping = create_pool(_NBYTES, "disagg-doctor")
    os.close(fd)
    mapping[:] = np.random.default_rng(1).bytes(_NBYTES)
    transport = ShmTransport("doctor", _LAYOUT, memoryview(mapping))
    try:
        _, fds, _, _ = socket.recv_fds(peer, 1, 1)
        if not fds:
            raise HandoffError("a child process could not make a pool")
        transport.connect("child", 1, _LAYOUT, num_blocks, fds[0], b"")
        best = min((_pushed(transport, blocks) for _ in range(_ROUNDS)), key=lambda completed: completed.seconds)
        peer.sendall(b"\0")
        arrived = peer.recv(64)
    finally:
        transport.close()
    if arrived != hashlib.blake2b(mapping).digest():
        raise HandoffError("the bytes that were handed over arrived changed")
    return best.nbytes / best.seconds / 1e9


def _pushed(transport: ShmTransport, blocks: list[int]) -> Completed:
    transport.push(1, "child", 1, blocks, blocks, 0)
    deadline = time.monotonic() + _CHILD_S
    while not (done := transport.completed()):
        if time.monotonic() > deadline:
            raise HandoffError(f"a copy of {_NBYTES >> 20} MiB has not ended within {_CHILD_S:g} s")
        time.sleep(0.001)
    (completed,) = done
    assert isinstance(completed, Completed)
    if completed.error is not None:
        raise HandoffError(completed.error)
    return completed


def receive(fd: int) -> None:
    """The child's side: make a pool, pass it on, and say what is in it when the writer has finished."""
    with socket.socket(fileno=fd) as peer:
        peer.settimeout(_CHILD_S)
        pool, mapping = create_pool(_NBYTES, "disagg-doctor")
        populate(mapping)
        socket.send_fds(peer, [b"\0"], [pool])
        os.close(pool)
        if peer.recv(1):
            peer.sendall(hashlib.blake2b(mapping).digest())
