"""The other end of a transport, in a process of its own, that stops (SIGSTOP) in the middle of a transfer.

    python peer.py KIND ROLE SOCKET

reader  tells its address, its keys and its pool's descriptor; stops when dispatch 1 has arrived (one-sided: at once)
writer  is told an address and keys, pushes dispatches 1 and 2; stops when 1 is completed; if continued, ends when 2 is
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

from disagg.handoff.host_pool import create_pool
from disagg.handoff.shm import ShmTransport, as_blocks
from disagg.handoff.transport import Transport
from disagg.kv import KVLayout

# 210,210 bytes to a block: a window of 8 MiB holds 39 of them.
LAYOUT = KVLayout(num_layers=3, num_kv_heads=5, block_size=7, head_dim=1001, dtype="uint8", model="conformance")
NUM_BLOCKS = 200
FIRST, SECOND = list(range(10)), list(range(10, NUM_BLOCKS))  # the blocks of dispatches 1 and 2
WRITTEN = 0xAB
STALL_S = 1.5
TLS = {"ucx-tcp": "tcp", "ucx-shm": "all"}


def make(kind: str, worker: str, pool: memoryview, layout: KVLayout = LAYOUT) -> Transport:
    """A transport between processes."""
    if kind == "shm":
        return ShmTransport(worker, layout, pool)
    from disagg.handoff.ucx import UcxTransport

    return UcxTransport(worker, layout, pool, tls=TLS[kind], stall_s=STALL_S)


def wait_for_one(transport: Transport) -> None:
    select.select([transport.fileno()], [], [])
    transport.completed()


def main(kind: str, role: str, channel: socket.socket) -> None:
    fd, pool = create_pool(NUM_BLOCKS * LAYOUT.block_nbytes, "conformance-peer")
    transport = make(kind, f"{role}-0", memoryview(pool))
    if role == "reader":
        keys = [transport.expect(1, FIRST), transport.expect(2, SECOND)]
        said = json.dumps({"address": transport.address.hex(), "keys": keys})
        socket.send_fds(channel, [said.encode()], [fd])
    else:
        told = json.loads(channel.recv(1 << 16))
        as_blocks(memoryview(pool), LAYOUT)[:] = WRITTEN
        for _ in range(2):  # a reader that cuts a writer off has to find the way that it came by last
            transport.connect("reader-0", 1, LAYOUT, NUM_BLOCKS, -1, bytes.fromhex(told["address"]))
        for dispatch, blocks, key in ((1, FIRST, told["keys"][0]), (2, SECOND, told["keys"][1])):
            transport.push(dispatch, "reader-0", 1, blocks, blocks, key)
    if role == "writer" or transport.is_two_sided:
        wait_for_one(transport)
    os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_one(transport)
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], socket.socket(fileno=int(sys.argv[3])))
