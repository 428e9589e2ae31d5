"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api import errors
from disagg.api.anthropic import types
from disagg.api.anthropic.blocks import MessageWriter
from disagg.api.anthropic.endpoint import plan
from disagg.api.choice import Choice
from disagg.config import ServerConfig
from disagg.credentials import ApiKeys
from disagg.errors import OverloadedError, UnavailableError
from disagg.request import FailReason
from disagg.stream import RequestStream
from tests.unit.api.fakes import (
    MODEL,
    TOKENIZER,
    Client,
    FakeRouter,
    async_test,
    end,
    make_services,
    says,
    serving,
    tokens,
    until,
)
from tests.unit.api.test_chat import RecordingTemplate
from tests.unit.api.test_tools import CALL, SCHEMA, TEMPLATE, able, follows

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
BASE = {"model": MODEL, "max_tokens": 200, "messages": HI}
WEATHER = {"name": "get_weather", "description": "of a city", "input_schema": SCHEMA}
PING = {"name": "ping", "input_schema": {"type": "object", "properties": {}}}
KEY = "alice-0123456789abcdef"
USE = {"type": "tool_use", "id": "c1", "name": "ping", "input": {"a": [1, "ö"]}}


async def create(client: Client, **fields: Any) -> dict[str, Any]:
    status, _, answer = await client.post(PATH, {**BASE, **fields}, **{"anthropic-version": "2023-06-01"})
    assert status == 200, answer
    assert msgspec.to_builtins(msgspec.convert(answer, types.Message)) == answer
    return answer


async def refused(client: Client, body: Any, status: int = 400, path: str = PATH, **headers: str) -> dict[str, Any]:
    """The error object of an answer that must have ``status``; it is Anthropic's in everything."""
    got, answered, answer = await client.post(path, body, **headers)
    assert got == status, answer
    assert msgspec.to_builtins(msgspec.convert(answer, types.MessagesError)) == answer
    assert answer["request_id"] == answered["Request-Id"] == answered["X-Request-Id"]
    assert 0 < len(answer["error"]["message"]) <= 300
    return answer["error"]


def parse(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, checked for their framing: a name that is the type, then the data."""
    assert raw.endswith(b"\n\n")
    events = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to, as a client makes it; the order of the events is checked."""
    start, *middle, delta, stop = [event for event in events if event["type"] != "ping"]
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    text, is_open = "", False
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                text, is_open = "", True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                text += event["delta"]["text" if event["delta"]["type"] == "text_delta" else "partial_json"]
            case "content_block_stop":
                assert is_open
                block, is_open = message["content"][-1], False
                block.update({"text": text} if block["type"] == "text" else {"input": json.loads(text)})
            case other:
                raise AssertionError(other)
    assert not is_open
    return {**message, **delta["delta"], "usage": delta["usage"]}


async def stream(client: Client, **fields: Any) -> list[dict[str, Any]]:
    async with client.http.post(PATH, json={**BASE, "stream": True, **fields}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        events = parse(await response.read())
    for event in events:
        kind: type = types.MessagesError if event["type"] == "error" else types.MessageEvent
        assert msgspec.to_builtins(msgspec.convert(event, kind)) == event
    return events


# ------------------------------------------------------------------------------------------------ answers


@async_test
async def test_an_answer_has_anthropics_shape() -> None:
    """A message of blocks; input tokens are told apart by where they came from, and add up to the prompt."""
    router = FakeRouter(says("hello"))
    router.num_cached_tokens = 4
    async with serving(router) as client:
        answer = await create(client, metadata={"user_id": "u"}, thinking={"type": "disabled"}, unknown=1)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(router.streams[0].request.prompt) - 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 6,
        },
    }
    assert client.metrics.finished == ["stop"]
    assert client.metrics.requests == [(PATH, 200)]


@async_test
async def test_a_stream_adds_up_to_the_whole_answer() -> None:
    """Events in their order, the text in pieces as it comes, usage at both ends; no [DONE]."""
    async with serving(FakeRouter(says("wörld\u2028"))) as client:
        whole, events = await create(client), await stream(client)
    message = assembled(events)
    assert message.pop("id") != whole.pop("id")
    assert message == whole
    pieces = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert pieces == ["w", "ö", "r", "l", "d", "\u2028"]
    assert events[0]["message"]["usage"] == {**whole["usage"], "output_tokens": 1}


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "hello"),
        ({"max_tokens": 3}, "max_tokens", None, "hel"),
        ({"stop_sequences": ["l"]}, "stop_sequence", "l", "he"),
        ({"stop_sequences": []}, "end_turn", None, "hello"),
    ],
)
@async_test
async def test_the_stop_reason_says_what_ended_it(fields: dict[str, Any], reason: str, sequence: str | None, text: str) -> None:
    """The end of the turn, the limit, or a stop sequence, which is named; whole and streamed."""
    async with serving(FakeRouter(says("hello"))) as client:
        for answer in (await create(client, **fields), assembled(await stream(client, **fields))):
            assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
            assert answer["content"] == [{"type": "text", "text": text}]


@async_test
async def test_max_tokens_may_go_beyond_the_context() -> None:
    """What is left of the context is the limit then, and its end has a reason of its own; a prompt that fills it is refused."""
    router = FakeRouter(lambda request: [[output] for output in tokens("x" * request.params.max_tokens)])
    async with serving(router, max_model_len=64) as client:
        answer = await create(client, max_tokens=100_000)
        room = 64 - len(router.streams[0].request.prompt)
        exact = await create(client, max_tokens=room)
        error = await refused(client, {**BASE, "messages": [{"role": "user", "content": "x" * 70}]})
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("model_context_window_exceeded", room)
    assert exact["stop_reason"] == "max_tokens"
    assert "context" in error["message"]


@async_test
async def test_an_empty_answer_has_no_blocks() -> None:
    """End-of-sequence at once: nothing is begun that would have to be ended."""
    async with serving(FakeRouter(says(""))) as client:
        whole, streamed = await create(client), assembled(await stream(client))
    assert whole["content"] == streamed["content"] == []
    assert whole["stop_reason"] == "end_turn"


# ------------------------------------------------------------------------------------------------ tools and forms


@async_test
async def test_text_and_calls_are_blocks_in_their_order() -> None:
    """A call's input is an object; the reason is tool_use."""
    text = f"I ask. {CALL}\n{CALL.replace('Zürich', 'Ulm')}"
    async with serving(FakeRouter(says(text)), **able()) as client:
        whole = await create(client, max_tokens=1000, tools=[WEATHER])
        streamed = assembled(await stream(client, max_tokens=1000, tools=[WEATHER]))
    first, second, third = whole["content"]
    assert first == {"type": "text", "text": "I ask."}
    assert (second["name"], second["input"], third["input"]) == ("get_weather", {"city": "Zürich"}, {"city": "Ulm"})
    assert second["id"] != third["id"]
    assert whole["stop_reason"] == streamed["stop_reason"] == "tool_use"
    assert [block["type"] for block in streamed["content"]] == ["text", "tool_use", "tool_use"]


def writer() -> tuple[MessageWriter, Choice]:
    """One of the same request each time, so that calls have the same ids."""
    asked = plan(json.dumps({**BASE, "max_tokens": 2000, "tools": [WEATHER, PING]}).encode(), SERVICES)
    request = msgspec.structs.replace(asked.work.requests[0], id="r-0")
    choice = Choice(0, RequestStream(request, lambda *_: None, 0.0), TOKENIZER, asked.work.options)
    return MessageWriter(asked.max_tokens, SERVICES, asked.work, [choice]), choice


SERVICES = make_services(FakeRouter(), **able())
PIECES = ["plain ", "ö🦙", "\n", CALL, '<tool_call>{"name": "ping"}</tool_call>', "<tool_call>no call", "{", " end"]


@given(
    text=st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    splits=st.sets(st.integers(1, 300)),
    is_cut=st.booleans(),
)
def test_deltas_add_up_to_the_whole_answer_however_tokens_arrive(text: str, splits: set[int], is_cut: bool) -> None:
    """Text and calls in any order and any batches: the same blocks, with the same ids; nothing of the text is lost or doubled."""
    outputs = tokens(text) if is_cut and text else [*(tokens(text, None) if text else []), end()]
    borders = [0, *sorted(split for split in splits if split < len(outputs)), len(outputs)]
    streaming, choice = writer()
    raw = b"".join(streaming.write(choice, choice.push(outputs[start:stop])) for start, stop in pairwise(borders))
    keeping, kept = writer()
    for output in outputs:
        keeping.keep(kept, kept.push([output]))
    whole = keeping.whole()
    assert {**assembled(parse(raw + streaming.ending())), "id": ""} == {**whole, "id": ""}
    if "<tool_call>" not in text:
        assert "".join(block["text"] for block in whole["content"]) == text


@async_test
async def test_a_call_that_is_cut_has_no_input() -> None:
    """The limit came in the middle of the arguments: the block stays, with what is an object all the same."""
    async with serving(FakeRouter(says(CALL)), **able()) as client:
        cut = await create(client, max_tokens=CALL.index("city"), tools=[WEATHER])
    (block,) = cut["content"]
    assert (block["name"], block["input"], cut["stop_reason"]) == ("get_weather", {}, "max_tokens")


@async_test
async def test_the_choice_of_a_tool_reaches_the_engine() -> None:
    """any and tool are forced by a grammar, one call only where parallel use is disabled; none hides the tools."""
    router = FakeRouter(says("x"))
    ping = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    tools = [WEATHER, PING]
    choices: list[tuple[dict[str, Any], list[bool]]] = [
        ({"type": "any"}, [True, True, True, False]),
        ({"type": "any", "disable_parallel_tool_use": True}, [True, True, False, False]),
        ({"type": "tool", "name": "ping"}, [False, True, False, False]),
    ]
    async with serving(router, **able()) as client:
        for choice, expected in choices:
            await create(client, tools=tools, tool_choice=choice)
            request = router.streams[-1].request
            assert [follows(request, text) for text in (CALL, ping, f"{CALL}\n{ping}", "hi")] == expected, choice
        await create(client, tools=tools, tool_choice={"type": "auto"})
        shown = len(router.streams[-1].request.prompt)
        await create(client, tools=tools, tool_choice={"type": "none"})
        await create(client)
    assert router.streams[-1].request.prompt == router.streams[-2].request.prompt
    assert len(router.streams[-1].request.prompt) < shown
    assert all(stream.request.params.grammar is None for stream in router.streams[-3:])


@async_test
async def test_one_call_ends_the_answer_where_parallel_use_is_disabled() -> None:
    """Of two calls the first is the answer."""
    async with serving(FakeRouter(says(f"{CALL}\n{CALL}")), **able()) as client:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        answer = await create(client, max_tokens=1000, tools=[WEATHER], tool_choice=choice)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert answer["stop_reason"] == "tool_use"


@async_test
async def test_an_output_format_reaches_the_engine_and_is_blamed_by_its_name() -> None:
    """A schema makes a grammar; one that is none is a 400 that names output_config.format."""
    router = FakeRouter(says("x"))

    def asking(schema: Any) -> dict[str, Any]:
        return {**BASE, "output_config": {"format": {"type": "json_schema", "schema": schema}}}

    async with serving(router, **able()) as client:
        await create(client, **asking(SCHEMA))
        assert follows(router.streams[0].request, '{"city": "Ulm"}')
        error = await refused(client, asking({"type": "thing"}))
    async with serving(router) as client:
        unable = await refused(client, asking(SCHEMA))
    assert error["message"].startswith("output_config.format: ")
    assert unable["message"].startswith("output_config.format: ")


# ------------------------------------------------------------------------------------------------ conversations


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


CONVERSATIONS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"messages": HI}, [{"role": "user", "content": "hi"}]),
    ({"system": "be", "messages": HI}, [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]),
    (
        {"system": [text_block("a"), text_block("b")], "messages": [{"role": "user", "content": [text_block("hi")]}]},
        [{"role": "system", "content": [part("a"), part("b")]}, {"role": "user", "content": "hi"}],
    ),
    (  # consecutive turns of one role are one
        {"messages": [*HI, {"role": "user", "content": [text_block("there"), text_block("you")]}]},
        [{"role": "user", "content": [part("hi"), part("there"), part("you")]}],
    ),
    (  # the use of tools and their results, with what the user says to them
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "…"}, text_block("so"), USE]},
                {"role": "assistant", "content": [{**USE, "id": "c2", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "pong"},
                        {"type": "tool_result", "tool_use_id": "c2", "content": [part("no"), part("way")], "is_error": True},
                        {"type": "tool_result", "tool_use_id": "c3"},
                        text_block("well?"),
                    ],
                },
            ]
        },
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "so",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "ping", "arguments": {"a": [1, "ö"]}}},
                    {"id": "c2", "type": "function", "function": {"name": "ping", "arguments": {}}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "pong"},
            {"role": "tool", "tool_call_id": "c2", "content": "Error: no\nway"},
            {"role": "tool", "tool_call_id": "c3", "content": ""},
            {"role": "user", "content": "well?"},
        ],
    ),
]


@pytest.mark.parametrize(("fields", "expected"), CONVERSATIONS)
@async_test
async def test_turns_become_messages(fields: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    """What the template is given: system first, results of tools as messages of their own, in the order of the blocks."""
    template = RecordingTemplate()
    async with serving(FakeRouter(says("x")), **able(chat_template=template)) as client:
        await create(client, **fields)
    ((messages, options),) = template.calls
    assert [{key: value for key, value in message.items() if value is not None} for message in messages] == expected
    assert (options["add_generation_prompt"], options["continue_final_message"]) == (True, False)


@async_test
async def test_tools_are_shown_as_functions() -> None:
    """Their schema is the function's parameters."""
    template = RecordingTemplate()
    template.source = TEMPLATE.source
    async with serving(FakeRouter(says("x")), **able(chat_template=template)) as client:
        await create(client, tools=[{**WEATHER, "type": "custom"}])
    function = {"name": "get_weather", "description": "of a city", "parameters": SCHEMA}
    assert template.calls[0][1]["tools"] == [{"type": "function", "function": function}]


@async_test
async def test_an_answer_goes_on_in_the_middle_of_the_assistants_turn() -> None:
    """The prompt ends with what it has said so far, open for more."""
    router = FakeRouter(says(" B)"))
    async with serving(router) as client:
        answer = await create(client, messages=[*HI, {"role": "assistant", "content": "The best answer is ("}])
    assert TOKENIZER.decode(router.streams[0].request.prompt).endswith("The best answer is (")
    assert answer["content"] == [{"type": "text", "text": " B)"}]


@async_test
async def test_sampling_is_passed_on() -> None:
    """temperature, top_p, top_k and max_tokens, with the defaults of the chat endpoint."""
    router = FakeRouter(says("x"))
    async with serving(router) as client:
        await create(client, temperature=0.5, top_p=0.9, top_k=5, max_tokens=7)
        await create(client)
    given, default = (stream.request.params for stream in router.streams)
    assert (given.temperature, given.top_p, given.top_k, given.max_tokens) == (0.5, 0.9, 5, 7)
    assert (default.temperature, default.top_p, default.top_k) == (1.0, 1.0, 0)


@async_test
async def test_the_count_is_that_of_the_request() -> None:
    """With system, tools, results and a begun answer: the tokens of the prompt that would be computed."""
    router = FakeRouter(says("x"))
    bodies: list[dict[str, Any]] = [fields for fields, _ in CONVERSATIONS]
    bodies += [{"messages": HI, "tools": [WEATHER]}, {"messages": HI, "tools": [WEATHER], "tool_choice": {"type": "none"}}]
    bodies += [{"messages": [*HI, {"role": "assistant", "content": "so "}]}]
    async with serving(router, **able()) as client:
        for fields in bodies:
            usage = (await create(client, **fields))["usage"]
            status, _, count = await client.post(COUNT, {"model": MODEL, **fields})
            assert (status, count) == (200, {"input_tokens": usage["input_tokens"]})
    async with serving(router, max_model_len=16) as client:
        assert (await client.post(COUNT, {"model": MODEL, "messages": [{"role": "user", "content": "x" * 30}]}))[0] == 200


# ------------------------------------------------------------------------------------------------ failures

FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
    ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]},
     "messages[1].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}]}]},
     "messages[0].content[0].content[0].type"),
    *(({"messages": [*HI, {"role": "assistant", "content": [{key: value for key, value in USE.items() if key != missing}]}]},
       f"messages[1].content[0].{missing}") for missing in ("id", "name", "input")),
    ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages"),
    ({"messages": [*HI, {"role": "assistant", "content": ""}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**PING, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [PING, PING]}, "tools[1].name"),
    ({"tools": [PING], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tools": [PING], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [PING], "tool_choice": {"type": "tool", "name": "pong"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
]  # fmt: skip


@async_test
async def test_what_is_wrong_is_said_in_the_words_of_the_body() -> None:
    """A 400 that begins with the field as this API calls it, before any work."""
    router = FakeRouter()
    async with serving(router, **able()) as client:
        for fields, param in FAULTS:
            body = {name: value for name, value in {**BASE, **fields}.items() if value is not None}
            error = await refused(client, body)
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith(f"{param}: "), error
        assert (await refused(client, b"{"))["type"] == "invalid_request_error"
        counting = await refused(client, {"messages": HI, "tools": [{**PING, "name": "a b"}]}, path=COUNT)
        assert counting["message"].startswith("tools[0].name: ")
    async with serving(router, chat_template=None) as client:
        assert (await refused(client, BASE))["message"].startswith("messages: this model has no chat template")
    assert router.streams == []


@pytest.mark.parametrize("path", [PATH, COUNT])
@async_test
async def test_every_refusal_has_anthropics_envelope(path: str, tmp_path: Path) -> None:
    """Without a key, with an unknown model or route, by another method, with too large a body, over the allowance."""
    (tmp_path / "keys").write_text(f"alice:{KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    keys = ApiKeys(str(tmp_path / "keys"), {})
    config = ServerConfig(max_body_bytes=1000, requests_per_minute=4)
    body = {key: value for key, value in BASE.items() if path == PATH or key != "max_tokens"}
    given = {"X-Api-Key": KEY}
    async with serving(FakeRouter(says("x")), config=config, keys=keys) as client:
        assert (await refused(client, body, 401, path))["type"] == "authentication_error"
        assert (await refused(client, {**body, "model": "claude-sonnet-4-5"}, 404, path, **given))["type"] == "not_found_error"
        assert (await refused(client, {**body, "system": "x" * 2000}, 413, path, **given))["type"] == "request_too_large"
        assert (await refused(client, body, 404, f"{path}/batches", **given))["type"] == "not_found_error"
        assert (await client.post(path, body, **given))[0] == 200
        assert (await refused(client, body, 429, path, **given))["type"] == "rate_limit_error"
        async with client.http.get(path, headers=given) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (405, "invalid_request_error")


@async_test
async def test_failures_before_the_first_token_are_statuses() -> None:
    """Overloaded is 529, a full queue 429 with Retry-After; what would fail again is an api_error that says so."""
    router = FakeRouter(lambda _: [FailReason.HANDOFF])
    async with serving(router) as client:
        assert (await refused(client, BASE, 500))["type"] == "api_error"
        assert (await refused(client, {**BASE, "stream": True}, 500))["type"] == "api_error"
        router.script = lambda _: [FailReason.WORKER_DIED]
        assert (await refused(client, BASE, 529))["type"] == "overloaded_error"
        router.refusal = OverloadedError("full", retry_after_s=2.0)
        status, headers, answer = await client.post(PATH, BASE)
        assert (status, headers["Retry-After"], answer["error"]["type"]) == (429, "2", "rate_limit_error")
        router.refusal = UnavailableError("draining")
        assert (await refused(client, BASE, 529))["type"] == "overloaded_error"
        router.refusal = RuntimeError("secret")
        assert "secret" not in (await refused(client, BASE, 500))["message"]


@async_test
async def test_a_late_failure_is_an_event() -> None:
    """What was sent stays; the error event is the last, with the name of the request."""
    router, headers = FakeRouter(lambda _: [tokens("a", None), FailReason.WORKER_DIED]), {"X-Request-Id": "mine"}
    async with serving(router) as client:
        async with client.http.post(PATH, json={**BASE, "stream": True}, headers=headers) as response:
            *events, failure = parse(await response.read())
        await until(lambda: bool(client.metrics.finished))
    assert [event["type"] for event in events] == ["message_start", "content_block_start", "content_block_delta"]
    assert failure == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "a worker was lost"},
        "request_id": "mine",
    }
    assert client.metrics.finished == ["error"]


@async_test
async def test_a_silent_stream_pings() -> None:
    """An event without a meaning, before the message begins too."""
    router = FakeRouter()
    config = ServerConfig(keepalive_s=0.01)
    async with serving(router, config=config) as client, client.http.post(PATH, json={**BASE, "stream": True}) as response:
        assert await response.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'
        router.deliver(router.streams[0], *tokens("a", None), end())
        events = parse(await response.read())
    assert assembled(events)["content"] == [{"type": "text", "text": "a"}]


@async_test
async def test_a_client_that_leaves_frees_its_request() -> None:
    """As on the other endpoints."""
    router = FakeRouter()
    async with serving(router) as client:
        request = asyncio.create_task(client.http.post(PATH, json={**BASE, "stream": True}))
        await until(lambda: bool(router.streams))
        request.cancel()
        await until(lambda: bool(router.aborted))
        await until(lambda: bool(client.metrics.requests))
    assert client.metrics.finished == ["abort"]


def test_only_these_routes_have_this_envelope() -> None:
    """A path that merely begins alike is another API's."""
    assert all(errors.is_of_messages(path) for path in (PATH, COUNT, f"{PATH}/x"))
    assert not any(errors.is_of_messages(path) for path in (f"{PATH}x", "/v1/models", "/"))
