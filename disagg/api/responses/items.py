"""The items of one answer, grown piece by piece: a message for each run of text, a function call for each call.

An item is added, grows, and is done when the next one begins or the answer ends. Each step returns the events that tell of it,
so that what a stream's events add up to is what a whole answer has. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]
"""One event of a stream, but for its ``sequence_number``."""


class Items:
    """``done`` holds the finished ones. ``key`` makes their ids: unguessable, and another for each answer."""

    def __init__(self, key: str) -> None:
        self.done: list[dict[str, Any]] = []
        self._key = key
        self._open: dict[str, Any] | None = None  # as it was added
        self._pieces: list[str] = []  # of the open one: text or arguments
        self._logprobs: list[Any] = []  # of the open one's text

    def add_text(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        events = [] if self.is_in_text else self._begin_message()
        self._pieces.append(text)
        self._logprobs += logprobs
        return [*events, self._told("response.output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))]

    def add_call(self, entry: dict[str, Any]) -> list[Event]:
        """``entry``: as a chat's chunk tells it, with an id and a name where the call begins."""
        events, function = [], entry["function"]
        if "id" in entry:
            fields = {"type": "function_call", "call_id": entry["id"], "name": function["name"], "arguments": ""}
            events = self._begin("fc", fields)
        if arguments := function["arguments"]:
            self._pieces.append(arguments)
            events.append(self._told("response.function_call_arguments.delta", delta=arguments))
        return events

    def close(self, status: str) -> list[Event]:
        """The answer has ended: ``status`` is that of its last item. An answer without any is an empty message."""
        events = [] if self._open is not None or self.done else self._begin_message()
        return events + self._end(status)

    @property
    def is_in_text(self) -> bool:
        return self._open is not None and self._open["type"] == "message"

    def _begin_message(self) -> list[Event]:
        events = self._begin("msg", {"type": "message", "role": "assistant", "content": []})
        return [*events, self._told("response.content_part.added", content_index=0, part=_part("", []))]

    def _begin(self, prefix: str, fields: dict[str, Any]) -> list[Event]:
        events = self._end("completed")
        index = len(self.done)
        self._open = {"id": f"{prefix}_{self._key}{index:04x}", "status": "in_progress", **fields}
        self._pieces, self._logprobs = [], []
        return [*events, {"type": "response.output_item.added", "output_index": index, "item": self._open}]

    def _end(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        content = "".join(self._pieces)
        if self._open["type"] == "message":
            part = _part(content, self._logprobs)
            item = {**self._open, "status": status, "content": [part]}
            events = [
                self._told("response.output_text.done", content_index=0, text=content, logprobs=self._logprobs),
                self._told("response.content_part.done", content_index=0, part=part),
            ]
        else:
            item = {**self._open, "status": status, "arguments": content}
            name = self._open["name"]
            events = [self._told("response.function_call_arguments.done", name=name, arguments=content)]
        events.append({"type": "response.output_item.done", "output_index": len(self.done), "item": item})
        self.done.append(item)
        self._open = None
        return events

    def _told(self, type: str, **fields: Any) -> Event:
        assert self._open is not None, "an answer's calls have a beginning"
        return {"type": type, "item_id": self._open["id"], "output_index": len(self.done), **fields}


def _part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
