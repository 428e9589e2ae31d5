"""Stop strings end a stream exactly where they begin, however tokens cut the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import InvalidRequestError
from disagg.text.stop import StopMatcher

LETTERS = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Read on character by character until ``find`` finds something: the earliest start among what is complete by then."""
    for end in range(len(text) + 1):
        found = [(text[:end].find(stop), stop) for stop in stops if stop in text[:end]]
        if found:
            return min(found)
    return None


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    emitted, matched = [], None
    for piece in pieces:
        text, stop = matcher.push(piece)
        emitted.append(text)
        matched = matched or stop
    return [*emitted, matcher.flush()], matched


@given(st.lists(LETTERS, max_size=8), STOPS, st.booleans())
def test_any_split_gives_what_the_naive_reader_gives(pieces, stops, include):
    """The emitted text ends before the first stop string (after it with include); without one everything is emitted."""
    text = "".join(pieces)
    emitted, matched = run(StopMatcher(stops, include=include), pieces)
    match = reference(text, stops)
    if match is None:
        assert ("".join(emitted), matched) == (text, None)
    else:
        start, stop = match
        assert ("".join(emitted), matched) == (text[: start + len(stop)] if include else text[:start], stop)


@given(st.lists(LETTERS, min_size=1, max_size=8), STOPS)
def test_only_a_possible_beginning_is_held_back(pieces, stops):
    """While nothing has matched, what waits is the longest suffix that is a proper prefix of a stop string: no more, no less."""
    matcher, text, emitted = StopMatcher(stops), "", ""
    for piece in pieces:
        text += piece
        safe, matched = matcher.push(piece)
        emitted += safe
        if matched:
            break
        prefixes = [stop[:n] for stop in stops for n in range(len(stop))]
        held = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        assert emitted == text[: len(text) - held]


def test_a_match_ends_the_stream():
    """What follows the stop string, in the same piece or later ones, is discarded."""
    matcher = StopMatcher(["END"])
    assert [matcher.push("one EN"), matcher.push("D two"), matcher.push("three")] == [("one ", None), ("", "END"), ("", None)]
    assert matcher.flush() == ""


def test_the_end_of_the_stream_releases_what_waited():
    """A stream that ends at its length limit inside a possible stop string loses nothing."""
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("fine.\n\nUs") == ("fine.", None)
    assert matcher.flush() == "\n\nUs"


def test_the_longest_of_those_complete_at_once_counts():
    """Of stop strings that end at the same character the longest decides where the text is cut."""
    assert StopMatcher(["b", "aab", "ab"]).push("xaab") == ("x", "aab")


def test_no_stops_pass_everything_through():
    """Without stop strings the very text comes out."""
    text = "some text"
    assert StopMatcher([]).push(text)[0] is text


def test_an_empty_stop_is_refused():
    """An empty stop string would stop everything: it is the client's mistake."""
    with pytest.raises(InvalidRequestError) as caught:
        StopMatcher(["a", ""])
    assert caught.value.param == "stop"
