"""One choice of an answer: its tokens become text, end at a stop string, and keep their log-probabilities beside the text.

A token's own text can lag behind it: part of a character waits for the rest, and text that may be the beginning of a stop
string is held back. Log-probabilities leave together with the text they belong to, so that what a client adds up from
``tokens`` is the text it was given. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from disagg.api.tools import ToolUse
from disagg.messages import TokenLogprobs, TokenOutput
from disagg.request import FinishReason
from disagg.stream import RequestStream
from disagg.text.detokenizer import Detokenizer
from disagg.text.stop import StopMatcher
from disagg.text.tokenizer import Tokenizer
from disagg.text.tools import CallDelta, ToolParser

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that ends with calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How the tokens of one client request become text; the same for each of its choices."""

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # the client's own: named in stop_reason, which is null for end-of-sequence
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    logs_stop_token: bool = False  # an entry for the token that ended the text, though it has no text
    continues: bool = False  # the text goes on after one that the client has, so a leading space belongs to it
    tools: ToolUse | None = None  # their calls are taken out of the text


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
        self.logprob = 0.0  # of all generated tokens together, where log-probabilities are kept
        self._tokenizer = tokenizer
        self._options = options
        self._echo = echo
        self._has_begun = False
        self._detokenizer = Detokenizer(tokenizer, skip_special=options.skip_special_tokens, continues=options.continues)
        self._stops = StopMatcher(options.stop) if options.stop else None
        self._min_tokens = stream.request.params.min_tokens
        self._stop_token_ids = frozenset(stream.request.params.stop_token_ids)
        self._keeps_logprobs = stream.request.params.num_logprobs is not None
        self._keeps_ids = options.return_token_ids
        self._waiting: deque[LoggedToken] = deque()  # their text is not out yet
        self._logged: list[LoggedToken] = []
        self._token_ids: list[int] = []
        self._num_decoded = 0  # characters of text, echo included, held back or not
        self._num_released = 0
        self._ended_by: TokenOutput | None = None  # the stop token
        self._parser = options.tools.parser() if options.tools is not None else None
        self._markers = options.tools.markers if options.tools is not None else {}
        self._may_be_many = options.tools is None or options.tools.may_be_many
        self._calls: list[CallDelta] = []

    def __repr__(self) -> str:
        return f"<Choice {self.index} of {self.stream.request.id}: {self.num_tokens} tokens, {self.finish_reason or 'open'}>"

    def push(self, outputs: Sequence[TokenOutput]) -> str:
        """The text that ``outputs`` allow to be shown. Outputs after the end are ignored."""
        text = "" if self._has_begun else self._begin()
        num_released = len(text)
        for output in outputs:
            piece = self._add(output)
            num_released += len(piece)
            text += piece if self._parser is None else self._read_calls(piece, self._parser)
            if self.finish_reason is not None:
                break
        if self._keeps_logprobs:
            self._release(num_released)
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

    def take_calls(self) -> list[dict[str, Any]]:
        """What is new of the tool calls, as a chunk tells it; empty unless the request has tools."""
        if not self._calls:
            return []
        calls, self._calls = self._calls, []
        assert self._options.tools is not None
        return [self._options.tools.told(self.stream.request.id, call) for call in calls]

    def take_parts(self, text: str) -> list[str | dict[str, Any]]:
        """``text``, which ``push`` has just returned, and what is new of the calls, in the order in which they were written."""
        if self._parser is None:
            return [text] if text else []
        begin, cut = self._parser.num_content - len(text), 0
        parts: list[str | dict[str, Any]] = []
        places = [call.place - begin for call in self._calls]
        for place, told in zip(places, self.take_calls(), strict=True):
            if place > cut:
                parts.append(text[cut:place])
                cut = place
            parts.append(told)
        return [*parts, text[cut:]] if text[cut:] else parts

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
        # A grammar also stops at a token of its own, which is text.
        is_stop_token = output.finish_reason == FinishReason.STOP and output.token in self._stop_token_ids
        if is_stop_token:
            piece = ""
        elif output.token in self._markers:
            piece = self._detokenizer.flush() + self._markers[output.token]
        else:
            piece = self._detokenizer.push(output.token)
        if output.finish_reason is not None:
            piece += self._detokenizer.flush()
        if self._keeps_logprobs:
            if output.logprobs is not None:
                self.logprob += output.logprobs.logprob
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
            if is_stop_token:
                self._ended_by = output
                if output.token in self._options.stop_token_ids:
                    self.stop_reason = output.token
        return piece

    def _read_calls(self, text: str, parser: ToolParser) -> str:
        """The content in ``text``; calls are kept for ``take_calls``."""
        content, calls = parser.push(text)
        if self.finish_reason is not None:
            rest, more = parser.flush()
            content, calls = content + rest, calls + more
        if not self._may_be_many:
            calls = [call for call in calls if call.call == 0]
            if parser.num_complete and self.finish_reason is None:
                self.finish_reason = FinishReason.STOP
        self._calls += calls
        if self.finish_reason == FinishReason.STOP and self.stop_reason is None and parser.num_told:
            self.finish_reason = TOOL_CALLS
        return content

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
            if self._ended_by is not None and self._options.logs_stop_token:
                token, logprobs = self._ended_by.token, self._ended_by.logprobs
                self._logged.append(LoggedToken(token, logprobs, self._num_released, self._num_released))
