"""One choice of an answer: its tokens become text, end at a stop string, and keep their log-probabilities beside the text.

A token's own text can lag behind it: part of a character waits for the rest, and text that may be the beginning of a stop
string is held back. Log-probabilities leave together with the text they belong to, so that what a client adds up from
``tokens`` is the text it was given. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.messages import TokenLogprobs, TokenOutput
from disagg.request import FinishReason
from disagg.stream import RequestStream
from disagg.text.detokenizer import Detokenizer
from disagg.text.stop import StopMatcher
from disagg.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How the tokens of one client request become text; the same for each of its choices."""

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # the client's own: named in stop_reason, which is null for end-of-sequence
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    continues: bool = False  # the text goes on after one that the client has, so a leading space belongs to it


class LoggedToken(NamedTuple):
    """A token and where its text lies in the choice's text: characters ``start`` to ``end``."""

    token: int
    logprobs: TokenLogprobs | None  # None: the first token of a prompt, which nothing predicts
    start: int
    end: int


class Choice:
    """``push`` what arrives, ``close`` if the stream ended without saying why. ``finish_reason`` is set once it is complete."""

    def __init__(
        self, index: int, stream: RequestStream, tokenizer: Tokenizer, options: TextOptions, *, echo: str | None = None
    ) -> None:
        self.index = index
        self.stream = stream
        self.num_tokens = 0  # generated, the one that ended it included
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.has_failed = False
        self._tokenizer = tokenizer
        self._options = options
        self._echo = echo
        self._has_begun = False
        self._detokenizer = Detokenizer(tokenizer, skip_special=options.skip_special_tokens, continues=options.continues)
        self._stops = StopMatcher(options.stop) if options.stop else None
        self._min_tokens = stream.request.params.min_tokens
        self._keeps_logprobs = stream.request.params.num_logprobs is not None
        self._keeps_ids = options.return_token_ids
        self._waiting: deque[LoggedToken] = deque()  # their text is not out yet
        self._logged: list[LoggedToken] = []
        self._token_ids: list[int] = []
        self._num_decoded = 0  # characters of text, echo included, held back or not
        self._num_released = 0

    def __repr__(self) -> str:
        return f"<Choice {self.index} of {self.stream.request.id}: {self.num_tokens} tokens, {self.finish_reason or 'open'}>"

    def push(self, outputs: Sequence[TokenOutput]) -> str:
        """The text that ``outputs`` allow to be shown. Outputs after the end are ignored."""
        text = "" if self._has_begun else self._begin()
        for output in outputs:
            text += self._add(output)
            if self.finish_reason is not None:
                break
        if self._keeps_logprobs:
            self._release(len(text))
        return text

    def close(self) -> str:
        """The stream ended without a token that says why: nothing was to be generated."""
        assert self.stream.request.params.max_tokens == 0, f"{self!r}: the stream ended without a finish reason"
        text = "" if self._has_begun else self._begin()
        self.finish_reason = FinishReason.LENGTH
        self._release(len(text))
        return text

    def take_logged(self) -> list[LoggedToken]:
        """The tokens whose text has been released since the last call; empty unless log-probabilities were asked for."""
        logged, self._logged = self._logged, []
        return logged

    def take_token_ids(self) -> list[int]:
        """The generated ids since the last call; empty unless they were asked for."""
        token_ids, self._token_ids = self._token_ids, []
        return token_ids

    def _begin(self) -> str:
        self._has_begun = True
        if self._echo is None:
            return ""
        if self._keeps_logprobs:
            self._log_prompt(self._echo)
        self._num_decoded = len(self._echo)
        return self._echo

    def _add(self, output: TokenOutput) -> str:
        self.num_tokens += 1
        if self._keeps_ids:
            self._token_ids.append(output.token)
        is_stop_token = output.finish_reason == FinishReason.STOP
        piece = "" if is_stop_token else self._detokenizer.push(output.token)
        if output.finish_reason is not None:
            piece += self._detokenizer.flush()
        if self._keeps_logprobs:
            start = self._num_decoded
            self._num_decoded += len(piece)
            if not is_stop_token:
                # A token without text of its own shares the character that a later one completes.
                self._waiting.append(LoggedToken(output.token, output.logprobs, start, max(self._num_decoded, start + 1)))

        if self._stops is not None:
            if self.num_tokens > self._min_tokens:  # what must be generated cannot be a reason to stop
                piece, matched = self._stops.push(piece)
                if matched is not None:
                    self.finish_reason, self.stop_reason = FinishReason.STOP, matched
                    return piece
            if output.finish_reason is not None:
                piece += self._stops.flush()
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            if is_stop_token and output.token in self._options.stop_token_ids:
                self.stop_reason = output.token
        return piece

    def _log_prompt(self, text: str) -> None:
        """Log the prompt's tokens at their places in ``text``, the prompt as the client gave it."""
        detokenizer = Detokenizer(self._tokenizer, skip_special=False)
        prompt = self.stream.request.prompt
        pieces = [detokenizer.push(token) for token in prompt]
        pieces[-1] += detokenizer.flush()
        if "".join(pieces) != text and "".join(pieces[1:]) == text:
            pieces[0] = ""  # a beginning-of-sequence token that the client did not write
        start = 0
        for token, piece, logprobs in zip(prompt, pieces, [None, *(self.stream.prompt_logprobs or [])]):
            end = min(start + len(piece), len(text))
            self._logged.append(LoggedToken(token, logprobs, start, end))
            start = end

    def _release(self, num_characters: int) -> None:
        self._num_released += num_characters
        while self._waiting and self._waiting[0].end <= self._num_released:
            self._logged.append(self._waiting.popleft())
        if self.finish_reason is not None:  # a token that a stop string cut in two counts, one after the cut does not
            self._logged += (token for token in self._waiting if token.start < self._num_released)
            self._waiting.clear()
