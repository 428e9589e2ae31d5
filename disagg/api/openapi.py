"""GET /openapi.json: the description of this surface, made from the types that judge the requests.

``OPERATIONS`` is the table: a route that is not in it is not described, and a test compares it with the application's routes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from disagg.api import answer_types as answers
from disagg.api.answers import json_answer
from disagg.api.anthropic.types import CountTokensBody, Message, MessageEvent, MessagesBody, MessagesError, TokenCount
from disagg.api.responses.answer_types import Response, ResponseEvent
from disagg.api.responses.types import ResponsesBody
from disagg.api.types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/{name}"
_REASONS = {
    400: "Malformed, out of range, not supported, or longer than the model's context",
    401: "This server has API keys, and the request has none of them",
    404: "There is no such model",
    413: "The body is too large",
    429: "The queue is full, or the key's allowance is spent; Retry-After says when to come back",
    500: "An admitted request could not be finished",
    503: "Nobody can serve now; Retry-After says when to come back",
    529: "Nobody can serve now; Retry-After says when to come back",
}
_READS_BODY = (400, 404, 413, 429)
_OPEN = ("/livez", "/readyz", "/health")  # without a key, where there are keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    summary: str
    answer: type | str  # of status 200: a type, written as JSON, or another media type
    body: type | None = None
    chunk: type | None = None  # of each event, where the answer can be a stream
    events: str = "The data of each event is a {chunk} or, after a late failure, an Error; the last is [DONE]."
    errors: tuple[int, ...] = ()
    error: type = answers.Error
    others: dict[int, type] | None = None  # statuses whose body is no error object


_GENERATES = (*_READS_BODY, 500, 503)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        summary="The next message of a chat",
        body=ChatBody,
        answer=answers.ChatCompletion,
        chunk=answers.ChatCompletionChunk,
        errors=_GENERATES,
    ),
    ("POST", "/v1/completions"): Operation(
        summary="What follows a raw prompt, or the prompt's own log-probabilities",
        body=CompletionBody,
        answer=answers.Completion,
        chunk=answers.Completion,
        errors=_GENERATES,
    ),
    ("POST", "/v1/responses"): Operation(
        summary="The next items of a conversation, whose earlier ones come with the request",
        body=ResponsesBody,
        answer=Response,
        chunk=ResponseEvent,
        events="Each event has its type for a name, and its data is a {chunk}.",
        errors=_GENERATES,
    ),
    ("POST", "/v1/messages"): Operation(
        summary="The next message of a chat, as Anthropic's API has it",
        body=MessagesBody,
        answer=Message,
        chunk=MessageEvent,
        events="Each event has its type for a name, and its data is a {chunk} or, after a late failure, a MessagesError.",
        errors=(*_READS_BODY, 500, 529),
        error=MessagesError,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="How many input tokens such a message would have",
        body=CountTokensBody,
        answer=TokenCount,
        errors=_READS_BODY,
        error=MessagesError,
    ),
    ("GET", "/v1/models"): Operation(summary="The one model that is served", answer=answers.ModelList),
    ("GET", "/v1/models/{id}"): Operation(summary="A model by its name", answer=answers.Model, errors=(404,)),
    ("POST", "/tokenize"): Operation(
        summary="The token ids of a prompt or of a chat", body=TokenizeBody, answer=answers.Tokenized, errors=_READS_BODY
    ),
    ("POST", "/detokenize"): Operation(
        summary="The text of token ids", body=DetokenizeBody, answer=answers.Detokenized, errors=_READS_BODY
    ),
    ("GET", "/tokenizer_info"): Operation(summary="Special tokens and chat template", answer=answers.TokenizerInfo),
    ("GET", "/livez"): Operation(summary="The process answers", answer=answers.Health),
    ("GET", "/readyz"): Operation(
        summary="A request would be served", answer=answers.Health, others={503: answers.Health}
    ),
    ("GET", "/health"): Operation(summary="As /readyz", answer=answers.Health, others={503: answers.Health}),
    ("GET", "/v1/disagg/status"): Operation(summary="Workers, pairs and requests", answer=answers.Status),
    ("GET", "/metrics"): Operation(summary="Prometheus' text format", answer="text/plain"),
    ("GET", "/version"): Operation(summary="The installed version", answer=answers.Version),
    ("GET", "/openapi.json"): Operation(summary="This description", answer="application/json"),
    ("GET", "/docs"): Operation(summary="This description, to be read", answer="text/html"),
}  # fmt: skip


async def openapi(http: web.Request) -> web.Response:
    return json_answer(document())


@functools.cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document. One object for all callers; not to be changed."""
    paths: dict[str, Any] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation)
    _, components = msgspec.json.schema_components(_types(), ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "disagg",
            "version": version("disagg"),
            "description": "Fields that are not described are ignored. Errors are OpenAI's error objects, or Anthropic's.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _types() -> list[type]:
    named: list[type] = []
    for operation in OPERATIONS.values():
        others = (operation.others or {}).values()
        named += [
            each
            for each in (operation.body, operation.answer, operation.chunk, operation.error, *others)
            if isinstance(each, type)
        ]
    return list(dict.fromkeys(named))


def _operation(path: str, operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary}
    if "{id}" in path:
        described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body)}
    if isinstance(operation.answer, str):
        content: dict[str, Any] = {operation.answer: {}}
    else:
        content = _json(operation.answer)
    if operation.chunk is not None:
        text = "With stream: true. " + operation.events.format(chunk=operation.chunk.__name__)
        content["text/event-stream"] = {"schema": {"description": text}}  # no type: OpenAPI 3.1 has none for a stream's events
    errors = operation.errors
    if path not in _OPEN:
        described["security"] = [{}, {"bearer": []}, {"header": []}]
        errors = tuple(sorted((401, *errors)))
    described["responses"] = {
        "200": {"description": "Success", "content": content},
        **{str(code): {"description": _REASONS[code], "content": _json(kind)} for code, kind in (operation.others or {}).items()},
        **{str(code): {"description": _REASONS[code], "content": _json(operation.error)} for code in errors},
    }
    return described


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
