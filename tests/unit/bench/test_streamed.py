"""What is counted of a stream: tokens where a server packs several into an event, and gaps within a window."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.streamed import Streamed, common_window

steps = st.lists(st.tuples(st.floats(0.001, 1), st.integers(1, 5)), min_size=2, max_size=30)


def event(text: str = "x", finish_reason: str | None = None, completion_tokens: int | None = None) -> dict[str, Any]:
    usage = None if completion_tokens is None else {"completion_tokens": completion_tokens}
    return {"choices": [{"text": text, "finish_reason": finish_reason}], "usage": usage}


def streamed(arrivals: list[tuple[float, int]], started: float = 0.0) -> Streamed:
    return Streamed(started, arrivals)


def of_steps(drawn: list[tuple[float, int]]) -> Streamed:
    """A stream whose events come after the drawn pauses, each with the drawn number of tokens."""
    when, count, arrivals = 0.0, 0, []
    for pause, tokens in drawn:
        when, count = when + pause, count + tokens
        arrivals.append((when, count))
    return streamed(arrivals)


def test_usage_in_an_event_counts_its_tokens() -> None:
    """An event that brings three tokens counts three, by the usage it carries."""
    stream = streamed([])
    stream.take(event(completion_tokens=1), 1.0)
    stream.take(event(completion_tokens=4), 2.0)
    assert stream.arrivals == [(1.0, 1), (2.0, 4)]


def test_an_event_without_usage_is_one_token() -> None:
    """A token may have no text of its own, such as the first half of a character; the end's event is no token."""
    stream = streamed([])
    for when, (text, finish_reason) in enumerate([("a", None), ("", None), ("", "length")]):
        stream.take(event(text, finish_reason), float(when))
    assert stream.arrivals == [(0.0, 1), (1.0, 2)]


def test_an_event_that_brings_no_token_is_no_arrival() -> None:
    """One that only tells the end, or repeats the usage, is not the end of a gap."""
    stream = streamed([])
    stream.take(event(completion_tokens=1), 1.0)
    stream.take(event("", "length", completion_tokens=1), 2.0)
    assert stream.arrivals == [(1.0, 1)]


def test_the_servers_count_at_the_end_is_spread_over_the_events() -> None:
    """Where events carried no usage and ten tokens came in five of them, each had two."""
    stream = streamed([(float(n), n) for n in range(1, 6)])
    stream.correct(10)
    assert [count for _, count in stream.arrivals] == [2, 4, 6, 8, 10]


@given(steps, st.floats(0, 30))
def test_tokens_of_adjoining_windows_add_up(drawn: list[tuple[float, int]], cut: float) -> None:
    """No token is lost or counted twice, wherever a window ends and the next begins."""
    stream = of_steps(drawn)
    assert stream.tokens_in(-1, cut) + stream.tokens_in(cut, 1e9) == sum(tokens for _, tokens in drawn)


@given(steps, st.floats(0, 10), st.floats(0.001, 10))
def test_gaps_are_cut_at_the_borders_of_the_window(drawn: list[tuple[float, int]], start: float, length: float) -> None:
    """Together they are exactly the time within the window that lies between the first arrival and the last."""
    stream = of_steps(drawn)
    first, last = stream.arrivals[0][0], stream.arrivals[-1][0]
    expected = max(0.0, min(last, start + length) - max(first, start))
    assert sum(stream.gaps_in(start, start + length)) == pytest.approx(expected)


def test_a_stall_that_outlasts_the_window_counts() -> None:
    """A stream from which nothing comes inside the window has one gap there, as long as the window."""
    assert streamed([(0.0, 1), (10.0, 2)]).gaps_in(2, 5) == [3]


def test_the_common_window_begins_with_the_last_and_ends_with_the_first() -> None:
    """All streams decode in it: from the latest first token to the earliest last one."""
    assert common_window([streamed([(1.0, 1), (9.0, 2)]), streamed([(3.0, 1), (7.0, 2)])]) == (3.0, 7.0)


def test_streams_that_never_ran_together_have_no_window() -> None:
    """It is refused, rather than a rate of something else given."""
    with pytest.raises(RuntimeError, match="more tokens"):
        common_window([streamed([(1.0, 1), (2.0, 2)]), streamed([(3.0, 1), (4.0, 2)])])
