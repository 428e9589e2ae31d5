"""``timings: true``: where the time went, once, with the last token, and only for who asks."""

from __future__ import annotations

import msgspec

from disagg.api.answer_types import Timings
from tests.unit.api.fakes import FakeRouter, async_test, parse_events, says, serving


@async_test
async def test_a_whole_answer_has_its_timings() -> None:
    """The fields are those that are promised, and count the tokens of the answer."""
    async with serving(FakeRouter(says("four"))) as client:
        answer = await client.complete(prompt="abc", timings=True)
        timings = msgspec.convert(answer["timings"], Timings)
        assert (timings.prompt_n, timings.cache_n, timings.predicted_n) == (3, 0, answer["usage"]["completion_tokens"])
        assert "timings" not in await client.complete(prompt="abc")


@async_test
async def test_a_stream_has_them_in_its_last_chunk() -> None:
    """No other chunk carries them."""
    async with serving(FakeRouter(says("four"))) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "timings": True}
        async with client.http.post("/v1/chat/completions", json=body) as response:
            events = parse_events(await response.text())
    assert [event["choices"][0]["finish_reason"] for event in events if "timings" in event] == ["stop"]


@async_test
async def test_they_are_of_one_choice() -> None:
    """With several there is no one time to tell."""
    async with serving(FakeRouter(says("x"))) as client:
        error = await client.refused("/v1/completions", {"prompt": "a", "n": 2, "timings": True})
    assert error["param"] == "timings"
