"""Blocks through UCX between two processes of this host, against the plainest way to move the same bytes.

    python bench/ucx.py [--tokens 2000] [--json -]

tcp     UCX restricted to TCP over loopback, against one process that sends the same bytes over one blocking socket to another
shm     UCX left to choose among the transports inside a host, against one memcpy of the same bytes in one process

Blocks of the built-in model and of 2 MiB (Llama-3-8B); pages are touched before; in turn; medians. A hand-over is timed from
the push to the moment at which the reader has told that all blocks are there.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import select
import socket
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
from server import report

from disagg.handoff.host_pool import create_pool, populate
from disagg.handoff.shm import as_blocks
from disagg.handoff.ucx import UcxTransport
from disagg.kv import KVLayout
from disagg.model import find_model, kv_layout, read_model_spec

TLS = {"tcp": "tcp", "shm": "all"}


def pool_of(layout: KVLayout, num_blocks: int) -> memoryview:
    fd, mapping = create_pool(num_blocks * layout.block_nbytes, "bench")
    os.close(fd)
    populate(mapping)
    return memoryview(mapping)


def wait(transport: UcxTransport) -> None:
    """For the one thing that is under way."""
    select.select([transport.fileno()], [], [])
    (ended,) = transport.completed()
    assert ended.error is None, ended.error


def read(parent: Connection, layout: KVLayout, num_blocks: int) -> None:
    """The other process: takes what it is told to take, and says when it is there."""
    pool = pool_of(layout, num_blocks)
    transports = {way: UcxTransport("decode-0", layout, pool, tls=tls) for way, tls in TLS.items()}
    listener = socket.create_server(("127.0.0.1", 0))
    parent.send(({way: transport.address for way, transport in transports.items()}, listener.getsockname()))
    stream, _ = listener.accept()
    while (way := parent.recv()) is not None:
        if way == "socket":
            parent.send(0)
            rest = pool
            while rest:
                rest = rest[stream.recv_into(rest) :]
        else:
            parent.send(transports[way].expect(1, range(num_blocks)))
            wait(transports[way])
        parent.send("there")
    for transport in transports.values():
        transport.close()
    stream.close()
    listener.close()


@contextlib.contextmanager
def reader(layout: KVLayout, num_blocks: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=read, args=(theirs, layout, num_blocks))
    process.start()
    yield ours
    ours.send(None)
    process.join()


def measure(layout: KVLayout, num_tokens_nbytes: int, rounds: int) -> dict[str, float]:
    num_blocks = -(-num_tokens_nbytes // layout.block_nbytes)
    pool, target = pool_of(layout, num_blocks), np.zeros(num_blocks * layout.block_nbytes, dtype=np.uint8)
    source = as_blocks(pool, layout)
    source[:] = np.random.default_rng(1).integers(0, 256, source.shape, dtype=np.uint8)
    order = list(range(num_blocks))
    seconds: dict[str, list[float]] = {"memcpy": [], "socket": [], "tcp": [], "shm": []}
    with reader(layout, num_blocks) as child:
        addresses, port = child.recv()
        stream = socket.create_connection(port)
        transports = {way: UcxTransport("prefill-0", layout, pool, tls=tls) for way, tls in TLS.items()}
        for way, transport in transports.items():
            transport.connect("decode-0", 1, layout, num_blocks, -1, addresses[way])
        for _ in range(rounds + 2):  # two are the warm-up that a pair's probe does
            for way in ("memcpy", "socket", "tcp", "shm"):
                if way != "memcpy":
                    child.send(way)
                    key = child.recv()
                begun = time.perf_counter()
                if way == "memcpy":
                    np.copyto(target, source.reshape(-1))
                elif way == "socket":
                    stream.sendall(pool)
                else:
                    transports[way].push(1, "decode-0", 1, order, order, key)
                if way != "memcpy":
                    child.recv()
                seconds[way].append(time.perf_counter() - begun)
                if way in transports:
                    wait(transports[way])
        stream.close()
        for transport in transports.values():
            transport.close()
    rates = {way: source.nbytes / statistics.median(values[2:]) / 1e9 for way, values in seconds.items()}
    return {
        "block_nbytes": layout.block_nbytes,
        "nbytes": source.nbytes,
        **{f"{way}_gb_per_s": round(rate, 2) for way, rate in rates.items()},
        "tcp_to_socket": round(rates["tcp"] / rates["socket"], 3),
        "shm_to_memcpy": round(rates["shm"] / rates["memcpy"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000, help="of the built-in model; as many bytes of the other")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="file to write, or - for bench/results/ucx.json")
    args = parser.parse_args()
    built_in = kv_layout(read_model_spec(find_model("smollm2")), "float32", 16)
    llama = KVLayout(num_layers=32, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16", model="llama-3-8b")
    nbytes = built_in.num_blocks(args.tokens) * built_in.block_nbytes
    result = {name: measure(layout, nbytes, args.rounds) for name, layout in (("built_in", built_in), ("llama_3_8b", llama))}
    load = round(os.getloadavg()[0], 2)
    report("ucx", {"tokens": args.tokens, "load_average": load, **result}, args.json)


if __name__ == "__main__":
    main()
