"""/v1/responses through the real command, as openai-python uses it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.process.harness import Server, null_server, server

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "Can you tell me the capital of France?"
ASK: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 16}


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server("--kv-memory", "512MiB") as shared:
        yield shared


def test_whole_streamed_and_chats_answers_agree(client: openai.OpenAI, running: Server) -> None:
    """The same greedy text whole, in events, from the stream helper and as a chat; raw, its log-probabilities and its usage."""
    whole = client.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)
    raw = client.responses.with_raw_response.create(**ASK, extra_headers={"X-Request-Id": "mine"})
    events = list(client.responses.create(**ASK, stream=True))
    with client.responses.stream(**ASK) as helper:
        helped = helper.get_final_response()
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=16
    )
    text = whole.output_text
    assert "Paris" in text
    (message,) = whole.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert "".join(entry.token for entry in part.logprobs or []) == text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs or [])
    assert raw.headers["X-Request-Id"] == "mine"
    assert raw.parse().output_text == helped.output_text == chat.choices[0].message.content == text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert helped.usage is not None
    assert helped.usage.input_tokens_details.cached_tokens > 0
    running.wait_until_empty(1.0)


def test_a_conversation_goes_on_from_the_items_of_its_answers(client: openai.OpenAI) -> None:
    """What was answered is sent back as it came, under instructions; a reference to it is refused with the way to do it."""
    first = client.responses.create(**ASK)
    history: Any = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "And of Italy?"}]
    second = client.responses.create(**{**ASK, "input": history}, instructions="You know all capitals.")
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.output_text
    with pytest.raises(openai.BadRequestError, match="send the earlier items") as bad:
        client.responses.create(**ASK, previous_response_id=first.id)
    assert bad.value.param == "previous_response_id"


def test_streams_of_the_asynchronous_client(running: Server) -> None:
    """Four at once, one of them given up in the middle: all others are whole, and nothing is left."""

    async def stream(official: openai.AsyncOpenAI, limit: int | None = None) -> str:
        text, events = "", await official.responses.create(**ASK, stream=True)
        async with events:
            async for event in events:
                text += event.delta if event.type == "response.output_text.delta" else ""
                if limit is not None and len(text) >= limit:
                    break
        return text

    async def all_streams() -> list[str]:
        async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as official:
            return await asyncio.gather(stream(official, 5), *(stream(official) for _ in range(3)))

    cut, *whole = asyncio.run(all_streams())
    assert len(set(whole)) == 1
    assert whole[0].startswith(cut)
    assert len(cut) < len(whole[0])
    running.wait_until_empty(1.0)


class Trip(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def test_a_pydantic_model_is_parsed(client: openai.OpenAI) -> None:
    """parse() and the stream helper send the model's schema, and get an object of it."""
    ask: Any = {"model": MODEL, "input": "Plan a trip.", "temperature": 0, "text_format": Trip}
    whole = client.responses.parse(**ask)
    with client.responses.stream(**ask) as helper:
        streamed = helper.get_final_response()
    assert isinstance(whole.output_parsed, Trip)
    assert streamed.output_parsed == whole.output_parsed


def test_the_loop_of_calls_and_results() -> None:
    """A forced call streams and follows its tool's schema; its result goes back with its id, and the answer comes."""
    schema = {**Trip.model_json_schema(), "additionalProperties": False}
    tools: Any = [{"type": "function", "name": "plan_trip", "parameters": schema, "strict": True}]
    items: Any = [{"role": "user", "content": "Plan a trip."}]
    with null_server() as running, openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as official:
        ask: Any = {"model": "null", "tools": tools}
        with official.responses.stream(**ask, input=items, tool_choice="required", parallel_tool_calls=False) as helper:
            fragments = [event.delta for event in helper if event.type == "response.function_call_arguments.delta"]
            (call,) = helper.get_final_response().output
        assert call.type == "function_call"
        assert len(fragments) > 5
        assert "".join(fragments) == call.arguments
        jsonschema.validate(json.loads(call.arguments), schema)
        items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "booked"}]
        after = official.responses.create(**ask, input=items, max_output_tokens=4)
        assert (after.status, after.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        running.wait_until_empty(1.0)
