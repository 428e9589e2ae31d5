"""GET /openapi.json and /docs: what they promise is what the application does."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from disagg.api import answer_types as answers
from disagg.api.app import build_app
from disagg.api.openapi import OPERATIONS, document
from tests.unit.api.fakes import MODEL, FakeRouter, async_test, make_services, says, serving

_NOT_DESCRIBED = {"/"}  # the page for people


def routes() -> set[tuple[str, str]]:
    resources = ((route.method, route.resource) for route in build_app(make_services(FakeRouter())).router.routes())
    return {(method, resource.canonical) for method, resource in resources if resource is not None and method != "HEAD"}


def test_every_route_is_described_and_no_other() -> None:
    """The table and the application have the same routes."""
    assert {route for route in routes() if route[1] not in _NOT_DESCRIBED} == set(OPERATIONS)


def test_every_reference_leads_somewhere() -> None:
    """All schemas that are named exist, and error answers are error objects."""
    described = document()
    schemas = described["components"]["schemas"]
    named = set(re.findall(r"#/components/schemas/(\w+)", str(described)))
    assert named <= schemas.keys()
    assert {"ChatBody", "CompletionBody", "ChatCompletionChunk", "Error"} <= schemas.keys()
    assert schemas["ChatBody"]["required"] == ["messages"]
    assert schemas["CompletionBody"]["properties"]["top_p"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}


FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"logprobs": 1},
    {"return_token_ids": True},
    {"stop": ["l"]},
]


@pytest.mark.parametrize("fields", FIELDS)
@async_test
async def test_answers_and_chunks_are_of_the_described_types(fields: dict[str, Any]) -> None:
    """Every field of an answer is described, none that is promised is missing; usage in chunks and the last chunk too."""
    chat = {**fields, "logprobs": True, "top_logprobs": 1} if "logprobs" in fields else fields
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(FakeRouter(says("hello"))) as client:
        found = [(answers.Completion, await client.complete(prompt="a", **fields))]
        found += [(answers.ChatCompletion, await client.chat(**chat))]
        found += [(answers.Completion, each) for each in await client.complete_events(prompt="a", **fields)]
        found += [(answers.ChatCompletionChunk, each) for each in await client.chat_events(**chat, stream_options=options)]
    for kind, answer in found:
        assert msgspec.to_builtins(msgspec.convert(answer, kind)) == answer


@async_test
async def test_what_operators_and_clients_read_is_of_the_described_types() -> None:
    """Models, tokenizer, health, version; an error of any route."""
    async with serving(FakeRouter()) as client:
        found = [
            (answers.ModelList, await client.get("/v1/models")),
            (answers.Model, await client.get(f"/v1/models/{MODEL}")),
            (answers.TokenizerInfo, await client.get("/tokenizer_info")),
            (answers.Health, await client.get("/livez")),
            (answers.Health, await client.get("/health")),
            (answers.Version, await client.get("/version")),
            (answers.Tokenized, (await client.post("/tokenize", {"prompt": "a", "return_token_strs": True}))[::2]),
            (answers.Detokenized, (await client.post("/detokenize", {"tokens": [97]}))[::2]),
            (answers.Error, await client.get("/nothing")),
        ]
    for kind, (_, answer) in found:
        assert msgspec.to_builtins(msgspec.convert(answer, kind)) == answer


@async_test
async def test_the_description_can_be_read_without_a_network() -> None:
    """/openapi.json is the document, /docs a page of it with every route and field, no script and nothing from elsewhere."""
    async with serving(FakeRouter()) as client:
        status, described = await client.get("/openapi.json")
        async with client.http.get("/docs") as response:
            page, headers = await response.text(), response.headers
    assert (status, described) == (200, document())
    assert headers["Content-Type"].startswith("text/html")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert all(path in page for _, path in OPERATIONS)
    assert all(f"<code>{name}</code>" in page for name in described["components"]["schemas"]["ChatBody"]["properties"])
    assert not re.search(r"<script|src=|href=.?https?:|style=|onclick", page)
