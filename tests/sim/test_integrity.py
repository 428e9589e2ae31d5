"""A byte that changes on its way is found, nothing is decoded from it, and the client gets the right text all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import RequestFailedError
from disagg.handoff.transports import Transports
from disagg.kv import KVLayout
from disagg.messages import Commit, Configure, Message
from disagg.request import FailReason, RequestState
from tests.sim.world import Memory, World, collect, make_layout, request, world

PROMPT = "a prompt of many blocks, the last of them not full"
BLOCK_NBYTES = make_layout().block_nbytes
NUM_BLOCKS = make_layout().num_blocks(len(PROMPT))
NUM_TOKENS = 12


class FaultyMemory(Memory):
    """Memory whose copies can be spoiled: set ``num_flips`` or ``num_errors`` once the pairs have been probed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_flips = 0  # copies still to be spoiled
        self.num_errors = 0  # copies still to fail
        self.flip_block = 0  # which block of the dispatch, in the order of copying …
        self.flip_byte = 0  # … and which byte of it
        self.pools: dict[str, memoryview] = {}

    def build(self, settings: Configure, layout: KVLayout, num_blocks: int) -> tuple[memoryview, Transports, int]:
        pool, transport, fd = super().build(settings, layout, num_blocks)
        self.pools[settings.worker] = pool
        return pool, FaultyTransport(transport, self), fd  # type: ignore[return-value]


class FaultyTransport:
    def __init__(self, transport: Transports, fabric: FaultyMemory) -> None:
        self._transport = transport
        self._fabric = fabric
        self._num_pushed: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def push(self, dispatch: int, peer: str, epoch: int, source: Sequence[int], target: Sequence[int], key: int) -> None:
        fabric = self._fabric
        if fabric.num_errors:
            fabric.num_errors -= 1
            epoch += 1  # not there: the transport completes this push with an error
        self._transport.push(dispatch, peer, epoch, source, target, key)
        begin = self._num_pushed.get(dispatch, 0)
        self._num_pushed[dispatch] = begin + len(target)
        if fabric.num_flips and begin <= fabric.flip_block < begin + len(target):
            fabric.num_flips -= 1
            fabric.pools[peer][target[fabric.flip_block - begin] * BLOCK_NBYTES + fabric.flip_byte] ^= 1


def corrupted_blocks(w: World) -> list[None]:
    """What the router counts from now on."""
    counted: list[None] = []
    w.metrics.observe_corrupted_block = lambda: counted.append(None)
    return counted


def digests_of_commits(w: World, worker: str) -> list[int]:
    """How many digests come with each Commit from now on."""
    counts, target = [], w.engine_worker(worker)
    receive = target.receive

    def watch(message: Message, fds: list[int]) -> None:
        if isinstance(message, Commit):
            counts.append(len(message.digests))
        receive(message, fds)

    target.receive = watch
    return counts


async def right_text() -> list[int]:
    async with world("mixed") as w:
        return await collect(w.router.submit(request(PROMPT, NUM_TOKENS)))


@pytest.mark.parametrize("flip_block", [0, 5, NUM_BLOCKS - 1])
@pytest.mark.parametrize("chunk_tokens", [4, 16, 64])
async def test_with_verification_a_flipped_byte_costs_a_retry_and_no_text(chunk_tokens: int, flip_block: int) -> None:
    """In the first block, in the middle or in the last one, which is not full: found, counted, computed again."""
    expected, fabric = await right_text(), FaultyMemory()
    async with world("prefill", "decode", fabric=fabric, chunk_tokens=chunk_tokens) as w:
        counted = corrupted_blocks(w)
        fabric.num_flips, fabric.flip_block = 1, flip_block
        stream = w.router.submit(request(PROMPT, NUM_TOKENS))
        assert await collect(stream) == expected
        assert (len(counted), stream.num_attempts, fabric.num_flips) == (1, 2, 0)


@pytest.mark.parametrize("flip_block", [0, 5, NUM_BLOCKS - 1])
async def test_without_verification_the_same_byte_changes_the_text(flip_block: int) -> None:
    """What the digests are for: nothing else notices."""
    expected, fabric = await right_text(), FaultyMemory()
    async with world("prefill", "decode", fabric=fabric, verify_kv=False) as w:
        counted = corrupted_blocks(w)
        fabric.num_flips, fabric.flip_block = 1, flip_block
        stream = w.router.submit(request(PROMPT, NUM_TOKENS))
        got = await collect(stream)
        assert (len(got), stream.state, stream.num_attempts) == (NUM_TOKENS, RequestState.FINISHED, 1)
        assert got[0] == expected[0], "the first token is prefill's"
        assert got[1:] != expected[1:]
        assert (counted, fabric.num_flips) == ([], 0)


@settings(max_examples=25, deadline=None)
@given(flip_block=st.integers(0, NUM_BLOCKS - 1), flip_byte=st.integers(0, BLOCK_NBYTES - 1))
def test_whichever_byte_it_is(flip_block: int, flip_byte: int) -> None:
    """All bytes of all blocks are compared, slots that no token uses included."""

    async def run() -> tuple[bool, int, int]:
        expected, fabric = await right_text(), FaultyMemory()
        async with world("prefill", "prefill", "decode", "decode", fabric=fabric) as w:
            counted = corrupted_blocks(w)
            fabric.num_flips, fabric.flip_block, fabric.flip_byte = 1, flip_block, flip_byte
            stream = w.router.submit(request(PROMPT, NUM_TOKENS))
            return await collect(stream) == expected, len(counted), stream.num_attempts

    assert asyncio.run(run()) == (True, 1, 2)


async def test_a_path_that_always_corrupts_ends_requests_with_a_reason() -> None:
    """Attempts are bounded; the error names the pair; nothing stays reserved (the world checks at its end)."""
    fabric = FaultyMemory()
    async with world("prefill", "decode", fabric=fabric, max_attempts=3) as w:
        counted = corrupted_blocks(w)
        fabric.num_flips = 1000
        with pytest.raises(RequestFailedError, match=r"^prefill-0 → decode-0: KV block .* corrupted .* \(attempt 3\)") as caught:
            await collect(w.router.submit(request(PROMPT, NUM_TOKENS)))
        assert (caught.value.reason, len(counted)) == (FailReason.CORRUPTED, 3)


async def test_other_streams_do_not_notice() -> None:
    """One block of one of many streams is spoiled: all texts are right and one stream was retried."""
    prompts = [f"{index} of several streams at once" for index in range(8)]
    async with world("mixed", prefix_cache=False) as w:
        expected = [await collect(w.router.submit(request(prompt, NUM_TOKENS))) for prompt in prompts]
    fabric = FaultyMemory()
    async with world("prefill", "decode", fabric=fabric) as w:
        counted = corrupted_blocks(w)
        fabric.num_flips = 1
        streams = [w.router.submit(request(prompt, NUM_TOKENS)) for prompt in prompts]
        assert await asyncio.gather(*map(collect, streams)) == expected
        assert (len(counted), sum(stream.num_attempts for stream in streams)) == (1, len(streams) + 1)


async def test_a_client_that_leaves_while_its_blocks_are_compared_leaves_nothing() -> None:
    """The abort and Corrupted cross: the blocks come back once, and nobody retries for a client that has gone."""
    fabric = FaultyMemory()
    async with world("prefill", "decode", fabric=fabric) as w:
        counted = corrupted_blocks(w)
        fabric.num_flips = 1
        stream = w.router.submit(request(PROMPT, NUM_TOKENS))
        aborted: list[RequestState] = []
        target = w.engine_worker("decode-0")
        receive = target.receive

        def leave_at_commit(message: Message, fds: list[int]) -> None:
            receive(message, fds)
            if isinstance(message, Commit):
                stream.abort()
                aborted.append(stream.state)

        target.receive = leave_at_commit
        await collect(stream)
        await w.all_empty()
        assert (aborted, stream.num_attempts, counted) == ([RequestState.ABORTED], 1, [])


@pytest.mark.parametrize("prefill_hit", [False, True])
@pytest.mark.parametrize("decode_hit", [False, True])
async def test_every_pushed_block_has_its_digest_and_cached_ones_have_none(prefill_hit: bool, decode_hit: bool) -> None:
    """What decode's prefix cache holds is neither moved nor compared; a hit on prefill changes nothing."""
    prompt = "sixteen bytes ok" * 2
    async with world("prefill", "decode") as w:
        counts = digests_of_commits(w, "decode-0")
        if decode_hit:
            await collect(w.router.submit(request(prompt[:16], 2)))
        if prefill_hit:
            await collect(w.router.submit(request(prompt, 1)))
        await collect(w.router.submit(request(prompt, 6)))
        assert counts[-1] == (4 if decode_hit else 8)
        assert counts[-1] * BLOCK_NBYTES == w.metrics.transfers[-1]


async def test_unless_it_is_asked_for_nothing_is_digested() -> None:
    """Off: no digest is computed or sent."""
    async with world("prefill", "decode", verify_kv=False) as w:
        counts = digests_of_commits(w, "decode-0")
        await collect(w.router.submit(request(PROMPT, NUM_TOKENS)))
        assert counts == [0]


async def test_after_a_copy_that_failed_the_request_is_started_again_at_once() -> None:
    """No other traffic is needed: its own hand-over's failure starts the next attempt."""
    expected, fabric = await right_text(), FaultyMemory()
    async with world("prefill", "decode", fabric=fabric) as w:
        fabric.num_errors = 1
        stream = w.router.submit(request(PROMPT, NUM_TOKENS))
        assert await collect(stream) == expected
        assert stream.num_attempts == 2
