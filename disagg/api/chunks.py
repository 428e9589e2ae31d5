"""The answers of OpenAI's two older endpoints: ``choices``, in a stream a chunk for each piece of one, and ``[DONE]`` at its end.

A stream of 256 clients passes here for every token of each of them, so a chunk's JSON is made once per choice and only the
text is encoded per token; what is rarer (log-probabilities, token ids, running usage) takes the plain way through a dict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.api.choice import Choice, LoggedToken
from disagg.api.errors import Failure
from disagg.api.services import Services
from disagg.api.sse import COMMENT, event, json_text
from disagg.api.validate import Work
from disagg.lifetime import timings
from disagg.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
"""The end of every stream, also after an error: official clients close the socket when they read it."""

_MARK = "\ue000text\ue000"
"""Stands for the text where a chunk is cut into head and tail: private-use characters, so no model's name holds it."""


Calls = Sequence[dict[str, Any]]
"""What is told of tool calls (``disagg.api.tools``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one endpoint writes what the core produced: an answer's ``choices[i]`` and a chunk's."""

    object: str
    chunk_object: str
    whole: Callable[[str, Calls], dict[str, Any]]  # the complete text and tool calls
    piece: Callable[[str, Calls], dict[str, Any]]  # a part of them
    opening: dict[str, Any] | None  # what a choice's stream begins with
    logprobs: Callable[[Tokenizer, Sequence[LoggedToken], int], dict[str, Any]]  # the int: how many of the best
    has_prompt_ids_in_choice: bool  # return_token_ids: prompt_token_ids in each choice, or beside them


class Chunks:
    """One answer of an endpoint of the given shape: a ``disagg.api.generate.Dialect``."""

    keepalive = COMMENT

    def __init__(self, shape: Shape, services: Services, work: Work, choices: Sequence[Choice]) -> None:
        self._shape = shape
        self._services = services
        self._work = work
        self._choices = choices
        self._created = int(time.time())
        self._texts: list[list[str]] = [[] for _ in choices]
        self._writers = [_ChunkWriter(self, choice) for choice in choices] if work.is_streamed else []

    def keep(self, choice: Choice, text: str) -> None:
        self._texts[choice.index].append(text)

    def whole(self) -> dict[str, Any]:
        body = self.body(
            self._shape.object,
            [
                {
                    "index": index,
                    **self._shape.whole("".join(self._texts[choice.index]), choice.take_calls()),
                    **self._details(choice),
                }
                for index, choice in enumerate(self._best())
            ],
        )
        self.add_prompt_ids(body)
        self._add_timings(body, self._choices[0])
        body["usage"] = self._usage()
        return body

    def write(self, choice: Choice, text: str) -> bytes:
        return self._writers[choice.index].write(text)

    def ending(self) -> bytes:
        if not self._work.include_usage:
            return DONE
        return event({**self.body(self._shape.chunk_object, []), "usage": self._usage()}) + DONE

    def failure(self, failure: Failure, request_id: str) -> bytes:
        return event(failure.body()) + DONE

    def _best(self) -> Sequence[Choice]:
        """The choices to answer with: of each prompt the ``n`` with the highest log-probability per token, best first."""
        num_drawn, n = self._work.num_drawn, self._work.n
        if num_drawn == n:
            return self._choices
        groups = [self._choices[start : start + num_drawn] for start in range(0, len(self._choices), num_drawn)]
        ranked = [sorted(group, key=lambda choice: -choice.logprob / max(choice.num_tokens, 1)) for group in groups]
        return [choice for group in ranked for choice in group[:n]]

    def body(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._work.id,
            "object": object,
            "created": self._created,
            "model": self._services.model_name,
            "choices": choices,
        }

    def chunk(self, choice: Choice, text: str, calls: Calls = ()) -> dict[str, Any]:
        entry = {"index": choice.index, **self._shape.piece(text, calls), **self._details(choice)}
        body = self.body(self._shape.chunk_object, [entry])
        if choice.finish_reason is not None:
            self._add_timings(body, choice)
        return self._with_usage(body)

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk that a choice begins with, where the endpoint has one."""
        if self._shape.opening is None:
            return None
        entry = {"index": choice.index, **self._shape.opening, "logprobs": None, "finish_reason": None}
        return self._with_usage(self.body(self._shape.chunk_object, [entry]))

    def add_prompt_ids(self, body: dict[str, Any]) -> None:
        """``return_token_ids`` also gives the prompt: once in an answer, and in the first chunk of each choice."""
        if not self._work.options.return_token_ids:
            return
        for entry in body["choices"]:
            first = entry["index"] // self._work.n * self._work.num_drawn  # of the same prompt
            place = entry if self._shape.has_prompt_ids_in_choice else body
            place["prompt_token_ids"] = self._choices[first].stream.request.prompt

    def _add_timings(self, body: dict[str, Any], choice: Choice) -> None:
        """Where the time went, for a client that asked; it has only one choice then."""
        if self._work.has_timings:
            body["timings"] = timings(choice.stream, choice.num_tokens)

    @property
    def has_plain_chunks(self) -> bool:
        """Whether chunks differ in nothing but their text."""
        work = self._work
        return not (work.continuous_usage or work.options.return_token_ids or work.num_logprobs is not None)

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._work.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._work.include_usage:
            chunk["usage"] = None
        return chunk

    def _details(self, choice: Choice) -> dict[str, Any]:
        """The fields that stand beside a choice's text, in answers and chunks alike."""
        num_top = self._work.num_logprobs
        details: dict[str, Any] = {
            "logprobs": None
            if num_top is None
            else self._shape.logprobs(self._services.tokenizer, choice.take_logged(), num_top),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._work.options.return_token_ids:
            details["token_ids"] = choice.take_token_ids()
        return details

    def _usage(self) -> dict[str, Any]:
        """Each prompt counts once, whatever n is; its cached tokens are those its first choice found."""
        firsts = [choice.stream for choice in self._choices[:: self._work.num_drawn]]
        num_prompt = sum(len(stream.request.prompt) for stream in firsts)
        num_generated = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens for stream in firsts)},
        }


class _ChunkWriter:
    """The events of one choice. Between its first and its last they are head + text + tail wherever that is all that changes."""

    def __init__(self, chunks: Chunks, choice: Choice) -> None:
        self._chunks = chunks
        self._choice = choice
        self._has_begun = False
        self._is_plain = chunks.has_plain_chunks
        if self._is_plain:
            self._head, _, self._tail = event(chunks.chunk(choice, _MARK)).partition(json_text(_MARK))

    def write(self, text: str) -> bytes:
        """The events that ``text`` makes: none if there is nothing to say yet."""
        calls = self._choice.take_calls()
        if self._has_begun and self._is_plain and self._choice.finish_reason is None and not calls:
            return self._head + json_text(text) + self._tail if text else b""
        events = b""
        has_begun, self._has_begun = self._has_begun, True
        if not has_begun and (opening := self._chunks.opening(self._choice)) is not None:
            self._chunks.add_prompt_ids(opening)
            events = event(opening)
        if text or calls or self._choice.finish_reason is not None or not self._is_plain:
            chunk = self._chunks.chunk(self._choice, text, calls)
            if not has_begun and not events:
                self._chunks.add_prompt_ids(chunk)
            events += event(chunk)
        return events
