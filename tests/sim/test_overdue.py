"""A worker that lives and reports, but never answers: every wait for it ends, and what waited goes on elsewhere."""

from __future__ import annotations

import pytest

from disagg.config import WorkersConfig
from disagg.messages import Commit, Message, Prefill, Prefilled, Pushed, Quiesced, Reserve, Verify
from disagg.supervisor import WorkerInfo
from tests.sim.loop import run_virtual
from tests.sim.world import World, collect, request, world

STUCK_S = 20.0
PROMPT = "every wait has a deadline"


def causes_of_death(w: World) -> list[str]:
    """Of every worker that goes down from now on."""
    causes, on_down = [], w.on_down

    def watch(worker: WorkerInfo) -> None:
        causes.append(worker.cause)
        on_down(worker)

    w.on_down = watch
    return causes


async def right_text() -> list[int]:
    async with world("mixed") as w:
        return await collect(w.router.submit(request(PROMPT)))


@pytest.mark.parametrize(
    ("worker", "deaf_to"),
    [("decode-0", Reserve), ("prefill-0", Prefill), ("decode-0", Commit)],
    ids=["reserve", "prefill", "commit"],
)
def test_a_message_that_is_never_answered_ends_its_worker(worker: str, deaf_to: type[Message]) -> None:
    """The stream goes on with the right tokens, once, and the cause names what was owed."""

    async def main() -> tuple[list[int], list[str]]:
        async with world("prefill", "decode", workers=WorkersConfig(stuck_s=STUCK_S), reserve_s=1.0) as w:
            target, lost, causes = w.engine_worker(worker), [], causes_of_death(w)
            receive = target.receive

            def deaf(message: Message, fds: list[int]) -> None:
                if isinstance(message, deaf_to):
                    lost.append(message)
                else:
                    receive(message, fds)

            target.receive = deaf
            tokens = await collect(w.router.submit(request(PROMPT)), 3 * STUCK_S)
            assert len(lost) == 1
            return tokens, list(causes)

    tokens, causes = run_virtual(main())
    assert tokens == run_virtual(right_text())
    assert len(causes) == 1
    assert "makes no progress" in causes[0]


@pytest.mark.parametrize(
    ("worker", "dumb_about"),
    [("prefill-0", Prefilled), ("prefill-0", Pushed), ("prefill-0", Quiesced), ("decode-0", Quiesced)],
    ids=["prefilled", "pushed", "prefill's quiesced", "decode's quiesced"],
)
def test_an_answer_that_is_never_given_ends_its_worker(worker: str, dumb_about: type[Message]) -> None:
    """Whether the client stays or has left: all blocks come back, and the server is empty in bounded time."""

    async def main() -> list[str]:
        async with world("prefill", "decode", workers=WorkersConfig(stuck_s=STUCK_S)) as w:
            for each in w.handles.values():
                each.step_s = 0.01  # time to leave
            handle = w.handles[worker]
            tell, lost, causes = handle.worker.prefill._send, [], causes_of_death(w)

            def dumb(message: Message) -> None:
                if isinstance(message, dumb_about):
                    lost.append(message)
                else:
                    tell(message)

            handle.worker.prefill._send = handle.worker.decode._send = dumb
            stream = w.router.submit(request("a longer prompt, of more than one chunk: " + PROMPT, 20))
            if dumb_about is Quiesced:
                await w.until(lambda: w.router.counts()["prefilling"] == 1, "prefilling")
                stream.abort()
            else:
                assert len(await collect(stream, 3 * STUCK_S)) == 20
            await w.until(lambda: w.router.is_empty, "all that was held is free", 3 * STUCK_S)
            assert lost
            return list(causes)

    (cause,) = run_virtual(main())
    assert "makes no progress" in cause


def test_a_slow_worker_is_not_ended() -> None:
    """Steps of seven seconds, a prompt of many: it takes longer than the limit in all, and is progress all the time."""

    async def main() -> tuple[list[int], int]:
        async with world("prefill", "decode", workers=WorkersConfig(stuck_s=STUCK_S), chunk_tokens=4) as w:
            for handle in w.handles.values():
                handle.step_s = STUCK_S / 3
            tokens = await collect(w.router.submit(request(PROMPT)), 100 * STUCK_S)
            for handle in w.handles.values():
                handle.step_s = 0.0
            return tokens, sum(info.restarts for info in w.workers)

    assert run_virtual(main()) == (run_virtual(right_text()), 0)


def test_a_probe_that_is_never_answered_ends_its_worker() -> None:
    """Also what pairs wait for before any request: a worker deaf to Verify never leaves its pair unproven for good."""

    async def main() -> int:
        async with world("prefill", "decode", workers=WorkersConfig(stuck_s=STUCK_S)) as w:
            w.handles["prefill-0"].kill()
            target = w.engine_worker("decode-0")
            receive = target.receive
            target.receive = lambda message, fds: None if isinstance(message, Verify) else receive(message, fds)
            await w.until(lambda: not w.pairs.verified(), "the pair is gone")
            await w.until(lambda: bool(w.pairs.verified()), "proven again", 3 * STUCK_S)
            return w.workers[1].restarts

    assert run_virtual(main()) == 1
