"""Hand-over between nodes, where bytes that have left prefill have not yet arrived: decode receives them, and knows when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg.decode import ARRIVAL_S
from disagg.handoff.memory import MemoryNetwork, MemoryTransport
from disagg.handoff.transport import Completed
from disagg.handoff.transports import Transports
from disagg.kv import KVLayout
from disagg.messages import Configure
from tests.sim.loop import run_virtual
from tests.sim.world import Memory, World, collect, request, world

PROMPT = "a prompt of many blocks, the last of them not full"
NUM_TOKENS = 12


class Wire(Memory):
    """A network between nodes on which bytes can be under way: while ``is_held``, pushes complete and nothing arrives."""

    def __init__(self) -> None:
        super().__init__(by_address=True)
        self.is_held = False
        self.under_way: list[tuple[SlowTransport, tuple]] = []

    def build(self, settings: Configure, layout: KVLayout, num_blocks: int) -> tuple[memoryview, Transports, int]:
        pool, _, fd = super().build(settings, layout, num_blocks)
        near = MemoryTransport(settings.worker, layout, pool, self._near)
        return pool, Transports(near, SlowTransport(settings.worker, layout, pool, self._far, self)), fd

    def deliver(self, w: World) -> int:
        """Let what is under way arrive, as far as it still can; the number of pushes."""
        pushes, self.under_way = self.under_way, []
        for transport, arguments in pushes:
            transport.arrive(*arguments)
        for handle in w.handles.values():
            handle.open_gate()
        return len(pushes)


class SlowTransport(MemoryTransport):
    def __init__(self, worker: str, layout: KVLayout, pool: memoryview, network: MemoryNetwork, wire: Wire) -> None:
        super().__init__(worker, layout, pool, network)
        self._wire = wire

    def push(self, dispatch: int, peer: str, epoch: int, source: Sequence[int], target: Sequence[int], key: int) -> None:
        if self._wire.is_held:
            self._wire.under_way.append((self, (dispatch, peer, epoch, list(source), list(target), key)))
            self._done.append(Completed(dispatch, len(source) * self.layout.block_nbytes, 0.0))
        else:
            super().push(dispatch, peer, epoch, source, target, key)

    def arrive(self, *arguments) -> None:
        super().push(*arguments)
        self._done.pop()


async def right_text(num_tokens: int = NUM_TOKENS) -> list[int]:
    async with world("mixed") as w:
        return await collect(w.router.submit(request(PROMPT, num_tokens)))


@pytest.mark.parametrize("chunk_tokens", [4, 16, 64])
async def test_received_text_equals_colocated_text(chunk_tokens: int) -> None:
    """Also with a warm cache on decode, where only the last blocks are received, or none."""
    expected = await right_text()
    async with world("prefill", "decode", fabric=Memory(by_address=True), chunk_tokens=chunk_tokens) as w:
        assert next(iter(w.pairs)).is_two_sided
        for _ in range(3):
            assert await collect(w.router.submit(request(PROMPT, NUM_TOKENS))) == expected
        assert w.engine_worker("decode-0").stats().decode_prefill_tokens == 0


async def test_a_commit_waits_for_the_bytes() -> None:
    """Prefill has finished long ago; not one token is decoded before the last block is here."""
    expected, wire = await right_text(), Wire()
    async with world("prefill", "decode", fabric=wire) as w:
        wire.is_held = True
        stream = w.router.submit(request(PROMPT, NUM_TOKENS))
        await w.until(lambda: w.router.counts()["decoding"] == 1, "committed")
        await w.until(lambda: len(w.engine_worker("decode-0").decode._awaited) == 1, "decode waits")
        assert stream.tokens == expected[:1]
        wire.is_held = False
        assert wire.deliver(w) > 0
        assert await collect(stream) == expected


async def test_an_abort_waits_for_nothing_and_late_bytes_reach_nobody() -> None:
    """The blocks of an aborted dispatch are free at once; what arrives for it afterwards changes no block of anybody."""
    expected, wire = await right_text(), Wire()
    async with world("prefill", "decode", fabric=wire) as w:
        wire.is_held = True
        stream = w.router.submit(request(PROMPT, NUM_TOKENS))
        await w.until(lambda: len(wire.under_way) > 0 and w.router.counts()["decoding"] == 1, "bytes under way")
        stream.abort()
        await w.all_empty()
        late, wire.under_way, wire.is_held = wire.under_way, [], False
        other = w.router.submit(request(PROMPT, NUM_TOKENS))  # takes the same blocks
        await w.until(lambda: len(other.tokens) > 1, "the other decodes")
        wire.under_way = [
            (transport, (*arguments[:3], [63] * len(arguments[3]), *arguments[4:])) for transport, arguments in late
        ]
        assert wire.deliver(w) == len(late)
        assert await collect(other) == expected


def test_bytes_that_never_arrive_cost_a_retry() -> None:
    """After ARRIVAL_S the commit is rejected, and the next attempt gives the right text."""

    async def main() -> tuple[bool, int]:
        expected, wire = await right_text(), Wire()
        async with world("prefill", "decode", fabric=wire) as w:
            wire.is_held = True
            stream = w.router.submit(request(PROMPT, NUM_TOKENS))
            await w.until(lambda: w.router.counts()["decoding"] == 1, "committed")
            wire.is_held, lost = False, wire.under_way.copy()
            wire.under_way.clear()
            assert lost
            return await collect(stream, 2 * ARRIVAL_S) == expected, stream.num_attempts

    assert run_virtual(main()) == (True, 2)
