"""Each request leaves one line in the log, whichever way it ends, and the router's books agree with what was delivered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from disagg.request import RequestState
from tests.sim.world import collect, request, world


class Journal:
    """Takes the place of the router's log."""

    def __init__(self) -> None:
        self.ended: list[dict[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        if event == "request ended":
            self.ended.append(fields)

    warning = error = info


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    journal = Journal()
    monkeypatch.setattr("disagg.router.log", journal)
    return journal


async def test_a_finished_request_is_one_line(journal: Journal) -> None:
    """Who it was, how it ended, what it cost, who worked on it, where its time went; nothing of its prompt or text."""
    prompt = "a secret that no log may show"
    async with world("prefill", "decode") as w:
        stream = w.router.submit(request(prompt, 8))
        stream.trace_id = "0af7651916cd43dd8448eb211c80319c"
        tokens = await collect(stream)
        assert w.router.num_generated_tokens == len(tokens) == 8
    (line,) = journal.ended
    assert line["state"] == "finished"
    assert line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert line["finish_reason"] == "length"
    assert (line["prompt_tokens"], line["completion_tokens"], line["attempts"]) == (len(prompt), 8, 1)
    assert (line["prefill"], line["decode"]) == ("prefill-0", "decode-0")
    stages = [line[f"{stage}_s"] for stage in ("queue", "reserve", "prefill", "transfer", "decode")]
    assert sum(stages) == pytest.approx(line["e2e_s"], abs=1e-4)
    assert 0 < line["first_decode_s"] <= line["decode_s"]
    assert 0 < line["ttft_s"] < line["e2e_s"]
    assert line["tpot_s"] == pytest.approx((line["e2e_s"] - line["ttft_s"]) / 7, abs=1e-4)
    assert str(list(prompt.encode()))[1:-1] not in json.dumps(line)
    assert "secret" not in json.dumps(line)


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        (RequestState.RESERVING, "reserve"),
        (RequestState.PREFILLING, "prefill"),
        (RequestState.DECODING, "decode"),
    ],
)
async def test_an_abort_says_in_which_phase(journal: Journal, state: RequestState, stage: str) -> None:
    """The phase is the one that the request was in when its client left."""
    async with world("prefill", "decode", chunk_tokens=4) as w:
        stream = w.router.submit(request("x" * 60, 100))
        await w.until(lambda: stream.state is state, f"{state}")
        stream.abort()
    (line,) = journal.ended
    assert (line["state"], line["stage"]) == ("aborted", stage)


async def test_a_failover_is_counted_by_its_reason_and_shows_in_the_line(journal: Journal) -> None:
    """One line for the request, with both attempts in its times; one failover for the worker that died."""
    async with world("prefill", "decode", "decode") as w:
        stream = w.router.submit(request("it lives on", 30))
        running = asyncio.create_task(collect(stream))
        await w.until(lambda: len(stream.tokens) >= 3, "3 tokens")
        died = stream.attempts[-1].decode
        w.handles[died].kill()
        assert len(await running) == 30
        await w.until(lambda: all(info.is_ready for info in w.workers), "the worker restarted")
        assert w.metrics.failovers == ["worker_died"]
        assert w.router.num_generated_tokens == 30
    (line,) = journal.ended
    assert (line["attempts"], line["completion_tokens"], line["state"]) == (2, 30, "finished")
    assert line["decode"] != died
    assert len(stream.first_decodes_s) == 2
