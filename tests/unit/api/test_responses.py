"""POST /v1/responses: what a body asks of the chat core, the answer as OpenAI's client reads it, and the stream of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses as sdk

from disagg.api.choice import Choice
from disagg.api.responses.answer_types import Response, ResponseEvent
from disagg.api.responses.endpoint import ResponseWriter, plan
from disagg.config import ServerConfig
from disagg.errors import OverloadedError
from disagg.messages import TokenLogprobs, TokenOutput
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

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "get_weather", "description": "of a city", "parameters": SCHEMA}
PING = {"type": "function", "name": "ping"}
LOGGED = {"include": ["message.output_text.logprobs"]}
USER = {"role": "user", "content": "hi"}


async def respond(client: Client, **body: Any) -> dict[str, Any]:
    status, _, answer = await client.post(PATH, {"input": "hi", **body})
    assert status == 200, answer
    return answer


async def stream(client: Client, **body: Any) -> list[dict[str, Any]]:
    async with client.http.post(PATH, json={"input": "hi", "stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        return parse(await response.read())


def parse(raw: bytes) -> list[dict[str, Any]]:
    """The events, each under its name and numbered from 0; nothing behind them."""
    assert raw.endswith(b"\n\n")
    events = []
    for number, block in enumerate(raw.decode().removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def types(events: Iterable[dict[str, Any]]) -> list[str]:
    """Their types, repeated ones once."""
    found = [event["type"].removeprefix("response.") for event in events]
    return [name for before, name in pairwise(["", *found]) if name != before]


def added_up(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client makes it that trusts nothing but what is added and its deltas; what is done must agree."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(json.loads(json.dumps(event["item"])))
            case "content_part.added":
                items[event["output_index"]]["content"].append(dict(event["part"]))
            case "output_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] = part["logprobs"] + event["logprobs"]
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "output_text.done":
                part = items[event["output_index"]]["content"][event["content_index"]]
                assert (part["text"], part["logprobs"]) == (event["text"], event["logprobs"])
            case "function_call_arguments.done":
                item = items[event["output_index"]]
                assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
            case "content_part.done":
                assert items[event["output_index"]]["content"] == [event["part"]]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
                assert items[event["output_index"]] == event["item"]
        assert "item_id" not in event or event["item_id"] == items[event["output_index"]]["id"]
    return items


# ------------------------------------------------------------------------------------------------------ answers


@async_test
async def test_an_answer_has_openais_shape() -> None:
    """One message with its text, usage, and what was asked for; the official client's model reads it strictly."""
    router = FakeRouter(says("hello"))
    router.num_cached_tokens = 7
    async with serving(router) as client:
        answer = await respond(client, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, user="u")
    assert sdk.Response.model_validate(answer, strict=True).output_text == "hello"
    assert answer["id"].startswith("resp_")
    (message,) = answer["output"]
    assert message.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    assert message == {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert (answer["status"], answer["error"], answer["incomplete_details"], answer["store"]) == ("completed", None, None, False)
    assert answer["completed_at"] >= answer["created_at"]
    echoed = {name: answer[name] for name in ("model", "instructions", "metadata", "temperature", "top_p", "user")}
    expected = {"model": MODEL, "instructions": "Be kind.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 1.0, "user": "u"}
    assert echoed == expected
    num_prompt = len(router.streams[0].request.prompt)
    assert answer["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + 6,
    }


@async_test
async def test_a_stream_tells_the_answer_step_by_step() -> None:
    """Created, in progress, the item with its part and its deltas, and the whole response at the end."""
    async with serving(FakeRouter(says("héllo"))) as client:
        events = await stream(client)
        assert client.metrics.finished == ["stop"]
    assert types(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert [event["delta"] for event in events if "delta" in event] == ["h", "é", "l", "l", "o"]
    assert added_up(events) == last["output"]
    assert last["usage"]["output_tokens"] == 7
    assert {event["response"]["id"] for event in events if "response" in event} == {first["id"]}


@async_test
async def test_an_answer_that_is_cut_is_incomplete() -> None:
    """max_output_tokens: the response and its last item say so, whole and streamed."""
    async with serving(FakeRouter(says("hello"))) as client:
        answer = await respond(client, max_output_tokens=3)
        events = await stream(client, max_output_tokens=3)
    for response in (answer, events[-1]["response"]):
        assert (response["status"], response["completed_at"]) == ("incomplete", None)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [(item["status"], item["content"][0]["text"]) for item in response["output"]] == [("incomplete", "hel")]
        assert response["usage"]["output_tokens"] == response["max_output_tokens"] == 3
    assert types(events)[-2:] == ["output_item.done", "incomplete"]


@async_test
async def test_an_answer_without_a_token_of_text_is_an_empty_message() -> None:
    """Clients look for output[0].content[0] without asking whether there is one."""
    async with serving(FakeRouter(lambda _request: [[end()]])) as client:
        answer = await respond(client)
        events = await stream(client)
    assert [part["text"] for part in answer["output"][0]["content"]] == [""]
    assert types(events)[2:6] == ["output_item.added", "content_part.added", "output_text.done", "content_part.done"]


TALK = f"Let me look.\n{CALL}\n{CALL} Wait"


@async_test
async def test_text_and_calls_keep_their_order() -> None:
    """Text, two calls and text are four items, with the ids that the results will come back with."""
    async with serving(FakeRouter(says(TALK)), **able()) as client:
        answer = await respond(client, tools=[WEATHER, PING])
        events = await stream(client, tools=[WEATHER, PING])
    for output in (answer["output"], events[-1]["response"]["output"]):
        before, first, second, after = output
        assert [before["content"][0]["text"], after["content"][0]["text"]] == ["Let me look.", " Wait"]
        for call in (first, second):
            assert call["id"].startswith("fc_")
            assert call["call_id"].startswith("call_")
            assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
            assert json.loads(call["arguments"]) == {"city": "Zürich"}
        assert len({item["id"] for item in output} | {first["call_id"], second["call_id"]}) == 6
    assert sdk.Response.model_validate(answer, strict=True).tools[0].type == "function"
    assert added_up(events) == events[-1]["response"]["output"]
    assert events[-1]["type"] == "response.completed"


@async_test
async def test_a_call_that_is_cut_is_incomplete() -> None:
    """max_output_tokens inside the arguments: what there was of them."""
    async with serving(FakeRouter(says(CALL)), **able()) as client:
        answer = await respond(client, tools=[WEATHER], max_output_tokens=CALL.index("Z") + 1)
    (call,) = answer["output"]
    assert (answer["status"], call["status"], call["arguments"]) == ("incomplete", "incomplete", '{"city": "Z')


@pytest.mark.parametrize("is_streamed", [False, True])
@async_test
async def test_logprobs_add_up_to_the_text(is_streamed: bool) -> None:
    """An entry with the k best per token of the text, in the deltas and whole; the tokens of calls have none."""
    async with serving(FakeRouter(says(TALK)), **able()) as client:
        body = {**LOGGED, "top_logprobs": 2, "tools": [WEATHER]}
        if is_streamed:
            events = await stream(client, **body)
            output = events[-1]["response"]["output"]
            assert added_up(events) == output
        else:
            output = (await respond(client, **body))["output"]
    parts = [item["content"][0] for item in output if item["type"] == "message"]
    for part in parts:
        assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == part["text"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert len(parts) == 2


@async_test
async def test_a_token_that_a_stop_string_cut_keeps_its_logprob() -> None:
    """What is shown of its text came before its end was known: the entry follows in a delta without text."""
    word = TokenOutput(dispatch=0, token=TOKENIZER.encode("<|im_start|>")[0], logprobs=TokenLogprobs(logprob=-1.0, top=[]))
    async with serving(FakeRouter(lambda _request: [[word], tokens("x", None, logprobs=True)])) as client:
        events = await stream(client, **LOGGED, stop="start|>x", skip_special_tokens=False)
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert (part["text"], [entry["token"] for entry in part["logprobs"]]) == ("<|im_", ["<|im_start|>"])
    assert added_up(events) == events[-1]["response"]["output"]


FRAGMENTS = ["Hi", " ", "\n", "é", "🦙", "<tool_call>", "<tool", CALL, CALL.replace("get_weather", "ping"), '{"name"', "}", "</"]
SERVICES = make_services(FakeRouter(), **able(max_model_len=100_000))


def batches(outputs: Sequence[TokenOutput], splits: set[int]) -> list[Sequence[TokenOutput]]:
    borders = [0, *sorted(split for split in splits if split < len(outputs)), len(outputs)]
    return [outputs[start:stop] for start, stop in pairwise(borders)]


def comparable(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the ids, which are other ones in each answer."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join).filter(bool),
    st.sets(st.integers(1, 400)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_stream_adds_up_to_the_whole_answer(
    text: str, splits: set[int], is_logged: bool, ends_by_token: bool, is_single: bool
) -> None:
    """However tokens arrive, with calls or without: the deltas make the items of the last event and of a whole answer."""
    outputs = tokens(text, None if ends_by_token else "length", logprobs=True) + [end()] * ends_by_token
    body = {"input": "hi", "tools": [WEATHER, PING], "parallel_tool_calls": not is_single, **(LOGGED if is_logged else {})}

    def answer(arriving: list[Sequence[TokenOutput]], *, is_streamed: bool) -> Any:
        work, asked = plan(json.dumps(body).encode(), SERVICES)
        choice = Choice(0, RequestStream(work.requests[0], lambda *_: None, 0.0), TOKENIZER, work.options)
        writer = ResponseWriter(asked, SERVICES, work, [choice])
        told = b""
        for batch in arriving:
            part = choice.push(batch)
            if is_streamed:
                told += writer.write(choice, part)
            else:
                writer.keep(choice, part)
            if choice.finish_reason is not None:
                break
        return parse(told + writer.ending()) if is_streamed else writer.whole()

    events = answer(batches(outputs, splits), is_streamed=True)
    ended = events[-1]["response"]
    assert added_up(events) == ended["output"]
    whole = answer([[output] for output in outputs], is_streamed=False)
    assert ended["status"] == whole["status"] == ("completed" if ended["incomplete_details"] is None else "incomplete")
    assert ended["usage"] == whole["usage"]
    if not is_logged:  # which text an entry stands beside may depend on what arrives together
        assert comparable(ended["output"]) == comparable(whole["output"])


@async_test
async def test_answers_and_events_are_of_the_described_types() -> None:
    """Every field is described, and none that is promised is missing."""
    body = {**LOGGED, "tools": [WEATHER], "text": {"verbosity": "low"}, "tool_choice": "auto", "prompt_cache_key": "k"}
    router = FakeRouter(says(TALK))
    async with serving(router, **able()) as client:
        found = [(Response, await respond(client, **body))]
        found += [(ResponseEvent, event) for event in await stream(client, **body)]
        router.script = lambda _request: [tokens("a", None), FailReason.WORKER_DIED]
        found += [(ResponseEvent, event) for event in await stream(client)]
    for kind, answer in found:
        assert msgspec.to_builtins(msgspec.convert(answer, kind)) == answer


# ----------------------------------------------------------------------------------------------------- failures


@async_test
async def test_a_failure_before_the_first_event_is_a_status() -> None:
    """Queue full, worker lost: OpenAI's error object, for streams too."""
    router = FakeRouter(lambda _request: [FailReason.WORKER_DIED])
    async with serving(router) as client:
        lost = await client.refused(PATH, {"input": "hi", "stream": True}, 503)
        router.refusal = OverloadedError("the queue is full", retry_after_s=1.0)
        full = await client.refused(PATH, {"input": "hi"}, 429)
    assert (lost["code"], full["code"]) == (FailReason.WORKER_DIED, "overloaded")


@async_test
async def test_a_late_failure_ends_the_stream_with_what_there_was() -> None:
    """The item ends, an error event names the reason, and the response has failed."""
    router = FakeRouter(lambda _request: [tokens("ab", None), FailReason.WORKER_DIED])
    async with serving(router) as client:
        events = await stream(client)
        await until(lambda: client.metrics.finished == ["error"])
    assert types(events)[-4:] == ["content_part.done", "output_item.done", "error", "failed"]
    error, response = events[-2], events[-1]["response"]
    assert (error["code"], error["message"]) == (FailReason.WORKER_DIED, "a worker was lost")
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert [(item["status"], item["content"][0]["text"]) for item in response["output"]] == [("incomplete", "ab")]
    assert added_up(events) == response["output"]


@async_test
async def test_a_failure_after_nothing_but_comments_still_begins_the_stream() -> None:
    """Clients take nothing before response.created."""
    router = FakeRouter()
    async with (
        serving(router, config=ServerConfig(keepalive_s=0.01)) as client,
        client.http.post(PATH, json={"input": "hi", "stream": True}) as response,
    ):
        assert (await response.content.readuntil(b"\n\n")).startswith(b":")
        router.streams[0].fail("a worker was lost", FailReason.WORKER_DIED, 0.0)
        rest = await response.read()
    events = [block for block in rest.decode().split("\n\n") if block and not block.startswith(":")]
    names = [block.split("\n")[0].removeprefix("event: ") for block in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-2:] == ["error", "response.failed"]


# ------------------------------------------------------------------------------------------------------- bodies


@async_test
async def test_input_becomes_a_chat() -> None:
    """Instructions lead; parts are text; the items of an answer are one message; results are the tool's; thoughts are left."""
    template = RecordingTemplate()
    template.source = TEMPLATE.source
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "ping", "arguments": "{}", "status": "completed"}
    said = {"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [said]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "pong"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "pong"}]},
        {**call, "call_id": "c3"},
    ]
    async with serving(FakeRouter(says("x")), **able(chat_template=template)) as client:
        await respond(client, instructions="Be kind.", input=items, tools=[WEATHER, PING])
        await respond(client, input="hi", instructions="", chat_template_kwargs={"enable_thinking": False})
    (messages, options), (plain, others) = template.calls
    calls = [{"id": f"c{number}", "type": "function", "function": {"name": "ping", "arguments": "{}"}} for number in (1, 2, 3)]
    assert messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls[:2]},
        {"role": "tool", "content": "pong", "tool_call_id": "c1"},
        {"role": "tool", "content": "pong", "tool_call_id": "c2"},
        {"role": "assistant", "content": None, "tool_calls": calls[2:]},
    ]
    weather = {name: value for name, value in WEATHER.items() if name != "type"}
    assert options["tools"] == [{"type": "function", "function": weather}, {"type": "function", "function": {"name": "ping"}}]
    assert plain == [USER]
    assert others["kwargs"] == {"enable_thinking": False}


@async_test
async def test_what_shapes_a_chats_tokens_shapes_these() -> None:
    """Sampling, limits, seeds and stop strings reach the engine as a chat's do, and mean the same."""
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "logit_bias": {"97": 2.0}, "min_tokens": 2,
              "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1, "stop_token_ids": [98]}  # fmt: skip
    router = FakeRouter(says("hello STOP"))
    async with serving(router) as client:
        answer = await respond(client, **fields, stop="STOP", max_output_tokens=100, **LOGGED, top_logprobs=3)
        await client.chat(**fields, stop="STOP", max_tokens=100, logprobs=True, top_logprobs=3)
        await respond(client)
    ours, chats, plain = (stream.request for stream in router.streams)
    assert (ours.params, ours.prompt) == (chats.params, chats.prompt)
    assert answer["output"][0]["content"][0]["text"] == "hello "
    assert plain.params.num_logprobs is None
    assert plain.params.max_tokens == 256 - len(plain.prompt)


FORMS = [
    ({"text": {"format": {"type": "json_object"}}}, '{"a": 1}', "1"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}}, '{"city": "Ulm"}', "{}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
    ({"tools": [WEATHER, PING], "tool_choice": "required"}, CALL, "hi"),
    ({"tools": [WEATHER, PING], "tool_choice": {"type": "function", "name": "get_weather"}}, CALL, f"{CALL}\n{CALL}"),
    ({"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}, CALL, f"{CALL}\n{CALL}"),
]


@async_test
async def test_forms_and_forced_calls_reach_the_engine() -> None:
    """The grammar allows what was asked for, and refuses what was not."""
    router = FakeRouter(says("x"))
    async with serving(router, **able()) as client:
        for fields, good, bad in FORMS:
            answer = await respond(client, **fields)
            assert follows(router.streams[-1].request, good), fields
            assert not follows(router.streams[-1].request, bad), fields
            sdk.Response.model_validate(answer, strict=True)
        await respond(client, text={"format": {"type": "text"}}, tools=[PING], tool_choice="none")
    assert router.streams[-1].request.params.grammar is None


FAULTY = [
    ({"input": 5}, "input", ""),
    ({"input": []}, "input", ""),
    ({"input": [{"type": "reasoning"}]}, "input", "no message"),
    ({"input": [USER, {"role": "wizard", "content": "x"}]}, "input[1].role", "user"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", ""),
    ({"input": [{"id": "msg_1"}]}, "input[0].role", ""),
    ({"input": [{"role": "user"}]}, "input[0].content", "required"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]", "input_text"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "send the item itself"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type", "function_call_output"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "required"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "required"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "required"),
    ({"input": [USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[1].arguments", "JSON"),
    ({"input": "x" * 5000}, "input", "context length"),
    ({"instructions": 1}, "instructions", ""),
    ({"max_output_tokens": 0}, "max_output_tokens", ""),
    ({"max_output_tokens": 10**6}, "input", "context length"),
    ({"temperature": 9}, "temperature", ""),
    ({"min_tokens": 9, "max_output_tokens": 8}, "min_tokens", ""),
    ({"stop": ""}, "stop", ""),
    ({"model": "other"}, "model", MODEL),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
    ({"include": ["everything"]}, "include[0]", "message.output_text.logprobs"),
    ({"stream_options": {}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "false"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "earlier items"),
    ({"conversation": "conv_1"}, "conversation", "earlier items"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "instructions"),
    ({"background": True}, "background", "stream"),
    ({"truncation": "auto"}, "truncation", "earlier items"),
    ({"truncation": "middle"}, "truncation", "disabled"),
    ({"metadata": {"a": 1}}, "metadata[...]", ""),
    ({"metadata": {str(index): "" for index in range(17)}}, "metadata", "16"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", ""),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
    ({"tools": [PING, {"type": "function"}]}, "tools[1].name", "required"),
    ({"tools": [PING, PING]}, "tools[1].name", "two tools"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
    ({"tools": [PING], "tool_choice": "always"}, "tool_choice", "required"),
    ({"tools": [PING], "tool_choice": {"type": "function", "name": "pong"}}, "tool_choice", "no tool"),
    ({"tools": [PING], "tool_choice": {"type": "web_search_preview"}}, "tool_choice", "function"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format", "json_schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "required"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "thing"}}}}, "text.format", "thing"),
    ({"structured_outputs": {"regex": "[a"}}, "structured_outputs.regex", ""),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "reason"), FAULTY, ids=[f"{param}-{i}" for i, (_, param, _) in enumerate(FAULTY)])
@async_test
async def test_what_is_wrong_is_named_by_its_field(fields: dict[str, Any], param: str, reason: str) -> None:
    """A 400 (404 for the model) in the words of this body, whichever layer found it, before any work."""
    router = FakeRouter()
    changes = {} if "context" in reason else {"max_model_len": 4096}
    async with serving(router, **{**able(), **changes}) as client:
        error = await client.refused(PATH, {"input": "hi", **fields}, 404 if "model" in fields else 400)
    assert error["param"] == param, error
    assert reason in error["message"]
    assert "messages" not in error["message"]
    assert router.streams == []


@async_test
async def test_what_has_no_meaning_here_is_accepted() -> None:
    """Fields that clients send to every server change nothing, and the answer says what holds."""
    fields = {
        "store": True,
        "reasoning": {"effort": "high"},
        "service_tier": "flex",
        "truncation": "disabled",
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "previous_response_id": None,
        "max_tool_calls": 3,
        "top_logprobs": 0,
        "safety_identifier": "s",
        "unknown": 1,
        "text": {"verbosity": "low"},
    }
    async with serving(FakeRouter(says("x"))) as client:
        answer = await respond(client, **fields)
        await stream(client, **fields, stream_options={"include_obfuscation": False})
    assert (answer["store"], answer["reasoning"], answer["service_tier"]) == (False, {"effort": None, "summary": None}, "default")
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}


# ---------------------------------------------------------------------------------------------------- the client


@async_test
async def test_the_official_client_takes_part_in_a_conversation_with_calls() -> None:
    """Its stream helper, its types, its error classes; and its answers go back as input, as its documentation has it."""
    router = FakeRouter(says("Look. " + CALL))
    async with (
        serving(router, **able()) as client,
        openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as official,
    ):
        async with official.responses.stream(model=MODEL, input="hi", tools=[WEATHER]) as events:
            seen = [event.type async for event in events]
            answer = await events.get_final_response()
        message, call = answer.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
        router.script = says("It is fine.")
        history: Any = [USER, *answer.output, result]
        after = await official.responses.create(model=MODEL, input=history, tools=[WEATHER])
        with pytest.raises(openai.BadRequestError) as bad:
            await official.responses.create(model=MODEL, input="hi", previous_response_id=after.id)
    assert (message.type, call.type, answer.output_text) == ("message", "function_call", "Look.")
    assert {"response.output_text.delta", "response.function_call_arguments.delta", "response.completed"} <= set(seen)
    assert after.output_text == "It is fine."
    assert bad.value.param == "previous_response_id"
    assert router.aborted == []
