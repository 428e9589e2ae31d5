"""One choice: tokens to text, stop strings, and log-probabilities that stay beside their text."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api.choice import Choice, TextOptions
from disagg.messages import TokenLogprobs, TokenOutput
from disagg.request import FinishReason, Request, SamplingParams
from disagg.stream import RequestStream
from tests.unit.api.fakes import EOS, TOKENIZER, end, tokens


def make_choice(*stop: str, logprobs: bool = True, min_tokens: int = 0, echo: str | None = None, **options: Any) -> Choice:
    ends = (EOS, 98) if "stop_token_ids" in options else (EOS,)
    params = SamplingParams(max_tokens=100, num_logprobs=0 if logprobs else None, min_tokens=min_tokens, stop_token_ids=ends)
    request = Request(id="r-0", prompt=TOKENIZER.encode(echo or "x"), params=params)
    stream = RequestStream(request, lambda stream: None, 0.0)
    return Choice(0, stream, TOKENIZER, TextOptions(stop=stop, **options), echo=echo)


def first_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What a reader sees who stops at the first character that completes a stop string (the longest, if several)."""
    for position in range(len(text) + 1):
        complete = [stop for stop in stops if text[:position].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: position - len(longest)], longest
    return text, None


@given(
    text=st.text(alphabet="aböS🦙\n", min_size=1, max_size=24),
    stops=st.lists(st.text(alphabet="abö", min_size=1, max_size=3), max_size=3),
    splits=st.sets(st.integers(1, 60)),
    ends_by_token=st.booleans(),
)
def test_the_text_and_its_logprobs_do_not_depend_on_batches(
    text: str, stops: list[str], splits: set[int], ends_by_token: bool
) -> None:
    """However tokens arrive: the text is the reference's, and the logged tokens' bytes begin with exactly that text.

    They may go on by what a stop string cut from the inside of a token, here at most by one character.
    """
    outputs = tokens(text, None if ends_by_token else FinishReason.LENGTH, logprobs=True) + [end()] * ends_by_token
    borders = [0, *sorted(split for split in splits if split < len(outputs)), len(outputs)]
    choice = make_choice(*stops)
    parts, logged = [], []
    for start, stop in pairwise(borders):
        parts.append(choice.push(outputs[start:stop]))
        logged += choice.take_logged()
        if choice.finish_reason is not None:
            break
    expected, matched = first_cut(text, stops)
    assert "".join(parts) == expected
    assert choice.stop_reason == matched
    assert choice.finish_reason == ("length" if matched is None and not ends_by_token else "stop")
    assert bytes(item.token for item in logged) == expected.encode()
    assert [item.start for item in logged] == [len(expected.encode()[:i].decode(errors="ignore")) for i in range(len(logged))]
    num_until_match = len((expected + (matched or "")).encode())
    assert choice.num_tokens == num_until_match + (ends_by_token and matched is None)


def test_logprobs_wait_for_their_text() -> None:
    """A token whose text might begin a stop string is not shown before its text is."""
    choice = make_choice("STOP")
    first, second, third = tokens("STx", None, logprobs=True)
    assert (choice.push([first]), choice.take_logged()) == ("", [])
    assert (choice.push([second]), choice.take_logged()) == ("", [])
    assert choice.push([third]) == "STx"
    assert [item.token for item in choice.take_logged()] == list(b"STx")


def test_a_token_cut_in_two_by_a_stop_string_is_kept() -> None:
    """Part of its text is in the answer, so its log-probability is too."""
    word = TOKENIZER.encode("<|im_start|>")[0]
    choice = make_choice("start", skip_special_tokens=False)
    output = TokenOutput(dispatch=0, token=word, logprobs=TokenLogprobs(logprob=-1.0, top=[]))
    assert choice.push([output]) == "<|im_"
    assert [item.token for item in choice.take_logged()] == [word]


def test_what_is_held_back_comes_out_at_the_end() -> None:
    """The beginning of a stop string, and of a character, that was never completed."""
    choice = make_choice("STOP", logprobs=False)
    assert choice.push(tokens("a ST", None)) == "a "
    assert choice.push(tokens(b"\xf0\x9f")) == "ST\ufffd"
    assert choice.finish_reason == "length"


def test_tokens_that_must_come_cannot_stop() -> None:
    """Text of the first min_tokens tokens never completes a stop string; later text does."""
    choice = make_choice("ab", min_tokens=3)
    assert choice.push(tokens("abcab", None)) == "abc"
    assert (choice.finish_reason, choice.num_tokens) == ("stop", 5)


@pytest.mark.parametrize(("own", "reason"), [(frozenset(), None), (frozenset({98}), 98)])
def test_the_stop_token_is_counted_but_is_no_text(own: frozenset[int], reason: int | None) -> None:
    """It ends the choice; stop_reason names it when it is the client's own."""
    choice = make_choice(stop_token_ids=own, return_token_ids=True)
    assert choice.push([*tokens("a", None, logprobs=True), end(98)]) == "a"
    assert (choice.finish_reason, choice.stop_reason, choice.num_tokens) == ("stop", reason, 2)
    assert [item.token for item in choice.take_logged()] == [97]
    assert choice.take_token_ids() == [97, 98]


def test_a_beginning_of_sequence_token_has_no_place_in_the_echo() -> None:
    """The client did not write it: its entry is empty, and the offsets of the others are those in the client's text."""
    choice = make_choice(echo="ab")
    choice.stream.request.prompt.insert(0, EOS)
    choice.stream.prompt_logprobs = [TokenLogprobs(logprob=-1.0, top=[])] * 2
    assert choice.push(tokens("c", logprobs=True)) == "abc"
    logged = choice.take_logged()
    assert [item.token for item in logged] == [EOS, 97, 98, 99]
    assert [(item.start, item.end) for item in logged] == [(0, 0), (0, 1), (1, 2), (2, 3)]


def test_an_open_end_is_a_bug() -> None:
    """A stream that ends without a finish reason, though tokens were asked for, is never passed off as an answer."""
    choice = make_choice()
    choice.push(tokens("a", None, logprobs=True))
    with pytest.raises(AssertionError, match="without a finish reason"):
        choice.close()


def test_a_choice_shows_its_state() -> None:
    """Its repr names the request, the tokens and how it stands."""
    choice = make_choice()
    choice.push(tokens("a", logprobs=True))
    assert repr(choice) == "<Choice 0 of r-0: 1 tokens, length>"
