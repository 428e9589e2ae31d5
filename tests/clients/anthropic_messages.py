"""Anthropic's own client. Prints what it got as JSON. Arguments: URL and model of a server that talks, of one that calls."""

import asyncio
import json
import sys

import anthropic

url, model, tools_url, tools_model = sys.argv[1:]
QUESTION = {"role": "user", "content": "Can you tell me the capital of France?"}
GREEDY = {"temperature": 0}  # a field of the API that this version of the client has no argument for
ASK = {"model": model, "max_tokens": 16, "messages": [QUESTION], "extra_body": GREEDY}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"name": "get_weather", "description": "of a city", "input_schema": SCHEMA}]


def usage(message):
    return message.usage.model_dump(include={"input_tokens", "cache_read_input_tokens", "output_tokens"})


def talk(client):
    whole = client.messages.create(**ASK, system="You know all capitals.")
    with client.messages.stream(**ASK, system="You know all capitals.") as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    begun = client.messages.create(**{**ASK, "messages": [QUESTION, {"role": "assistant", "content": "The capital of"}]})
    return {
        "whole": whole.content[0].text,
        "pieces": pieces,
        "final": final.content[0].text,
        "stop_reasons": [whole.stop_reason, final.stop_reason],
        "usage": [usage(whole), usage(final)],
        "counted": client.messages.count_tokens(model=model, messages=[QUESTION], system="You know all capitals.").input_tokens,
        "begun": begun.content[0].text,
        "stopped": client.messages.create(**ASK, stop_sequences=["Paris"]).model_dump(include={"stop_reason", "stop_sequence"}),
        "request_id": whole._request_id,
    }


def refusals(client):
    found = {}
    for name, fields in {
        "BadRequestError": {"extra_body": {"temperature": 2}},
        "NotFoundError": {"model": "claude-sonnet-4-5"},
    }.items():
        try:
            client.messages.create(**{**ASK, **fields})
        except anthropic.APIStatusError as error:
            found[name] = [type(error).__name__, error.type, error.api_message]
    return found


def call(client):
    ask = {"model": tools_model, "max_tokens": 200, "tools": TOOLS, "messages": [{"role": "user", "content": "How is it?"}]}
    forced = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    whole = client.messages.create(**ask, **forced)
    with client.messages.stream(**ask, **forced) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    (use,) = final.content
    ask["messages"] = [
        *ask["messages"],
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "fine"}]},
    ]
    after = client.messages.create(**{**ask, "max_tokens": 4})
    return {
        "inputs": [whole.content[0].input, use.input],
        "names": [whole.content[0].name, use.name],
        "stop_reasons": [whole.stop_reason, final.stop_reason, after.stop_reason],
        "num_deltas": events.count("input_json"),
        "counted": client.messages.count_tokens(model=tools_model, tools=TOOLS, messages=ask["messages"]).input_tokens,
        "usage": usage(after),
    }


async def leave_one():
    """Four streams at once, one of them left in the middle."""
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:

        async def read(limit):
            async with client.messages.stream(**ASK) as stream:
                text = ""
                async for piece in stream.text_stream:
                    text += piece
                    if len(text) >= limit:
                        break
                return text

        return await asyncio.gather(read(5), *(read(10_000) for _ in range(3)))


with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
    got = {"talk": talk(client), "refusals": refusals(client)}
with anthropic.Anthropic(base_url=tools_url, api_key="none", max_retries=0) as client:
    got["call"] = call(client)
print(json.dumps({**got, "left": asyncio.run(leave_one())}))
