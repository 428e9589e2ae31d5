"""The endpoints: a message, and the number of tokens that a message's prompt has."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from disagg.api import chat
from disagg.api.answers import json_answer
from disagg.api.anthropic.blocks import MessageWriter
from disagg.api.anthropic.convert import as_chat, in_own_words, own_name
from disagg.api.anthropic.types import CountTokensBody, MessagesBody
from disagg.api.generate import serve
from disagg.api.read import read
from disagg.api.services import Services
from disagg.api.types import parse_body
from disagg.api.validate import Work, check_model
from disagg.errors import InvalidRequestError

_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountTokensBody)


class Asked(NamedTuple):
    work: Work
    max_tokens: int


async def messages(http: web.Request) -> web.StreamResponse:
    asked = await read(http, plan)
    return await serve(http, asked.work, partial(MessageWriter, asked.max_tokens))


async def count_tokens(http: web.Request) -> web.Response:
    return json_answer(await read(http, _count))


def plan(raw: bytes, services: Services) -> Asked:
    """The body's request. Raises InvalidRequestError. Pure, and slow for a long prompt."""
    body = parse_body(raw, _decoder)
    asked = as_chat(
        body,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        stream=body.stream,
        user=None if body.metadata is None else body.metadata.user_id,
    )
    with _own_words():
        work = chat.work_of(f"msg_{uuid.uuid4().hex}", asked, services)
    if work.form is not None:  # judged later, and blamed on the field that it came from
        work = replace(work, form=work.form._replace(param=own_name(work.form.param)))
    # The chat has been given the rest of the context: max_tokens may be more than that, and the stop reason says which ended it.
    (request,) = work.requests
    params = msgspec.structs.replace(request.params, max_tokens=min(request.params.max_tokens, body.max_tokens))
    return Asked(replace(work, requests=[msgspec.structs.replace(request, params=params)]), body.max_tokens)


def _count(raw: bytes, services: Services) -> dict[str, Any]:
    """A little longer than the context is no fault: who asks may want to know by how much."""
    body = parse_body(raw, _count_decoder)
    asked = as_chat(body)
    with _own_words():
        check_model(asked.model, services)
        return {"input_tokens": len(chat.render(asked, services, chat.tools_of(asked, services)))}


@contextmanager
def _own_words() -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        raise in_own_words(error) from error
