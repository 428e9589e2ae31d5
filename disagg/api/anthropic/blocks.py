"""The blocks of one answer, written whole or as events: a text for each run of text, a ``tool_use`` for each call.

A block begins with what does not go on with the one before it; blocks follow each other, and only the last of them is open. What
a stream's deltas add up to is therefore what a whole answer has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from disagg.api.choice import TOOL_CALLS, Choice
from disagg.api.errors import Failure
from disagg.api.services import Services
from disagg.api.sse import json_text, named_event
from disagg.api.validate import Work
from disagg.request import FinishReason

_DELTA = 'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
_DELTA_END = b"}}\n\n"


class MessageWriter:
    """One answer: a ``disagg.api.generate.Dialect``. ``max_tokens``: what was asked for, though the context may end before."""

    keepalive = named_event({"type": "ping"})

    def __init__(self, max_tokens: int, services: Services, work: Work, choices: Sequence[Choice]) -> None:
        (self._choice,) = choices
        self._max_tokens = max_tokens
        self._model = services.model_name
        self._id = work.id
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []  # of a whole answer: as they begin, and their pieces
        self._has_begun = False
        self._is_in_text = False
        self._num_begun = 0
        self._head = b""  # of the open block's deltas: the only thing in them that changes is a text

    def keep(self, choice: Choice, text: str) -> None:
        for part in choice.take_parts(text):
            if begun := self._begun_by(part):
                self._blocks.append((begun, []))
            self._blocks[-1][1].append(_piece(part))

    def whole(self) -> dict[str, Any]:
        content = [_complete(begun, "".join(pieces)) for begun, pieces in self._blocks]
        return {**self._message(content), **self._stop(), "usage": self._usage()}

    def write(self, choice: Choice, text: str) -> bytes:
        events = [] if self._has_begun else [self._opening()]
        for part in choice.take_parts(text):
            if begun := self._begun_by(part):
                events += [self._end_of_block(), self._start_of_block(begun)]
            if piece := _piece(part):
                events.append(self._head + json_text(piece) + _DELTA_END)
        if choice.finish_reason is not None:
            events.append(self._end_of_block())
        return b"".join(events)

    def ending(self) -> bytes:
        end = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return named_event(end) + named_event({"type": "message_stop"})

    def failure(self, failure: Failure, request_id: str) -> bytes:
        return named_event(failure.messages_body(request_id))

    def _begun_by(self, part: str | dict[str, Any]) -> dict[str, Any] | None:
        """The block that begins with ``part``, None where the open one goes on."""
        if isinstance(part, str):
            is_new, self._is_in_text = not self._is_in_text, True
            return {"type": "text", "text": ""} if is_new else None
        if "id" not in part:
            return None
        self._is_in_text = False
        return {"type": "tool_use", "id": part["id"], "name": part["function"]["name"], "input": {}}

    def _opening(self) -> bytes:
        self._has_begun = True
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return named_event({"type": "message_start", "message": message})

    def _start_of_block(self, begun: dict[str, Any]) -> bytes:
        index, self._num_begun = self._num_begun, self._num_begun + 1
        kind = ("text_delta", "text") if self._is_in_text else ("input_json_delta", "partial_json")
        self._head = (_DELTA % (index, *kind)).encode()
        return named_event({"type": "content_block_start", "index": index, "content_block": begun})

    def _end_of_block(self) -> bytes:
        if not self._num_begun:
            return b""
        return named_event({"type": "content_block_stop", "index": self._num_begun - 1})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _stop(self) -> dict[str, Any]:
        choice = self._choice
        if choice.finish_reason == FinishReason.LENGTH:
            reason = "max_tokens" if choice.num_tokens == self._max_tokens else "model_context_window_exceeded"
        elif choice.finish_reason == TOOL_CALLS:
            reason = "tool_use"
        else:
            reason = "end_turn" if choice.stop_reason is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": choice.stop_reason}

    def _usage(self) -> dict[str, int]:
        """Input tokens are told apart by where they came from; what is computed is cached besides, without a price of its own."""
        stream = self._choice.stream
        return {
            "input_tokens": len(stream.request.prompt) - stream.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": stream.num_cached_tokens,
            "output_tokens": self._choice.num_tokens,
        }


def _piece(part: str | dict[str, Any]) -> str:
    return part if isinstance(part, str) else part["function"]["arguments"]


def _complete(begun: dict[str, Any], content: str) -> dict[str, Any]:
    if begun["type"] == "text":
        return {**begun, "text": content}
    try:
        return {**begun, "input": orjson.loads(content)}
    except orjson.JSONDecodeError:  # cut in the middle of the call, as the stop reason says, or no JSON of the model's
        return begun
