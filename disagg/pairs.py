"""Which prefill worker can hand over to which decode worker: connected, then proven by a pattern that arrived intact.

    both ready ─▶ Connect ─▶ Connected ─▶ Reserve (decode) ─▶ Probe (prefill) ─▶ Verify (decode) ─▶ again, timed ─▶ verified
                                                                      any failure: logged, tried again after RETRY_S

The proof uses the same reservation, transport and release as a request does. Its first round warms the path (pages, connections),
the second measures its GB/s. A pair within a node shares memory; one across nodes, or every pair if that is configured, is
connected by address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from disagg.messages import (
    Abort,
    Connect,
    Connected,
    Disconnect,
    Message,
    Probe,
    Probed,
    Quiesced,
    Refused,
    Reserve,
    Reserved,
    Verified,
    Verify,
)
from disagg.overdue import Debt
from disagg.request import FIRST_PRIORITY, SamplingParams
from disagg.supervisor import Role, WorkerInfo

log = structlog.get_logger(__name__)

RETRY_S = 1.0
PROBE_BLOCKS = 8
_RESERVE_S = 5.0


@dataclass(eq=False, slots=True)
class Pair:
    prefill: WorkerInfo
    decode: WorkerInfo
    transport: str = ""
    is_two_sided: bool = False  # decode must be told to receive
    is_warm: bool = False
    gb_per_s: float = 0.0
    is_verified: bool = False
    expected: bytes = b""  # digest of the pattern, from prefill

    def __repr__(self) -> str:
        state = f"{self.transport} {self.gb_per_s:.1f} GB/s" if self.is_verified else "not verified"
        return f"Pair({self.prefill.id} → {self.decode.id}: {state})"


@dataclass(eq=False, slots=True)
class _Probe:
    pair: Pair
    asked: WorkerInfo  # who owes the next answer …
    what: str  # … to this message


class Pairs:
    """Every (prefill, decode) pair whose workers are both ready. ``on_verified`` is called when one can serve."""

    def __init__(
        self, workers: list[WorkerInfo], mint: Iterator[int], on_verified: Callable[[], None], *, by_address: bool = False
    ) -> None:
        """``by_address``: also within a node."""
        self._workers = workers
        self._mint = mint
        self._on_verified = on_verified
        self._by_address = by_address
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._connecting: dict[tuple[str, str], Pair] = {}  # until prefill has answered
        self._probes: dict[int, _Probe] = {}  # by dispatch, until decode has quiesced

    def __repr__(self) -> str:
        return f"Pairs({list(self._pairs.values())})"

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs.values())

    @property
    def are_verified(self) -> bool:
        """Every pair that there is has been proven."""
        return all(pair.is_verified for pair in self._pairs.values())

    def between(self, prefill: WorkerInfo, decode: WorkerInfo) -> Pair | None:
        return self._pairs.get((prefill.id, decode.id))

    def verified(self) -> list[Pair]:
        return [pair for pair in self._pairs.values() if pair.is_verified]

    def status(self) -> list[dict[str, Any]]:
        return [
            {
                "prefill": pair.prefill.id,
                "decode": pair.decode.id,
                "transport": pair.transport,
                "gb_per_s": round(pair.gb_per_s, 2),
                "verified": pair.is_verified,
            }
            for pair in self._pairs.values()
        ]

    def on_ready(self, worker: WorkerInfo) -> None:
        for other in self._workers:
            if other.is_ready and {worker.role, other.role} == {Role.PREFILL, Role.DECODE}:
                prefill, decode = (worker, other) if worker.role is Role.PREFILL else (other, worker)
                pair = Pair(prefill, decode)
                self._pairs[prefill.id, decode.id] = pair
                self._connect(pair)

    def on_down(self, worker: WorkerInfo) -> None:
        """Its pairs are gone; prefill workers close the pool of a decode worker that died."""
        for key, pair in list(self._pairs.items()):
            if worker in (pair.prefill, pair.decode):
                del self._pairs[key]
                self._connecting.pop(key, None)
                if worker is pair.decode:
                    pair.prefill.send(Disconnect(worker.id, worker.epoch))
        for dispatch, probe in list(self._probes.items()):
            if worker is probe.pair.decode:
                del self._probes[dispatch]
            elif worker is probe.pair.prefill:  # nobody writes the reserved blocks any more
                self._ask(probe, probe.pair.decode, Abort(dispatch))

    def take(self, worker: WorkerInfo, message: Message) -> bool:
        """Handle a message about connecting or probing. False: it is about something else."""
        if isinstance(message, Connected):
            self._connected(worker, message)
            return True
        dispatch = getattr(message, "dispatch", None)
        probe = self._probes.get(dispatch) if dispatch is not None else None
        if dispatch is None or probe is None:
            return False
        pair = probe.pair
        match message:
            case Reserved() if not self._is_current(pair):
                pass  # decode has been told that prefill died; its next life must not write these blocks
            case Reserved():
                self._ask(probe, pair.prefill, Probe(dispatch, pair.decode.id, pair.decode.epoch, message.blocks, message.key))
            case Refused():
                del self._probes[dispatch]
                self._fail(pair, message.reason)
            case Probed(error=None):
                pair.expected = message.digest
                pair.gb_per_s = message.nbytes / max(message.seconds, 1e-9) / 1e9
                self._ask(probe, pair.decode, Verify(dispatch))
            case Probed():
                self._ask(probe, pair.decode, Abort(dispatch))
                self._fail(pair, f"probe failed: {message.error}")
            case Verified():
                self._ask(probe, pair.decode, Abort(dispatch))
                if self._is_current(pair):
                    self._verified(pair, message)
            case Quiesced():
                del self._probes[dispatch]
        return True

    def debts(self) -> Iterator[Debt]:
        """Answers that are awaited."""
        for key, pair in self._connecting.items():
            yield Debt(" → ".join(key), pair.prefill, "Connected")
        for dispatch, probe in self._probes.items():
            yield Debt(dispatch, probe.asked, f"an answer to {probe.what}", grace_s=_RESERVE_S)

    def _ask(self, probe: _Probe, worker: WorkerInfo, message: Reserve | Probe | Verify | Abort) -> None:
        probe.asked, probe.what = worker, type(message).__name__
        worker.send(message)

    def _connect(self, pair: Pair) -> None:
        ready = pair.decode.ready
        if ready is None:
            return
        self._connecting[pair.prefill.id, pair.decode.id] = pair
        connect = Connect(pair.decode.id, pair.decode.epoch, ready.layout, ready.num_blocks)
        if pair.prefill.node == pair.decode.node and not self._by_address:
            pair.prefill.send(connect, [pair.decode.pool_fd])
        elif ready.address:
            pair.prefill.send(msgspec.structs.replace(connect, address=ready.address, num_fds=0))
        else:
            self._fail(pair, f"{pair.decode.id} has no transport between nodes: install disagg[ucx] there")

    def _connected(self, prefill: WorkerInfo, message: Connected) -> None:
        pair = self._pairs.get((prefill.id, message.peer))
        if pair is None or pair.decode.epoch != message.epoch or pair.transport:
            return
        self._connecting.pop((prefill.id, message.peer), None)
        if message.error is not None:
            self._fail(pair, message.error)
        else:
            pair.transport, pair.is_two_sided = message.transport, message.is_two_sided
            self._probe(pair)

    def _probe(self, pair: Pair) -> None:
        dispatch = next(self._mint)
        pools = [worker.ready for worker in (pair.prefill, pair.decode) if worker.ready is not None]
        num_blocks = min(PROBE_BLOCKS, *(pool.num_blocks for pool in pools))
        block_size = pools[0].layout.block_size
        # One token more than the prompt is reserved, so this asks for exactly num_blocks. Scoring turns prefix hits off.
        params = SamplingParams(max_tokens=1, num_prompt_logprobs=0)
        prompt = [0] * (num_blocks * block_size - 1)
        probe = self._probes[dispatch] = _Probe(pair, pair.decode, "")
        reserve = Reserve(dispatch, prompt, len(prompt), params, _RESERVE_S, pair.is_two_sided, FIRST_PRIORITY)
        self._ask(probe, pair.decode, reserve)

    def _verified(self, pair: Pair, message: Verified) -> None:
        if message.error is not None or message.digest != pair.expected:
            self._fail(pair, message.error or "the probe's bytes arrived changed")
            return
        if not pair.is_warm:
            pair.is_warm = True
            self._probe(pair)
            return
        pair.is_verified = True
        log.info(
            "pair verified", prefill=pair.prefill.id, decode=pair.decode.id, transport=pair.transport,
            gb_per_s=round(pair.gb_per_s, 2),
        )  # fmt: skip
        self._on_verified()

    def _fail(self, pair: Pair, reason: str) -> None:
        self._connecting.pop((pair.prefill.id, pair.decode.id), None)
        log.error("pair cannot serve", prefill=pair.prefill.id, decode=pair.decode.id, reason=reason, retry_s=RETRY_S)
        asyncio.get_running_loop().call_later(RETRY_S, self._retry, pair)

    def _retry(self, pair: Pair) -> None:
        if self._is_current(pair):
            pair.transport = ""
            self._connect(pair)

    def _is_current(self, pair: Pair) -> bool:
        """Both workers still live the lives in which they were paired."""
        return self._pairs.get((pair.prefill.id, pair.decode.id)) is pair
