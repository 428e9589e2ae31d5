"""The endpoint: from a body to its work, and the answer as one object or as a stream of named, numbered events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from disagg.api.chat import work_of
from disagg.api.choice import Choice, LoggedToken
from disagg.api.errors import Failure
from disagg.api.generate import serve
from disagg.api.logprobs import chat_logprobs
from disagg.api.read import read
from disagg.api.responses.convert import as_chat, in_own_words, own_name
from disagg.api.responses.items import Event, Items
from disagg.api.responses.types import ReasoningConfig, ResponsesBody, TextConfig, TextFormat
from disagg.api.services import Services
from disagg.api.sse import COMMENT, json_text, named_event
from disagg.api.types import parse_body
from disagg.api.validate import Work
from disagg.errors import InvalidRequestError
from disagg.request import FinishReason

_decoder = msgspec.json.Decoder(ResponsesBody)

_DELTA = (
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","item_id":"%b","output_index":%d,"content_index":0,"delta":%b,'
    b'"logprobs":[],"sequence_number":%d}\n\n'
)
"""The event of nearly every token, for which only the text is encoded."""


class Asked(NamedTuple):
    work: Work
    body: ResponsesBody


async def responses(http: web.Request) -> web.StreamResponse:
    asked = await read(http, plan)
    return await serve(http, asked.work, partial(ResponseWriter, asked.body))


def plan(raw: bytes, services: Services) -> Asked:
    """The body and its request. Raises InvalidRequestError. Pure, and slow for a long prompt."""
    body = parse_body(raw, _decoder)
    chat = as_chat(body)
    try:
        work = work_of(f"resp_{uuid.uuid4().hex}", chat.body, services)
    except InvalidRequestError as error:
        raise in_own_words(error, chat.places) from error
    if work.form is not None:  # judged later, and blamed on the field that it came from
        work = replace(work, form=work.form._replace(param=own_name(work.form.param)))
    return Asked(work, body)


class ResponseWriter:
    """One answer: a ``disagg.api.generate.Dialect``."""

    keepalive = COMMENT

    def __init__(self, body: ResponsesBody, services: Services, work: Work, choices: Sequence[Choice]) -> None:
        (self._choice,) = choices
        self._terms = _terms(body)
        self._services = services
        self._work = work
        self._items = Items(work.id.removeprefix("resp_"))
        self._logged: list[LoggedToken] = []  # their text is held back, or belongs to a call
        self._created = int(time.time())
        self._num_events = 0

    def keep(self, choice: Choice, text: str) -> None:
        self._grow(text)

    def whole(self) -> dict[str, Any]:
        return self._ended()

    def write(self, choice: Choice, text: str) -> bytes:
        return self._encode([*self._opening(), *self._grow(text)])

    def ending(self) -> bytes:
        response = self._ended()
        return self._encode([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, failure: Failure, request_id: str) -> bytes:
        told = failure.body()["error"]
        error = {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]}
        events = [*self._opening(), *self._items.close("incomplete"), error]
        response = self._response("failed", error={"code": "server_error", "message": told["message"]})
        return self._encode([*events, {"type": "response.failed", "response": response}])

    def _opening(self) -> list[Event]:
        if self._num_events:
            return []
        response = self._response("in_progress")
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _encode(self, events: list[Event]) -> bytes:
        told = b""
        for event in events:
            number = self._num_events
            if event["type"] == "response.output_text.delta" and not event["logprobs"]:
                told += _DELTA % (event["item_id"].encode(), event["output_index"], json_text(event["delta"]), number)
            else:
                told += named_event({**event, "sequence_number": number})
            self._num_events += 1
        return told

    def _grow(self, text: str) -> list[Event]:
        choice, items = self._choice, self._items
        events: list[Event] = []
        self._logged += choice.take_logged()
        for part in choice.take_parts(text):
            if isinstance(part, str):
                if items.done and not items.is_in_text:  # the tokens that closed a call are none of this text
                    while self._logged and self._logged[-1].end - self._logged[0].start > len(part):
                        del self._logged[0]
                events += items.add_text(part, self._take_logprobs())
            else:
                events += items.add_call(part)
                self._logged = []
        if choice.finish_reason is not None:
            if self._logged and items.is_in_text:  # a token that a stop string cut in two
                events += items.add_text("", self._take_logprobs())
            events += items.close("incomplete" if choice.finish_reason == FinishReason.LENGTH else "completed")
        return events

    def _take_logprobs(self) -> list[Any]:
        if self._work.num_logprobs is None:
            return []
        logged, self._logged = self._logged, []
        content: list[Any] = chat_logprobs(self._services.tokenizer, logged, self._work.num_logprobs)["content"]
        return content

    def _ended(self) -> dict[str, Any]:
        """The response with all of its items."""
        choice = self._choice
        num_prompt, num_cached = len(choice.stream.request.prompt), choice.stream.num_cached_tokens
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + choice.num_tokens,
        }
        if choice.finish_reason == FinishReason.LENGTH:
            return self._response("incomplete", incomplete_details={"reason": "max_output_tokens"}, usage=usage)
        return self._response("completed", completed_at=int(time.time()), usage=usage)

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        """The response object, with the items that are done."""
        return {
            "id": self._work.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._services.model_name,
            "output": self._items.done,
            "usage": None,
            **self._terms,
            **fields,
        }


def _terms(body: ResponsesBody) -> dict[str, Any]:
    """What was asked for, as it acts here: every response states it."""
    text = body.text or TextConfig()
    terms = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": ReasoningConfig(),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": TextConfig(format=text.format or TextFormat(type="text"), verbosity=text.verbosity or "medium"),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
    built: dict[str, Any] = msgspec.to_builtins(terms)
    return built
